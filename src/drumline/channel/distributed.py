"""Messages whose payload torch.distributed carries: gloo, NCCL, or any other backend of the device.

    send                                              receiver
    pack into one flat tensor, isend it
    header over the mesh: number, layout, key ──────► irecv into a flat tensor of the layout's size
                                                      take: hand its parts over
    let the flat tensor go            ◄────────────── done with number (gloo)

Each directed edge has its own process group: backends keep the order of an edge, and the two directions never block
each other. Receives are issued in the order of the headers, which is the order of the sends.

Backends differ in one thing. The host waits for gloo's transfers, and can learn of their end only by waiting. So a
thread of the receiver waits, and tells the sender. A device's transfers are ordered by streams: `take` makes the
current stream wait, never the host, and the sender asks its own transfer whether it has ended. Small messages between
CPUs travel inside the packet of their header.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from ctypes import memmove
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, Work

from drumline.channel.channel import GRACE, SPIN, Delivery, Wait
from drumline.channel.layout import MessageLayout
from drumline.channel.mesh_channel import FIRST_MESSAGE_KIND, KEY_BYTES, MeshChannel
from drumline.channel.waiter import Waiter
from drumline.core.action import Action
from drumline.core.errors import RunError

_MESSAGE, _SMALL_MESSAGE, _DONE = range(FIRST_MESSAGE_KIND, FIRST_MESSAGE_KIND + 3)
_HEADER = struct.Struct(f"<BxHQ{KEY_BYTES}sq")  # kind, layout, number, key, made
_NUMBER = struct.Struct("<BQ")  # kind, number

# Payloads that fit into one packet with their header are faster there than as a separate transfer.
_SMALL_BYTES = 30 * 1024

# How many receives of an edge are issued before their messages are requested; more only if a wait depends on them.
_MOST_AHEAD = 16


class _SentMessage(NamedTuple):
    """A message in flight: its memory and `work` must be kept until it has arrived."""

    key: bytes
    flat: Tensor
    work: Work | None


@dataclass(slots=True, eq=False)
class _Coming:
    """A message whose header has arrived; `flat` exists after its receive is issued."""

    number: int
    layout: MessageLayout
    made_ns: int
    arrived_ns: int = 0
    flat: Tensor | None = None
    work: Work | None = None
    has_arrived: bool = False
    error: RuntimeError | None = None


@dataclass(slots=True, eq=False)
class _DistributedEdge:
    """This rank's side of the two directed edges between it and a peer."""

    num_sent: int = 0
    under_way: dict[int, _SentMessage] = field(default_factory=dict)
    not_issued: deque[_Coming] = field(default_factory=deque)
    num_issued: int = 0


