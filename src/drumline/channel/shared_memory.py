"""Messages between ranks of one host: the payload in shared memory, its header over the mesh.

    send                                       take
    copy the tensors into a free slot          copy them out of it
    header: slot, layout, key, stamps ──────►  credit: the slot is free, sent with the next message back

If no slot is free, a message is parked with its tensors and moves when a credit arrives: sending never blocks. If a
receiver waits for a message while all slots hold others, it first copies those out, so that any order works.

The memory that two ranks share is divided into slots: the sender fills one, the receiver empties it and returns it. A
slot is anonymous memory: its file descriptor travels once over the link, then both sides map it and close the
descriptor. Nothing has a name, so nothing remains however a rank ends. A message that does not fit enlarges a free
slot.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections import deque
from collections.abc import Sequence
from ctypes import memmove
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drumline.channel.channel import Delivery
from drumline.channel.layout import MessageLayout
from drumline.channel.mesh_channel import FIRST_MESSAGE_KIND, KEY_BYTES, MeshChannel
from drumline.core.action import Action
from drumline.core.errors import RunError

_SMALLEST = 64 * 1024


class Slot:
    """One mapped piece of shared memory; it is unmapped when the last view of it is freed.

    >>> slot = Slot(0, new_memory(100), 100)
    >>> layout = MessageLayout(0, ((torch.float32, (2,)), (torch.bool, ())), None)
    >>> slot.fill(layout, [torch.ones(2), torch.tensor(True)])
    >>> slot.copies(layout, torch.device("cpu"))
    (tensor([1., 1.]), tensor(True))
    """

    __slots__ = ("_address", "_memory", "_views", "number", "room")

    def __init__(self, number: int, fd: int, room: int) -> None:
        """Map the memory of `fd` and close `fd`."""
        self.number = number
        self.room = room
        try:
            # The tensor keeps the map alive; closing the map by hand would remove the memory under it.
            self._memory: Tensor = torch.frombuffer(mmap.mmap(fd, room), dtype=torch.uint8)
        finally:
            os.close(fd)
        self._address = self._memory.data_ptr()
        self._views: dict[MessageLayout, tuple[Tensor, ...]] = {}

    def fill(self, layout: MessageLayout, tensors: Sequence[Tensor]) -> None:
        """Copy a message in."""
        for index, tensor in enumerate(tensors):
            # A plain copy takes half the time of a tensor's, which matters for many small messages.
            if tensor.is_contiguous() and tensor.is_cpu and not tensor.is_neg() and not tensor.is_conj():
                memmove(self._address + layout.offsets[index], tensor.data_ptr(), layout.sizes[index])
            else:
                self._windows(layout)[index].copy_(tensor.detach())

    def copies(self, layout: MessageLayout, device: torch.device) -> tuple[Tensor, ...]:
        """Copy a message to new tensors on `device`; after this returns, the slot may be filled again."""
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
    """Return the descriptor of new anonymous memory; its pages are allocated when they are written."""
    fd = os.memfd_create("drumline")
    os.ftruncate(fd, room)
    return fd


class Slots:
    """The sender's slots of one directed edge: at most `num_slots`, created when needed.

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
        """The number of slots whose message was not taken yet."""
        return len(self._slots) - len(self._free)

    def take(self, room: int) -> tuple[Slot, int | None] | None:
        """Return a free slot with that much room and, if the receiver does not know it yet, its descriptor."""
        free = self._free
        # The last slot that came back is the most likely to be in the cache.
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
        """Take back a slot that the receiver has emptied."""
        self._free.append(self._slots[number])

    def _make(self, number: int, room: int) -> tuple[Slot, int]:
        room = max(_SMALLEST, 1 << (room - 1).bit_length())
        fd = new_memory(room)
        return Slot(number, os.dup(fd), room), fd


_MESSAGE, _CREDITS, _SLOT = range(FIRST_MESSAGE_KIND, FIRST_MESSAGE_KIND + 3)
_HEADER = struct.Struct(f"<BBH{KEY_BYTES}sqq")  # kind, slot, layout, key, made, sent; after it, credits: a byte each
_KEY = slice(4, 4 + KEY_BYTES)
_NEW_SLOT = struct.Struct("<BBQ")  # kind, slot, room; the memory's descriptor travels with it


class _Parked(NamedTuple):
    layout: MessageLayout
    key: bytes
    tensors: Sequence[Tensor]
    made_ns: int


class _MemoryEdge:
    """This rank's side of the two directed edges between it and a peer."""

    def __init__(self, num_slots: int) -> None:
        # Sending.
        self.slots = Slots(num_slots)
        self.parked: deque[_Parked] = deque()
        # Receiving: the known slots, how many hold messages, and which are empty again without the peer knowing.
        self.peer_slots: dict[int, Slot] = {}
        self.num_held = 0
        self.credits = bytearray()


# A message that arrived: its header and layout while it is in its slot, or the copy of it.
_Arrived = tuple[bytes, MessageLayout] | Delivery


