"""Frozen weights that a recomputed block changes in its forward: a teacher that follows the trained ones.

    with torch.no_grad():
        teacher.mul_(0.9).add_(student, alpha=0.1)     once for every microbatch, not twice

They are treated as buffers are: the recomputation runs on copies of what the first run saw. The first forwards of a few
steps show which weights change; only code of the user's own may change them. Weights of many bytes are not copied to
find out: if they change, they are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.catalogue import whole_name
from drumline.model.patches import put_in
from drumline.model.watch.keeping import MOST_FROZEN_BYTES, of_own_code, sample_of

_LOOKS = 3  # steps
_Place = tuple[str, nn.Module, str]  # the name, and where it is


class FrozenWeights:
    """The frozen weights of some blocks that their forwards may change."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._places = list(_places_in(blocks))
        self._modules = [block.module for block in blocks]
        self._changing: dict[tuple[bool, ...], set[int]] = {}  # by mode
        self._marks: list[tuple[int, tuple[int, int, Tensor]]] = []
        self._num_steps = 0
        self._looks = bool(self._places)  # whether the next forward is looked at

    def begin(self) -> None:
        """Begin a step: the first forwards of the first few steps are looked at.

        A teacher that begins as a copy of its student does not change before the student does.
        """
        self._num_steps += 1
        self._looks = bool(self._places) and self._num_steps <= _LOOKS

    def save(self) -> dict[int, Tensor]:
        """Return copies of the weights that may change; in a forward that is looked at, of all that are frozen."""
        looks = self._looks or not self._num_steps
        if not self._places or not (looks or any(self._changing.values())):
            return {}
        wanted = self._changing.setdefault(self._mode(), set())
        if looks:
            frozen = {at for at in range(len(self._places)) if not self._at(at).requires_grad}
            self._marks = [(at, _mark(self._at(at))) for at in frozen - wanted]
            if sum(self._at(at).nbytes for at in frozen) <= MOST_FROZEN_BYTES:
                wanted = frozen
        return {at: self._at(at).detach().clone() for at in wanted}

    def learn(self, saved: dict[int, Tensor]) -> None:
        """After the forward that followed `save`, keep the copies of what it changed."""
        if not self._marks:
            return
        known = self._changing[self._mode()]
        changed = {at for at, mark in self._marks if not _is_same(mark, self._at(at))}
        self._marks, self._looks = [], False
        for at in changed:
            if at not in saved:
                raise ModelError(
                    f"the forward of a recomputed block changes the frozen parameter {self._places[at][0]!r}, which is "
                    "too large to be copied",
                    expected="a recomputed block to find again what it found",
                    fix='register it as a buffer, or do not recompute the block: checkpoint="none"',
                )
        known |= changed
        for at in saved.keys() - known:
            del saved[at]

    def undo(self, saved: dict[int, Tensor]) -> None:
        """Restore the weights, for a forward that starts again."""
        with torch.no_grad():
            for at, copy in saved.items():
                self._at(at).copy_(copy)

    def as_they_were(self, saved: dict[int, Tensor]) -> AbstractContextManager[None]:
        """Run on the saved copies, then on the weights as they are now."""
        return put_in(
            (self._places[at][1]._parameters, self._places[at][2], nn.Parameter(copy, requires_grad=False))
            for at, copy in saved.items()
        )

    def _at(self, at: int) -> nn.Parameter:
        _, module, key = self._places[at]
        parameter = module._parameters[key]
        assert parameter is not None
        return parameter

    def _mode(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._modules)


def _places_in(blocks: Sequence[Block]) -> Iterator[_Place]:
    """Yield the places of weights that code of the user's own may change."""
    for block in blocks:
        own_ids = of_own_code(block.module.modules())
        changed: frozenset[str] = getattr(block.module, "changed", frozenset())
        for path, module in block.module.named_modules():
            for key, parameter in module._parameters.items():
                name = whole_name(path, key)
                if parameter is not None and (id(module) in own_ids or name in changed):
                    yield name, module, key


def _mark(weight: Tensor) -> tuple[int, int, Tensor]:
    return weight._version, weight.data_ptr(), sample_of(weight)


def _is_same(mark: tuple[int, int, Tensor], weight: Tensor) -> bool:
    version, pointer, sample = mark
    return weight._version == version and weight.data_ptr() == pointer and torch.equal(sample, sample_of(weight))
