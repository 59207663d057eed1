"""Messages between ranks of one host: the payload in shared memory, its header over the mesh.

    send                                       take
    copy the tensors into a free slot          copy them out of it
    header: slot, layout, key, stamps ──────►  credit: the slot is free ──────► (sender)

With no free slot a message is parked, its tensors held, and moves on when a credit comes: sending never blocks. A
receiver that waits for a message while all slots hold others copies those out first, so that any order of taking works.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import Store

from drumline.core.action import Action
from drumline.core.errors import RunError
from drumline.runtime import limits
from drumline.runtime.channel import Delivery
from drumline.runtime.layout import Layout, Layouts
from drumline.runtime.mesh import FIRST_OWN_KIND, Mesh
from drumline.runtime.mesh_channel import KEY_BYTES, MeshChannel
from drumline.runtime.slots import Slot, Slots

_MESSAGE, _CREDIT, _SLOT, _LAYOUT = range(FIRST_OWN_KIND, FIRST_OWN_KIND + 4)
_HEADER = struct.Struct(f"<BBH{KEY_BYTES}sqq")  # kind, slot, layout, key, made, sent
_KEY = slice(4, 4 + KEY_BYTES)
_NEW_SLOT = struct.Struct("<BBQ")  # kind, slot, room; the memory's descriptor comes along
_CREDITS = tuple(bytes((_CREDIT, slot)) for slot in range(256))

_clock = time.perf_counter_ns


class _Parked(NamedTuple):
    layout: Layout
    key: bytes
    tensors: Sequence[Tensor]
    made_ns: int


class _Outgoing:
    """The sender's side of an edge."""

    def __init__(self, num_slots: int) -> None:
        self.layouts = Layouts()
        self.slots = Slots(num_slots)
        self.parked: deque[_Parked] = deque()


class _Incoming:
    """The receiver's side of an edge: the slots and layouts it was told of, and how many slots hold messages."""

    def __init__(self, offset_ns: int) -> None:
        self.layouts: dict[int, Layout] = {}
        self.slots: dict[int, Slot] = {}
        self.num_held = 0
        self.offset_ns = offset_ns


class _Held(NamedTuple):
    """A message in its slot, or, once it had to be copied out, on its own."""

    packet: bytes
    layout: Layout
    copied: Delivery | None = None


