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

import torch
from torch import Tensor

from drumline.runtime.layout import Layout

_SMALLEST = 64 * 1024


class Slot:
    """One piece of shared memory, mapped; it is unmapped when the last view of it goes.

    >>> slot = Slot(0, new_memory(100), 100)
    >>> slot.views(Layout(0, ((torch.float32, (2, 3)),), None))[0].shape
    torch.Size([2, 3])
    """

    __slots__ = ("_memory", "_views", "number", "room")

    def __init__(self, number: int, fd: int, room: int) -> None:
        """Map the memory behind `fd` and close that."""
        self.number = number
        self.room = room
        try:
            # The tensor keeps the map alive; closing the map by hand would pull the memory from under it.
            self._memory: Tensor = torch.frombuffer(mmap.mmap(fd, room), dtype=torch.uint8)
        finally:
            os.close(fd)
        self._views: dict[Layout, tuple[Tensor, ...]] = {}

    def views(self, layout: Layout) -> tuple[Tensor, ...]:
        """Return the windows of a message's tensors."""
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

    @property
    def num_free(self) -> int:
        """How many messages can go at once, in slots that may have to be made."""
        return self._num_slots - self.num_busy

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
