"""How much of a difference is rounding, measured: the model by itself runs again, every result nudged a little.

    as it is     a matrix product  1.0234375    ->  gradients g
    nudged       a matrix product  1.0312500    ->  gradients g'      |g - g'|  of each
    once more    a matrix product  1.0195312    ->  gradients g"      |g - g"|  of each; rounding is the larger

Lines of a mesh add up parts that were rounded each by itself. In bfloat16 that shows, in some gradients by more than
their size: those of keys are sums of large numbers that nearly cancel. How much it shows depends on the model, so no
constant says it. A nudged run moves every result of low precision by up to its last digit, by which two numbers may
differ that were both rounded, forward and backward. One such run may be near by luck, all of several hardly. In float32
and above, what is allowed anyway is far more.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.engine.unsplit.comparing import norm_of, off, outputs_off
from drumline.features.check.by_itself.wanted import PlainResult
from drumline.features.check.gradients.expected import TIMES
from drumline.model.precision import LOW

DRAWS = 4  # nudged runs
_COUNT = 8191  # a prime, so that no rows of a matrix get the same numbers
# They move numbers, and round nothing.
_MOVING = {"_to_copy", "clone", "copy", "cat", "stack", "embedding", "index", "index_select", "gather", "where"}


class Nudge(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Moves every result of low precision by up to its last digit inside, at random, but always alike for a seed.

    >>> ones = torch.ones(1000, dtype=torch.bfloat16)
    >>> with Nudge():
    ...     product = ones * 1
    >>> 0 < (product - 1).abs().max() <= torch.finfo(torch.bfloat16).eps
    tensor(True)
    """

    def __init__(self, seed: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        drawn = random.Random(seed)
        self._numbers = torch.tensor([drawn.uniform(-1.0, 1.0) for _ in range(_COUNT)] * 2)
        self._at = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function, and nudge what it makes again."""
        output = func(*args, **(kwargs or {}))
        schema = func._schema
        if schema.is_mutable or func.overloadpacket.__name__ in _MOVING:
            return output
        if isinstance(output, Tensor):
            return output if schema.returns[0].alias_info is not None else self._moved(output)
        if isinstance(output, tuple):
            return type(output)(self._moved(tensor) if isinstance(tensor, Tensor) else tensor for tensor in output)
        return output

    def _moved(self, tensor: Tensor) -> Tensor:
        count = tensor.numel()
        if tensor.dtype not in LOW or not count or tensor.layout is not torch.strided:
            return tensor
        self._at = (self._at + count) % _COUNT
        self._numbers = self._numbers.to(tensor.device)
        numbers = self._numbers[self._at : self._at + _COUNT].repeat(-(-count // _COUNT))[:count].view(tensor.shape)
        return tensor.float().mul_(numbers.mul_(torch.finfo(tensor.dtype).eps).add_(1.0)).to(tensor.dtype)


@dataclass(frozen=True, slots=True)
class Rounding:
    """How far nudged runs are off: each gradient, the loss and the output; nothing where it was not measured."""

    gradients: Mapping[nn.Parameter, float] = field(default_factory=dict)
    loss: float = 0.0
    output: float = 0.0

    @staticmethod
    def between(wanted: PlainResult | None, nudged: Sequence[PlainResult | None]) -> Rounding:
        """Return by how much runs of the model by itself differ from the first at most."""
        ran = [result for result in nudged if result is not None]
        if wanted is None or not ran:
            return Rounding()
        # What is not there in full, its sketch shows: that is off by about as much.
        whole = [(run.gradients or run.sketches) for run in (wanted, *ran)]
        gradients = {
            param: max(norm_of(each.double() - run[param].double()) for run in whole[1:])
            for param, each in whole[0].items()
            if all(param in run for run in whole)
        }
        losses = max(off(run.outcome.loss, wanted.outcome.loss) for run in ran)
        return Rounding(gradients, losses, max(outputs_off(run.outcome.output, wanted.outcome.output) for run in ran))

    def left(self, what: str, distance: float) -> float:
        """Return how far the "loss" or the "output" is off, 0 if that is rounding.

        >>> Rounding(loss=0.01).left("loss", 0.03), Rounding(loss=0.01).left("loss", 0.05)
        (0.0, 0.05)
        """
        return 0.0 if distance <= TIMES * getattr(self, what) else distance