class SharedMemoryChannel(MeshChannel[_Held]):
    """Carries messages between ranks that share a host; what arrives is put on `device`."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        store: Store,
        device: torch.device | str = "cpu",
        timeout: float = limits.TIMEOUT,
        num_slots: int = 4,
        spin: float = limits.SPIN,
    ) -> None:
        if not 1 <= num_slots <= 256:
            raise RunError(f"num_slots is {num_slots}", expected="1 to 256")
        mesh = Mesh(rank, num_ranks, store=store, timeout=timeout, spin=spin)
        super().__init__(mesh)
        elsewhere = sorted(peer for peer, link in mesh.links.items() if not link.carries_fds)
        if elsewhere:
            mesh.close()
            raise RunError(
                f"rank {rank} does not share a host with rank {', '.join(map(str, elsewhere))}",
                fix="use a channel over torch.distributed between hosts",
            )
        self._device = torch.device(device)
        self._on_cpu = self._device.type == "cpu"
        self._num_slots = num_slots
        self._num_parked = 0
        self._outgoing = {peer: _Outgoing(num_slots) for peer in mesh.links}
        self._incoming = {peer: _Incoming(link.offset_ns) for peer, link in mesh.links.items()}
        mesh.on(_MESSAGE, self._on_message)
        mesh.on(_CREDIT, self._on_credit)
        mesh.on(_SLOT, self._on_slot)
        mesh.on(_LAYOUT, self._on_layout)

    def send(self, receive: Action, target: int, tensors: Sequence[Tensor], form: Any) -> None:
        made_ns = _clock()
        edge = self._outgoing[target]
        layout = edge.layouts.find(tensors, form)
        key = self._key(receive)
        if self._num_parked or not edge.slots.num_free:
            self._mesh.pump()  # credits may have come
        if edge.parked or not self._dispatch(edge, target, layout, key, tensors, made_ns):
            edge.parked.append(_Parked(layout, key, tuple(tensors), made_ns))
            self._num_parked += 1
        num_open = len(edge.parked) + edge.slots.num_busy
        if num_open > self.peak_open_sends:
            self.peak_open_sends = num_open

    def _dispatch(
        self, edge: _Outgoing, target: int, layout: Layout, key: bytes, tensors: Sequence[Tensor], made_ns: int
    ) -> bool:
        """Fill a slot and announce it; return False if none is free."""
        free = edge.slots.take(layout.room)
        if free is None:
            return False
        slot, fd = free
        if fd is not None:
            self._mesh.send(target, _NEW_SLOT.pack(_SLOT, slot.number, slot.room), (fd,))
        for view, tensor in zip(slot.views(layout), tensors, strict=True):
            view.copy_(tensor.detach() if tensor.requires_grad else tensor)
        if not layout.is_told:
            # A one-off stays untold: its text goes right before each message of it.
            layout.is_told = layout.is_kept
            self._mesh.send(target, bytes((_LAYOUT,)) + layout.text())
        self._mesh.send(target, _HEADER.pack(_MESSAGE, slot.number, layout.number, key, made_ns, _clock()))
        return True

    def take(self, receive: Action, source: int) -> Delivery | None:
        key = self._key(receive)
        if self._num_parked or key not in self._inbox[source]:
            self._mesh.pump()
        held = self._pick(source, key)
        if held is None:
            return None
        return held.copied or self._copy_out(source, held)

    def _copy_out(self, source: int, held: _Held) -> Delivery:
        edge, layout = self._incoming[source], held.layout
        _, slot, _, _, made_ns, sent_ns = _HEADER.unpack(held.packet)
        views = edge.slots[slot].views(layout)
        if self._on_cpu:
            tensors = tuple([view.clone() for view in views])
        else:
            tensors = tuple([view.to(self._device) for view in views])  # waits: the slot may be filled again
        edge.num_held -= 1
        self._mesh.send(source, _CREDITS[slot])
        offset_ns = edge.offset_ns
        return Delivery(tensors, layout.form, made_ns + offset_ns, sent_ns + offset_ns, layout.num_bytes)

    def _before_sleep(self) -> None:
        for source, edge in self._incoming.items():
            if edge.num_held == self._num_slots:
                for same in self._inbox[source].values():
                    for index, held in enumerate(same):
                        if held.copied is None:
                            same[index] = held._replace(copied=self._copy_out(source, held))

    def _unsent(self) -> tuple[int, bytes] | None:
        if self._num_parked:
            for target, edge in self._outgoing.items():
                if edge.parked:
                    return target, edge.parked[0].key
        return None

    def close(self) -> None:
        super().close()
        self._outgoing.clear()
        self._incoming.clear()

    def _on_message(self, source: int, packet: bytes, fds: list[int]) -> None:
        edge = self._incoming[source]
        edge.num_held += 1
        self._arrive(source, packet[_KEY], _Held(packet, edge.layouts[packet[2] | packet[3] << 8]))

    def _on_credit(self, target: int, packet: bytes, fds: list[int]) -> None:
        edge = self._outgoing[target]
        edge.slots.give_back(packet[1])
        if edge.parked:
            layout, key, tensors, made_ns = edge.parked[0]
            if self._dispatch(edge, target, layout, key, tensors, made_ns):
                edge.parked.popleft()
                self._num_parked -= 1

    def _on_slot(self, source: int, packet: bytes, fds: list[int]) -> None:
        _, number, room = _NEW_SLOT.unpack(packet)
        if not fds:
            raise RunError(f"rank {self.rank} cannot open more files", fix="raise `ulimit -n`")
        self._incoming[source].slots[number] = Slot(number, fds[0], room)

    def _on_layout(self, source: int, packet: bytes, fds: list[int]) -> None:
        layout = Layout.parse(memoryview(packet)[1:])
        self._incoming[source].layouts[layout.number] = layout
