"""Buffers that a forward changes (running statistics) under recomputation: changed once per microbatch, not twice.

Before a forward that will be recomputed, the buffers that forwards are known to change are copied. The recomputation
runs on those copies, so it sees what the first run saw, and afterwards the current ones are put back untouched.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor, nn

Place = tuple[nn.Module, str]


class Buffers:
    """The buffers of some modules, and which of them forwards change."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        seen = dict.fromkeys(part for module in modules for part in module.modules())
        self.places: list[Place] = [
            (part, name) for part in seen for name, buffer in part._buffers.items() if buffer is not None
        ]
        self.changing: set[int] = set(range(len(self.places)))
        self._versions: list[tuple[int, int]] | None = None
        self._asked = self._marks()

    def save(self) -> dict[int, Tensor]:
        """Return copies of the buffers that may change; the first time that is all of them."""
        if not self.places:
            return {}
        self._versions = self._marks()
        return {index: self._at(index).detach().clone() for index in self.changing}

    def learn(self) -> None:
        """After the forward that followed `save`: remember which buffers it changed."""
        if self._versions is not None:
            now = self._marks()
            self.changing = {index for index, mark in enumerate(now) if mark != self._versions[index]}
            self._versions = None

    def changed_lately(self) -> bool:
        """Whether any buffer has changed since this was last asked; the first time, since the beginning."""
        before, self._asked = self._asked, self._marks()
        return before != self._asked

    @contextmanager
    def as_they_were(self, saved: dict[int, Tensor]) -> Iterator[None]:
        """Run on the saved copies, then put the current buffers back."""
        current = [(index, self._at(index)) for index in saved]
        for index, copy in saved.items():
            module, name = self.places[index]
            module._buffers[name] = copy
        try:
            yield
        finally:
            for index, buffer in current:
                module, name = self.places[index]
                module._buffers[name] = buffer

    def _at(self, index: int) -> Tensor:
        module, name = self.places[index]
        buffer = module._buffers[name]
        assert buffer is not None
        return buffer

    def _marks(self) -> list[tuple[int, int]]:
        return [(id(self._at(index)), self._at(index)._version) for index in range(len(self.places))]