class SharedMemoryChannel(MeshChannel[_Arrived]):
    """Carries messages between ranks on one host; arriving tensors go to `device`.

    Arguments for connecting, such as the store, go to `ControlMesh`.
    """

    name = "shared-memory"

    def __init__(
        self, rank: int, num_ranks: int, *, device: torch.device | str = "cpu", num_slots: int = 4, **connecting: Any
    ) -> None:
        if not 1 <= num_slots <= 256:
            raise RunError(f"num_slots is {num_slots}", expected="1 to 256")
        super().__init__(rank, num_ranks, **connecting)
        self._edges = {peer: _MemoryEdge(num_slots) for peer in self.links}
        elsewhere = sorted(peer for peer, link in self.links.items() if not link.carries_fds)
        if elsewhere:
            self.close()
            raise RunError(
                f"{self.naming.rank(rank)} does not share a host with {self.naming.listed(elsewhere)}",
                fix='use transport="gloo" or "nccl" between hosts',
            )
        self._device = torch.device(device)
        self._num_slots = num_slots
        self._num_parked = 0
        self.on(_MESSAGE, self._on_message)
        self.on(_CREDITS, self._on_credits)
        self.on(_SLOT, self._on_slot)

    def send(self, receive: Action, target: int, tensors: Sequence[Tensor], form: Any) -> None:
        """Copy a message into shared memory, or park it; a form must not change after it is used."""
        made_ns = self.now()
        edge = self._edges[target]
        layout = self._layouts[target].find(tensors, form)
        key = self._key(receive)
        if self._num_parked or edge.slots.num_busy == self._num_slots:
            self.pump()  # credits may have arrived
        if edge.parked or not self._dispatch(target, edge, layout, key, tensors, made_ns):
            edge.parked.append(_Parked(layout, key, tuple(tensors), made_ns))
            self._num_parked += 1

    def _dispatch(
        self, target: int, edge: _MemoryEdge, layout: MessageLayout, key: bytes, tensors: Sequence[Tensor], made_ns: int
    ) -> bool:
        """Fill a slot and announce it; return False if none is free."""
        free = edge.slots.take(layout.room)
        if free is None:
            return False
        slot, fd = free
        if fd is not None:
            self.send_packet(target, _NEW_SLOT.pack(_SLOT, slot.number, slot.room), (fd,))
        self._tell_layout(target, layout)
        slot.fill(layout, tensors)
        packet = _HEADER.pack(_MESSAGE, slot.number, layout.number, key, made_ns, self.now())
        if edge.credits:
            packet += edge.credits
            edge.credits.clear()
        self.send_packet(target, packet)
        return True

    def take(self, receive: Action, source: int) -> Delivery | None:
        """Copy a message out of shared memory, if it is there."""
        key, inbox = self._key(receive), self._inbox[source]
        if self._num_parked:
            self.pump()
        while key not in inbox and self.look():
            pass
        arrived = self._pick(source, key)
        return None if arrived is None else self._copy_out(source, arrived)

    def _copy_out(self, source: int, arrived: _Arrived) -> Delivery:
        if isinstance(arrived, Delivery):
            return arrived
        packet, layout = arrived
        arrived_ns = self.now()
        edge = self._edges[source]
        _, slot, _, _, made_ns, sent_ns = _HEADER.unpack_from(packet)
        tensors = edge.peer_slots[slot].copies(layout, self._device)
        edge.num_held -= 1
        edge.credits.append(slot)
        # Credits travel with the next message to the sender, unless it might run out of slots before.
        if len(edge.credits) * 2 >= self._num_slots:
            self._send_credits(source, edge)
        return Delivery(tensors, layout.form, made_ns, sent_ns, arrived_ns, layout.num_bytes)

    def _send_credits(self, source: int, edge: _MemoryEdge) -> None:
        self.send_packet(source, bytes((_CREDITS,)) + edge.credits)
        edge.credits.clear()

    def _before_sleep(self) -> None:
        for source, edge in self._edges.items():
            if edge.num_held == self._num_slots:
                inbox = self._inbox[source]
                for key, arrived in inbox.items():
                    inbox[key] = self._copy_out(source, arrived)
                again = ((key, self._copy_out(source, arrived)) for key, arrived in self._again[source])
                self._again[source] = deque(again)
            if edge.credits:
                self._send_credits(source, edge)

    def _unsent(self) -> tuple[int, bytes] | None:
        if self._num_parked:
            for target, edge in self._edges.items():
                if edge.parked:
                    return target, edge.parked[0].key
        return None

    def close(self) -> None:
        """Say goodbye and release the memory."""
        super().close()
        self._edges.clear()

    def _on_message(self, source: int, packet: bytes, fds: list[int]) -> None:
        edge = self._edges[source]
        edge.num_held += 1
        if len(packet) > _HEADER.size:
            self._credit(source, edge, packet[_HEADER.size :])
        self._arrive(source, packet[_KEY], (packet, self._peer_layouts[source][packet[2] | packet[3] << 8]))

    def _on_credits(self, target: int, packet: bytes, fds: list[int]) -> None:
        self._credit(target, self._edges[target], packet[1:])

    def _credit(self, target: int, edge: _MemoryEdge, slots: bytes) -> None:
        for slot in slots:
            edge.slots.give_back(slot)
        while edge.parked and self._dispatch(target, edge, *edge.parked[0]):
            edge.parked.popleft()
            self._num_parked -= 1

    def _on_slot(self, source: int, packet: bytes, fds: list[int]) -> None:
        _, number, room = _NEW_SLOT.unpack(packet)
        if not fds:
            raise RunError(f"{self.naming.rank(self.rank)} cannot open more files", fix="raise `ulimit -n`")
        self._edges[source].peer_slots[number] = Slot(number, fds[0], room)
