"""The bytes that a rank really holds for later backwards: every storage once, without parameters and inputs.

Autograd shows each tensor that it keeps, and when it frees it. In addition, stages keep what W needs and the inputs of
recomputed segments. Tensors received from another rank, or from the batch, are counted separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from drumline.model.quantised.packed import parts_of
from drumline.model.values import pack
from drumline.runtime.stage import Stage


class SavedTensor:
    """A tensor kept by autograd; it tells the scale when it is freed."""

    __slots__ = ("scale", "tensor", "version")

    def __init__(self, scale: Scale, tensor: Tensor) -> None:
        self.scale = scale
        # Without its graph: a graph that keeps what it has made, and whose backward never frees it, would hold itself.
        self.tensor = tensor.detach()
        self.version = tensor._version
        scale.add(tensor, +1)

    def taken(self) -> Tensor:
        """Return the tensor; refuse it, as autograd would, if it was changed in place meanwhile."""
        if self.tensor._version != self.version:
            raise RuntimeError("a tensor that a backward needs has been modified by an inplace operation")
        return self.tensor

    def __del__(self) -> None:
        self.scale.add(self.tensor, -1)


class Scale:
    """Counts the bytes that the stages of one rank hold."""

    def __init__(self, stages: Iterable[Stage]) -> None:
        self._stages = list(stages)
        for stage in self._stages:
            stage.at_peak = self.weigh
        self._num_users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._state_places: set[int] = set()
        self._batch_places: set[int] = set()
        self._inputs: dict[tuple[int, int], set[int]] = {}
        self.peak = 0  # most bytes held at once since `begin` or the last action

    def begin(self, *values: Any) -> None:
        """Start a step on a batch, which is not counted."""
        self.peak = 0
        self.ignore(*values)

    def add(self, tensor: Tensor, change: int) -> None:
        """Record that autograd keeps a tensor, or has freed it; tensors of a trace hold no memory."""
        if isinstance(tensor, FakeTensor):
            return
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        self._sizes[place] = storage.nbytes()
        self._num_users[place] = self._num_users.get(place, 0) + change

    def ignore(self, *values: Any) -> None:
        """Do not count what came with the batch."""
        self._batch_places = self._places(tensor for value in values for tensor in pack(value)[0])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what autograd keeps of the forwards inside."""
        modules = [block.module for stage in self._stages for block in stage.blocks]
        states = (param for module in modules for param in (*module.parameters(), *module.buffers()))
        self._state_places = {
            part.untyped_storage().data_ptr() for state in states for part in parts_of(state).values()
        }
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: SavedTensor(self, tensor), SavedTensor.taken):
            yield

    def weigh(self) -> int:
        """Return the bytes that are held now."""
        held_places = set(self.kept_bytes())
        alive: dict[tuple[int, int], set[int]] = {}
        for stage in self._stages:
            held_places |= self._places(stage.beside())
            for microbatch, passes in stage.passes.items():
                # After I, the first segment's leaves are gone, but W may still need what was received.
                first = self._places(passes[0].leaves)
                alive[stage.index, microbatch] = first or self._inputs.get((stage.index, microbatch), set())
                for this in passes:
                    held_places |= self._places(this.leaves)
        self._inputs = alive
        size = sum(
            self._sizes[place]
            for place in held_places.difference(self._state_places, self._batch_places, *alive.values())
        )
        self.peak = max(self.peak, size)
        return size

    def weigh_action(self) -> tuple[int, int]:
        """Return the bytes held now, after an action, and the most since the previous action."""
        size = self.weigh()
        peak, self.peak = self.peak, size
        return size, peak

    def kept_bytes(self) -> dict[int, int]:
        """Return the bytes of each storage that autograd or a tape keeps, without parameters and the batch."""
        held_places = {place for place, count in self._num_users.items() if count > 0}
        for stage in self._stages:
            for this in (turn for passes in stage.passes.values() for turn in passes):
                if this.tape is not None:
                    for record in this.tape.records:
                        held_places |= self._places(pack((record.inputs, list(record.gradients)))[0])
                    held_places |= self._places(gradient for _, gradient in this.tape.early)
        return {place: self._sizes[place] for place in held_places.difference(self._state_places, self._batch_places)}

    def _places(self, tensors: Iterable[Tensor]) -> set[int]:
        places = set()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            self._sizes[storage.data_ptr()] = storage.nbytes()
            places.add(storage.data_ptr())
        return places
