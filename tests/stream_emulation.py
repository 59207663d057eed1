"""PipeDream and PipeDream-2BW in one process, written from their papers: plain autograd, and a copy of every version.

Which weights a microbatch sees, counted in updates of a stage s of P:

    pipedream          of microbatch m, all updates up to that of m - (P - s)
    with vertical sync all updates up to that of m - P
    2bw                of step t, all updates up to that of step t - 2

An update with a NaN or an infinity anywhere is left out, and counts as an update that changes nothing. With pipedream
each stage leaves out its own alone.

Shares no code with the executor, except for the seeds of dropout.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from drumline.model.randomness import Randomness

Stage = list[tuple[str, nn.Module]]
Weights = dict[str, Tensor]


@dataclass
class Emulated:
    """What a run did."""

    weights: Weights = field(default_factory=dict)
    losses: list[Tensor] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)  # by microbatch of the run, then by stage
    skipped: dict[int, set[int]] = field(default_factory=dict)  # stages with a NaN, by step


def version_of(kind: str, stage: int, num_stages: int, microbatch: int, per_step: int) -> int:
    """Return how many updates of a stage a microbatch of the run sees."""
    if kind == "pipedream":
        return max(0, microbatch - (num_stages - stage) + 1)
    if kind == "vertical":
        return max(0, microbatch - num_stages + 1)
    return max(0, microbatch // per_step - 1)


def emulate(
    stages: Sequence[Stage],
    kind: str,
    batches: Sequence[tuple[Tensor, Tensor]],
    loss_fn: Callable[[Tensor, Tensor], Tensor],
    optimizers: Callable[[dict[str, nn.Parameter]], Sequence[torch.optim.Optimizer]],
    *,
    num_microbatches: int,
    rate: Callable[[int], float] | None = None,
    first_step: int = 0,
    tied: tuple[str, str] | None = None,
    max_norm: float | None = None,
    dtype: torch.dtype = torch.float32,
    autocast: bool = False,
) -> Emulated:
    """Train by the batches, one step each; forwards see weights in `dtype`, of which updates keep float32 copies.

    With `autocast` every microbatch runs in a context of its own, in bfloat16.
    """
    stages = [[(name, copy.deepcopy(layer).float()) for name, layer in stage] for stage in stages]
    newest = {key: param for stage in stages for key, param in _named(stage)}
    made = optimizers(newest)
    history: list[list[Weights]] = [[_copied(stage, dtype)] for stage in stages]
    found, randomness = Emulated(), Randomness(0, torch.device("cpu"))
    sums: Weights = {}
    for step, (x, y) in enumerate(batches):
        xs, ys = x.chunk(num_microbatches), y.chunk(num_microbatches)
        losses = []
        for index in range(num_microbatches):
            at = step * num_microbatches + index
            numbers = [version_of(kind, number, len(stages), at, num_microbatches) for number in range(len(stages))]
            found.versions.append(numbers)
            seen = [{key: tensor.clone().requires_grad_() for key, tensor in history[stage][number].items()}
                    for stage, number in enumerate(numbers)]  # fmt: skip
            value: Any = xs[index]
            randomness.step = first_step + step
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for stage, weights in zip(stages, seen, strict=True):
                    for name, module in stage:
                        if isinstance(module, nn.Dropout):
                            randomness.apply(index, name)
                        own = {key.removeprefix(f"{name}."): weight for key, weight in weights.items()
                               if key.startswith(f"{name}.")}  # fmt: skip
                        value = functional_call(module, own, (value,))
                loss = loss_fn(value, ys[index])
            losses.append(loss.detach())
            share = torch.tensor(1.0 / num_microbatches) if kind == "2bw" else torch.tensor(1.0)
            torch.autograd.backward(loss, share)
            for key, tensor in ((key, weight) for weights in seen for key, weight in weights.items()):
                assert tensor.grad is not None
                gradient = tensor.grad.float()
                sums[key] = sums[key] + gradient if key in sums else gradient
            if kind == "2bw" and index < num_microbatches - 1:
                continue
            if tied is not None:
                sums[tied[0]] = sums[tied[1]] = sums[tied[0]] + sums[tied[1]]
            bad = [_is_bad(sums, stage) for stage in stages]
            bad[-1] |= not all(bool(tensor.isfinite()) for tensor in (losses if kind == "2bw" else losses[-1:]))
            for at, stage in enumerate(stages):
                for key, parameter in _named(stage):
                    parameter.grad = None if (bad[at] if kind == "pipedream" else any(bad)) else sums[key].clone()
            if any(bad):
                found.skipped.setdefault(step, set()).update(at for at, flag in enumerate(bad) if flag)
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_([item for key, item in newest.items() if tied is None or key != tied[1]],
                                               max_norm)  # fmt: skip
                if tied is not None:
                    newest[tied[1]].grad = newest[tied[0]].grad
            for optimizer in made:
                for group in optimizer.param_groups if rate is not None else ():
                    group["lr"] = rate(step)  # type: ignore[misc]
                optimizer.step()
            sums = {}
            for stage, versions in zip(stages, history, strict=True):
                versions.append(_copied(stage, dtype))
        total = losses[0] * (1.0 / num_microbatches)
        for loss in losses[1:]:
            total = total + loss * (1.0 / num_microbatches)
        found.losses.append(total)
    found.weights = {key: param.detach().to(dtype) for key, param in newest.items()}
    return found


def _named(stage: Stage) -> list[tuple[str, nn.Parameter]]:
    return [(f"{name}.{key}", param) for name, module in stage for key, param in module.named_parameters()]


def _is_bad(gradients: Weights, stage: Stage) -> bool:
    return not all(bool(gradients[key].isfinite().all()) for key, _ in _named(stage))


def _copied(stage: Stage, dtype: torch.dtype) -> Weights:
    return {name: param.detach().clone().to(dtype) for name, param in _named(stage)}
