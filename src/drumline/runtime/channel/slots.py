"""Memory that two ranks of one host share, in slots: the sender fills one, the receiver empties it and gives it back.

    sender                           receiver
    free slot, copy in ──header──►   copy out
    free again         ◄──credit──

A slot is anonymous memory: its file descriptor travels once, over the link, both sides map it and close the descriptor.
Nothing has a name, so nothing is left behind however a rank ends. A message that does not fit makes a free slot larger.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from ctypes import memmove

import torch
from torch import Tensor

from drumline.runtime.channel.layout import MessageLayout

_SMALLEST = 64 * 1024


class Slot:
    """One piece of shared memory, mapped; it is unmapped when the last window into it goes.

    >>> slot = Slot(0, new_memory(100), 100)
    >>> layout = MessageLayout(0, ((torch.float32, (2,)), (torch.bool, ())), None)
    >>> slot.fill(layout, [torch.ones(2), torch.tensor(True)])
    >>> slot.copies(layout, torch.device("cpu"))
    (tensor([1., 1.]), tensor(True))
    """

    __slots__ = ("_address", "_memory", "_views", "number", "room")

    def __init__(self, number: int, fd: int, room: int) -> None:
        """Map the memory behind `fd` and close that."""
        self.number = number
        self.room = room
        try:
            # The tensor keeps the map alive; closing the map by hand would pull the memory from under it.
            self._memory: Tensor = torch.frombuffer(mmap.mmap(fd, room), dtype=torch.uint8)
        finally:
            os.close(fd)
        self._address = self._memory.data_ptr()
        self._views: dict[MessageLayout, tuple[Tensor, ...]] = {}

    def fill(self, layout: MessageLayout, tensors: Sequence[Tensor]) -> None:
        """Copy a message in."""
        for index, tensor in enumerate(tensors):
            # A plain copy takes half of the time of a tensor's, which matters: small messages are many.
            if tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg() and not tensor.is_conj():
                memmove(self._address + layout.offsets[index], tensor.data_ptr(), layout.sizes[index])
            else:
                self._windows(layout)[index].copy_(tensor.detach())

    def copies(self, layout: MessageLayout, device: torch.device) -> tuple[Tensor, ...]:
        """Copy a message out, to tensors of its own on `device`; when this returns the slot may be filled again."""
        windows = self._windows(layout)
        if device.type != "cpu":
            return tuple([window.to(device) for window in windows])
        tensors = []
        for window, offset, size in zip(windows, layout.offsets, layout.sizes, strict=True):
            tensor = torch.empty_like(window)
            memmove(tensor.data_ptr(), self._address + offset, size)
            tensors.append(tensor)
        return tuple(tensors)

    def _windows(self, layout: MessageLayout) -> tuple[Tensor, ...]:
        views = self._views.get(layout)
        if views is None:
            views = layout.views(self._memory)
            if layout.is_kept:
                self._views[layout] = views
        return views


def new_memory(room: int) -> int:
    """Return the descriptor of fresh anonymous memory; its pages come into being when they are written to."""
    fd = os.memfd_create("drumline")
    os.ftruncate(fd, room)
    return fd


class Slots:
    """The sender's slots of one directed edge: at most `num_slots`, made when they are needed.

    >>> slots = Slots(2)
    >>> first, fd = slots.take(100_000)
    >>> first.room, fd is None
    (131072, False)
    >>> second, _ = slots.take(10)
    >>> slots.take(10) is None
    True
    >>> slots.give_back(first.number)
    >>> slots.take(200)[1] is None
    True
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._slots: list[Slot] = []
        self._free: list[Slot] = []

    @property
    def num_busy(self) -> int:
        """How many hold a message that was not taken up."""
        return len(self._slots) - len(self._free)

    def take(self, room: int) -> tuple[Slot, int | None] | None:
        """Return a free slot with that much room and, if the receiver does not know it yet, its descriptor."""
        free = self._free
        # The last that came back is the likeliest to be in the cache.
        for index in range(len(free) - 1, -1, -1):
            if free[index].room >= room:
                return free.pop(index), None
        if len(self._slots) < self._num_slots:
            slot, fd = self._make(len(self._slots), room)
            self._slots.append(slot)
            return slot, fd
        if not free:
            return None
        number = free.pop().number
        self._slots[number], fd = self._make(number, room)
        return self._slots[number], fd

    def give_back(self, number: int) -> None:
        """Take a slot back that the receiver has emptied."""
        self._free.append(self._slots[number])

    def _make(self, number: int, room: int) -> tuple[Slot, int]:
        room = max(_SMALLEST, 1 << (room - 1).bit_length())
        fd = new_memory(room)
        return Slot(number, os.dup(fd), room), fd
