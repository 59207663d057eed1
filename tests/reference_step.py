"""The same step in one process: what a pipelined step is compared with.

Every microbatch runs through the whole model at once. Its gradients are then added stage by stage in the order of the
program's W (or B) actions, which is the order in which the pipelined stages add theirs: so the two agree to the last
bit. A parameter that several stages share is the exception: here its uses are added microbatch by microbatch, there
rank by rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.program import Program
from drumline.model.block import Block
from drumline.model.precision import Precision, gradient_dtype
from drumline.model.randomness import Randomness, may_draw
from drumline.runtime.batch import cut as cut_batch
from drumline.runtime.batch import num_rows
from drumline.verification.one_process import accumulation_order

Weight = Callable[[Any], float | Tensor]


def reference_step(
    stages: Sequence[Sequence[Block]],
    program: Program,
    batch: Any,
    target: Any,
    loss_fn: Callable[..., Tensor],
    randomness: Randomness,
    *,
    loss_weight: Weight | None = None,
    precision: str = "fp32",
    master_weights: bool = False,
    scale: float = 1.0,
) -> Tensor:
    """Run one step without a pipeline: adds to the parameters' gradients and returns the loss.

    Under autocast every microbatch has a context of its own. With `scale` the gradients come out multiplied by it.
    """
    inputs = cut_batch(batch, program.num_microbatches)
    targets = cut_batch(target, program.num_microbatches, what="the target")
    weights = [num_rows(item) if loss_weight is None else loss_weight(item) for item in targets]
    parts = [number / sum(weights) for number in weights]
    blocks = [block for stage in stages for block in stage]
    owned = _owned(stages)
    parameters = [param for stage in owned for param in stage]
    for param in parameters:
        param.grad_dtype = torch.float32 if master_weights else param.dtype
    numbers = Precision(precision, parameters[0].device)
    found: list[Mapping[nn.Parameter, Tensor | None]] = []
    total: Tensor | None = None
    with randomness.kept_aside():
        for microbatch, (value, wanted, share) in enumerate(zip(inputs, targets, parts, strict=True)):
            with numbers.autocast:
                for block in blocks:
                    if may_draw(block.module):
                        randomness.apply(microbatch, block.name)
                    value = block.module(value)
                loss = numbers.full(loss_fn(value, wanted))
            weight = torch.as_tensor(share, dtype=loss.dtype, device=loss.device)
            gradients = torch.autograd.grad(loss, parameters, weight * scale, allow_unused=True)
            found.append(dict(zip(parameters, gradients, strict=True)))
            part = loss.detach() * weight
            total = part if total is None else total + part
    for stage, mine in enumerate(owned):
        for microbatch in accumulation_order(program, stage):
            for parameter in mine:
                gradient = found[microbatch][parameter]
                if gradient is not None:
                    gradient = gradient.to(gradient_dtype(parameter), copy=True)
                    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    assert total is not None
    return total


def _owned(stages: Sequence[Sequence[Block]]) -> list[list[nn.Parameter]]:
    """Return the trainable parameters of every stage; one that several stages share belongs to the first of them."""
    seen: set[nn.Parameter] = set()
    found = []
    for stage in stages:
        here = dict.fromkeys(param for block in stage for param in block.module.parameters() if param.requires_grad)
        found.append([param for param in here if param not in seen])
        seen.update(here)
    return found
