"""Compare buffers that the first step has changed between the lines of a mesh, of which each sees a part of the batch.

::

    running mean    dp 0: 0.31   dp 1: 0.28    refused: a checkpoint would hold one of them
    calls           dp 0: 4      dp 1: 4       the same on all lines
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

from drumline.channel.lines.axes import Axes
from drumline.core.errors import ModelError
from drumline.engine.ranks.agreement import first_difference
from drumline.engine.ranks.observer import Observer
from drumline.model.catalogue import Place
from drumline.runtime.step import Step


class LineBuffers(Observer):
    """The buffers of this rank that a state holds; those that forwards change must be the same on all lines."""

    def __init__(self, axes: Axes, places: Iterable[Place]) -> None:
        self._axes = axes
        # A table that is made again for longer rows is not saved.
        self._places = [place for place in places if not place.is_parameter and place.saved]
        self._marks: list[tuple[int, int]] | None = None
        self._is_done = not axes.is_mesh

    @property
    def is_idle(self) -> bool:
        """Whether there are no other lines, or they were compared."""
        return self._is_done

    def begin(self, step: Step) -> None:
        """Note how the buffers are before the first step."""
        if not self._is_done:
            self._marks = [_mark(place.tensor) for place in self._places]

    def moved(self) -> None:
        """Look at nothing more: the blocks here are others now."""
        self._is_done = True

    def end(self, step: Step) -> None:
        """Compare what the step has changed; all ranks call it alike, and raise the same error."""
        if self._is_done or self._marks is None:
            return
        self._is_done = True
        pairs = zip(self._places, self._marks, strict=True)
        changed = {place.name: _digest(place.tensor) for place, mark in pairs if _mark(place.tensor) != mark}
        difference = first_difference(self._axes.exchanged("drumline/buffers", changed))
        if difference is not None:
            first, rank, name = difference
            raise ModelError(
                f"a forward changes the buffer {name}, and {self._axes.named(first)} and {self._axes.named(rank)} have "
                "different values of it after the first step",
                expected="buffers that all lines of a mesh change in the same way: each line sees a part of the batch",
                fix="leave the buffer out of the state (persistent=False), or train on one line",
            )


def _mark(tensor: Tensor | None) -> tuple[int, int]:
    return id(tensor), 0 if tensor is None or tensor.is_inference() else tensor._version


def _digest(tensor: Tensor | None) -> str:
    if tensor is None:
        return ""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().tobytes(), digest_size=8).hexdigest()
