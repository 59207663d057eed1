"""State held by several stages, or several copies of one: a forward that changes it would be seen in a different order.

    one process     F(0) changes, F(3) reads │ F(0) changes, F(3) reads       microbatch by microbatch
    a pipeline      F(0) changes │ F(0) changes │ F(0) changes, F(3) reads    stage 3 reads what later ones left

So such changes are refused, and those of a buffer of which other ranks have copies: these would differ from then on.
They are detected by value after the first steps, if stages share a buffer, and by version after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drumline.core.errors import ModelError
from drumline.engine.ranks.observer import Observer
from drumline.engine.stages.engine import Engine
from drumline.model.block import Block
from drumline.model.catalogue import Place, places_in
from drumline.model.watch.keeping import sample_of
from drumline.model.weights.tied import HeldTensor, Ties
from drumline.runtime.stage import Stage
from drumline.runtime.step import Step

_BY_VALUE = 2  # steps that compare tensors by value: some changes bypass the version


class _BufferCopy(NamedTuple):
    tensor: HeldTensor
    place: Place
    block: str


class SharedBuffers(Observer):
    """The buffers that this process's stages share with others."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._num_steps = 0
        self._before: list[tuple[Tensor | None, int, Tensor | None]] = []
        self.moved()

    def moved(self) -> None:
        """Find what the stages here share with others."""
        ties, stages = self._engine.assembly.ties, list(self._engine.stages())
        self._copies = list(_copies_of(ties, stages))

    @property
    def is_idle(self) -> bool:
        """Whether the stages here share nothing."""
        return not self._copies

    def begin(self, step: Step) -> None:
        """Record the state before a step."""
        by_value = self._num_steps < _BY_VALUE
        tensors = [(copy.place.tensor, copy.tensor.is_parameter) for copy in self._copies]
        self._before = [
            (t, 0 if t is None else _version(t), None if t is None or not by_value else _values(t, few=few))
            for t, few in tensors
        ]
        self._num_steps += 1

    def end(self, step: Step) -> None:
        """Refuse changes made by the step."""
        for buffer_copy, (tensor, version, copy) in zip(self._copies, self._before, strict=True):
            now = buffer_copy.place.tensor
            changed = now is not tensor or (now is not None and _version(now) != version)
            few = buffer_copy.tensor.is_parameter
            if changed or (copy is not None and now is not None and not torch.equal(copy, _values(now, few=few))):
                self._refuse(buffer_copy)
        self._before = []

    def _refuse(self, copy: _BufferCopy) -> None:
        what = "frozen parameter" if copy.tensor.is_parameter else "buffer"
        if copy.tensor.is_copied:
            raise ModelError(
                f"the forward of block {copy.block!r} changes the {what} {copy.tensor.name!r}, which several ranks "
                "hold",
                expected=f"every {what} to stay unchanged if several ranks hold it",
                fix="give each block its own, and choose a schedule with one copy of each stage",
            )
        stages = ", ".join(map(str, copy.tensor.stages))
        raise ModelError(
            f"the forward of block {copy.block!r} changes the {what} {copy.tensor.name!r}, which stages {stages} hold",
            expected=f"a changing {what} to belong to one stage, which sees all microbatches in order",
            fix="keep it in one block, or put all blocks that use it into one stage (cuts=, balance=)",
        )


def _copies_of(ties: Ties, stages: Sequence[Stage]) -> Iterator[_BufferCopy]:
    for block in (block for stage in stages for block in stage.blocks):
        for place in places_in(block):
            tensor = ties.find(place.name)
            if tensor is None or not (tensor.is_tied or tensor.is_copied):
                continue
            if place.tensor is None or not place.tensor.requires_grad:
                yield _BufferCopy(tensor, place, block.name)


def _values(tensor: Tensor, *, few: bool) -> Tensor:
    """Return what to compare of a tensor: of a weight, a few elements."""
    return sample_of(tensor) if few else tensor.detach().clone()


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def refuse_hidden(cuts: Iterable[Sequence[Block]]) -> None:
    """Refuse a block that holds another stage's buffer as a plain attribute: it would not see changes made there."""
    owners: dict[int, tuple[int, str]] = {}
    stages = list(cuts)
    for at, blocks in enumerate(stages):
        for place in (spot for block in blocks for spot in places_in(block)):
            if not place.is_parameter:
                owners.setdefault(id(place.tensor), (at, place.name))
    for at, blocks in enumerate(stages):
        for block in blocks:
            for module in block.module.modules():
                for key, tensor in vars(module).items():
                    owner, name = owners.get(id(tensor), (at, "")) if isinstance(tensor, Tensor) else (at, "")
                    if owner != at:
                        raise ModelError(
                            f"block {block.name!r} holds the buffer {name!r} of another stage in its attribute {key!r}",
                            expected="each buffer to be registered in the block that uses it",
                            fix=f"register it there too: self.register_buffer({key!r}, ...)",
                        )