class DistributedChannel(MeshChannel[_Coming]):
    """Carries messages with a torch.distributed backend; needs the default group, with the same ranks.

    `edges` are the directed edges (source, target) to use, the same and in the same order on all ranks; by default all
    of them. Arriving tensors go to `device`, through the host if the backend is gloo. gloo messages of up to
    `small_bytes` travel in one packet. In a mesh, `line` has the ranks of this pipeline in the default group, and
    `lines` those of every pipeline. Arguments for connecting, such as the store, go to `ControlMesh`.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        backend: str = "gloo",
        device: torch.device | str = "cpu",
        edges: Iterable[tuple[int, int]] | None = None,
        small_bytes: int = _SMALL_BYTES,
        line: Sequence[int] | None = None,
        lines: Sequence[Sequence[int]] | None = None,
        **connecting: Any,
    ) -> None:
        # The ranks of the default group, by place in the line.
        self._members = list(range(num_ranks) if line is None else line)
        self._lines = [self._members] if lines is None else [list(row) for row in lines]
        if not dist.is_initialized() or dist.get_rank() != self._members[rank]:
            raise RunError(
                f"torch.distributed has no group of {num_ranks} ranks in which this process is rank {rank}",
                fix="call torch.distributed.init_process_group first",
            )
        self.name = backend
        self._by_host = backend == "gloo"
        self.looks_every_ms = None if self._by_host else 1  # the end of a device's transfer wakes no thread
        # Polling would take the processor from gloo's threads and ours.
        super().__init__(rank, num_ranks, spin=0.0 if self._by_host else SPIN, **connecting)
        self._device = torch.device(device)
        self._small_bytes = small_bytes if self._by_host else 0
        self._at = torch.device("cpu") if self._by_host else self._device
        self._edges = {peer: _DistributedEdge() for peer in self.links}
        self._waiter = Waiter()
        self.listen(self._waiter.fd, self._waiter.finished)
        self.on(_MESSAGE, self._on_message)
        self.on(_SMALL_MESSAGE, self._on_message)
        self.on(_DONE, self._on_done)
        if edges is None:
            edges = ((a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b)
        self._known: set[tuple[int, int]] = set()
        self._groups: dict[tuple[int, int], ProcessGroup] = {}
        self.connect(list(edges))

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """Create a group for every new edge; every rank creates every group in the same order, as torch requires."""
        for edge in (pair for pair in edges if pair not in self._known):
            self._known.add(edge)
            for line in self._lines:
                ranks = [line[number] for number in edge]
                group = dist.new_group(ranks, timeout=timedelta(seconds=self.timeout), backend=self.name)
                if self._members == line and self.rank in edge:
                    assert isinstance(group, ProcessGroup)
                    self._groups[edge] = group
                    self._try_out(edge)

    def _try_out(self, edge: tuple[int, int]) -> None:
        """Send one byte: backends connect at the first message, which must not happen among others."""
        byte = torch.zeros(1, dtype=torch.uint8, device=self._at)
        source, target = edge
        try:
            if self.rank == source:
                work = dist.isend(byte, self._members[target], group=self._groups[edge])
            else:
                work = dist.irecv(byte, self._members[source], group=self._groups[edge])
            assert work is not None
            if self._by_host:
                work.wait(timedelta(seconds=self.timeout))
            else:
                work.wait()
                torch.accelerator.synchronize(self._device)
        except RuntimeError as error:
            raise self.explain(target if self.rank == source else source, error) from error

    def send(self, receive: Action, target: int, tensors: Sequence[Tensor], form: Any) -> None:
        """Start a transfer; a form must not change after it is used."""
        made_ns = self.now()
        edge, key = self._edges[target], self._key(receive)
        self._forget_ended(edge)
        layout = self._layouts[target].find(tensors, form)
        flat = layout.packed(tensors, self._at)
        self._tell_layout(target, layout)
        number = edge.num_sent
        edge.num_sent += 1
        if layout.room <= self._small_bytes:
            header = _HEADER.pack(_SMALL_MESSAGE, layout.number, number, key, made_ns)
            self.send_packet(target, header + flat.numpy().tobytes())
            return
        if layout.room:
            try:
                work = dist.isend(flat, self._members[target], group=self._group(self.rank, target))
            except RuntimeError as error:
                raise self.explain(target, error) from error
            edge.under_way[number] = _SentMessage(key, flat, work)
        self.send_packet(target, _HEADER.pack(_MESSAGE, layout.number, number, key, made_ns))

    def take(self, receive: Action, source: int) -> Delivery | None:
        """Return a message whose payload has arrived, or for which the device's stream can wait."""
        key, inbox = self._key(receive), self._inbox[source]
        while key not in inbox and self.look():
            pass
        coming = inbox.get(key)
        if coming is None:
            return None
        edge = self._edges[source]
        self._issue_through(source, edge, coming)
        if not coming.has_arrived:
            if self._by_host:
                self.look()
                if not coming.has_arrived:
                    return None
            elif coming.work is not None:
                coming.work.wait()  # the current stream waits, the host does not
                coming.arrived_ns = self.now()
        self._pick(source, key)
        if coming.work is not None:
            edge.num_issued -= 1
            self._issue(source, edge, _MOST_AHEAD)
        assert coming.flat is not None
        tensors = coming.layout.unpacked(coming.flat.to(self._device))
        form, made_ns, num_bytes = coming.layout.form, coming.made_ns, coming.layout.num_bytes
        return Delivery(tensors, form, made_ns, made_ns, coming.arrived_ns, num_bytes)

    def block(self, wait: Wait, deadline_ns: int) -> None:
        """Return after the message is here, including its payload if the host has to wait for that."""
        super().block(wait, deadline_ns)
        coming = self._inbox[wait.source][self._key(wait.receive)]
        self._issue_through(wait.source, self._edges[wait.source], coming)
        if self._by_host:
            self.wait(lambda: coming.has_arrived or coming.error is not None, wait, deadline_ns, needs=lambda: ())
            if coming.error is not None:
                raise self.explain(wait.source, coming.error) from coming.error

    def _issue(self, source: int, edge: _DistributedEdge, most: int) -> None:
        """Issue receives in the order of the headers, until `most` are open."""
        while edge.not_issued and edge.num_issued < most:
            coming = edge.not_issued.popleft()
            coming.flat = torch.empty(coming.layout.room, dtype=torch.uint8, device=self._at)
            if not coming.layout.room:
                coming.has_arrived, coming.arrived_ns = True, self.now()
                continue
            try:
                coming.work = dist.irecv(coming.flat, self._members[source], group=self._group(source, self.rank))
            except RuntimeError as error:
                coming.error = error
                continue
            edge.num_issued += 1
            if self._by_host and coming.work is not None:
                self._waiter.watch(source, coming.work, partial(self._transferred, source, coming))

    def _transferred(self, source: int, coming: _Coming, error: RuntimeError | None) -> None:
        if error is None:
            coming.has_arrived, coming.arrived_ns = True, self.now()
            self.send_packet(source, _NUMBER.pack(_DONE, coming.number))
        else:
            coming.error = error

    def _issue_through(self, source: int, edge: _DistributedEdge, coming: _Coming) -> None:
        while coming.flat is None:
            self._issue(source, edge, edge.num_issued + 1)

    def _group(self, source: int, target: int) -> ProcessGroup:
        group = self._groups.get((source, target))
        if group is None:
            source_name, target_name = self.naming.rank(source), self.naming.rank(target)
            raise RunError(f"{source_name} has no announced edge to {target_name}", fix="add it to `edges`")
        return group

    def _forget_ended(self, edge: _DistributedEdge) -> None:
        if not self._by_host:
            ended = [number for number, sent in edge.under_way.items() if sent.work is None or sent.work.is_completed()]
            for number in ended:
                del edge.under_way[number]

    def _unsent(self) -> tuple[int, bytes] | None:
        for target, edge in self._edges.items():
            self._forget_ended(edge)
            for sent in edge.under_way.values():
                return target, sent.key
        return None

    def close(self) -> None:
        """Say goodbye and release the groups; after a failure, cut off transfers that can no longer end."""
        super().close()
        self._waiter.close()
        for group in self._groups.values():
            # The user may already have destroyed all groups.
            with suppress(RuntimeError, ValueError, AssertionError):
                if self._has_failed:
                    group.abort()
                dist.destroy_process_group(group)
        self._groups.clear()
        self._edges.clear()

    def _on_message(self, source: int, packet: bytes, fds: list[int]) -> None:
        kind, layout, number, key, made_ns = _HEADER.unpack_from(packet)
        edge = self._edges[source]
        coming = _Coming(number, self._peer_layouts[source][layout], made_ns)
        self._arrive(source, key, coming)
        if kind == _SMALL_MESSAGE:
            coming.flat = torch.empty(coming.layout.room, dtype=torch.uint8, device=self._at)
            memmove(coming.flat.data_ptr(), packet[_HEADER.size :], coming.layout.room)
            coming.has_arrived, coming.arrived_ns = True, self.now()
        else:
            edge.not_issued.append(coming)
            self._issue(source, edge, _MOST_AHEAD)

    def _on_done(self, target: int, packet: bytes, fds: list[int]) -> None:
        sent = self._edges[target].under_way.pop(_NUMBER.unpack(packet)[1])
        # It has ended there, so it has ended here too, except that the backend's thread has yet to notice.
        with suppress(RuntimeError):
            if sent.work is not None:
                sent.work.wait(timedelta(seconds=GRACE))
