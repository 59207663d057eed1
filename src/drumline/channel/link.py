"""Connections to other ranks that carry whole packets and never block, and one pump for all of them.

    rank 0                                                 rank 1
    send(packet) ──► outbox, only if full ──► socket ──► read(): a handler per packet

Ranks on one host use a Unix socket, which also carries file descriptors; ranks on different hosts use TCP. Each packet
is preceded by its length. A link delivers exactly what was sent, in order, and says when the peer is gone. The pump
reads what arrives, and sends what the kernel did not accept before:

    link 1 ──┐                      ┌──► a handler per kind of packet
    link 2 ──┼── poll ──► _serve ───┤
    bell   ──┘                      └──► a bell: something else that became readable

There are no threads: packets are read when a rank looks or waits.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import struct
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from drumline.channel.channel import LINGER

_HEADER = struct.Struct("<IB")  # the packet's length, and its number of file descriptors
_AHEAD = _HEADER.size
_READ_BYTES = 1 << 16
_MAX_FDS = 4
_FD_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_IN, _OUT = select.POLLIN, select.POLLOUT
_HANGUP = select.POLLHUP | getattr(select, "POLLRDHUP", 0)
# What the kernel says of a connection: packets that are not acknowledged, milliseconds since the last acknowledgement.
_TCP_INFO = struct.Struct("=24xI28xI")
_UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)

# Called with the peer, the packet and its file descriptors; a table has one handler for each of 256 kinds. The first
# byte of a packet is its kind.
Handler = Callable[[int, bytes, list[int]], None]


class Link:
    """One end of the connection to `peer`; file descriptors travel only within a host.

    >>> left, right = (Link(1 - rank, end) for rank, end in enumerate(socket.socketpair()))
    >>> left.send(b"hello") and left.send(b"world")
    True
    >>> right.read([print] * 256)
    0 b'hello' []
    0 b'world' []
    True
    >>> left.close()
    >>> right.read([print] * 256)
    False
    >>> right.close()
    """

    def __init__(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.peer = peer
        self.fd = connection.fileno()
        self.carries_fds = connection.family == socket.AF_UNIX
        self.address = "" if self.carries_fds else str(connection.getpeername()[0])
        self.error: OSError | None = None  # why the connection ended, if the peer did not end it
        self._socket = connection
        self._broken = False
        self._outbox: deque[tuple[memoryview, Sequence[int]]] = deque()
        self._inbox = bytearray()
        self._fds: list[int] = []  # those of incomplete packets
        _open_links.add(self)

    def send(self, packet: bytes, fds: Sequence[int] = ()) -> bool:
        """Send a packet and own its file descriptors; return whether the kernel has accepted all of it."""
        assert self.carries_fds or not fds, "file descriptors do not travel between hosts"
        data = _HEADER.pack(len(packet), len(fds)) + packet
        sent = 0 if self._outbox else self._try(data, fds)
        if sent < len(data):
            self._outbox.append((memoryview(data)[sent:], () if sent else fds))
        return sent == len(data)

    def push(self) -> bool:
        """Try again to send what waits; return whether the kernel has accepted all of it."""
        while self._outbox:
            data, fds = self._outbox[0]
            sent = self._try(data, fds)
            if sent < len(data):
                self._outbox[0] = data[sent:], () if sent else fds
                return False
            self._outbox.popleft()
        return True

    def _try(self, data: bytes | memoryview, fds: Sequence[int]) -> int:
        """Send what the kernel accepts, the descriptors with the first byte; return the number of bytes."""
        sent = len(data)
        try:
            if self._broken:
                pass
            elif fds:
                sent = self._socket.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            else:
                sent = self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            self._broken = True  # reading will find the end, after the peer's last packets
            self._note(error)
        for fd in fds:
            os.close(fd)
        return sent

    def read(self, handlers: Sequence[Handler]) -> bool:
        """Pass on every complete packet; return False at the end of the connection."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_READ_BYTES, _FD_SPACE)
        except (BlockingIOError, ConnectionResetError):
            return True  # a reset: the peer left our packets unread, but its own are still to be read
        except OSError as error:
            self._note(error)
            return False
        if not data:
            return False
        if ancillary:
            self._fds += _descriptors(ancillary)
        inbox = self._inbox
        if not inbox and data[:_AHEAD] == _HEADER.pack(len(data) - _AHEAD, 0):  # one packet, the usual case
            handlers[data[_AHEAD]](self.peer, data[_AHEAD:], [])
            return True
        inbox += data
        while len(inbox) >= _AHEAD and len(inbox) >= (end := _AHEAD + _HEADER.unpack_from(inbox)[0]):
            num_fds, packet = inbox[_AHEAD - 1], bytes(inbox[_AHEAD:end])
            del inbox[:end]
            fds, self._fds = self._fds[:num_fds], self._fds[num_fds:]
            handlers[packet[0]](self.peer, packet, fds)
        return True

    def _note(self, error: OSError) -> None:
        if error.errno in _UNREACHABLE:
            self.error = error

    def silence(self) -> float:
        """Return for how many seconds the peer's host has acknowledged nothing of what was sent to it.

        A host acknowledges what its ranks do not read yet. 0 if nothing is under way, within a host, or if the system
        does not tell.
        """
        if self.carries_fds or self._broken or not hasattr(socket, "TCP_INFO"):
            return 0.0
        info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
        *_, unacknowledged, since_ms = _TCP_INFO.unpack(info)
        return float(since_ms) / 1000 if unacknowledged else 0.0

    def end_sending(self) -> None:
        """Tell the peer that nothing more comes."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._broken = True

    def close(self) -> None:
        """Release the socket and undelivered descriptors; closing twice is fine."""
        for fd in [*self._fds, *(fd for _, fds in self._outbox for fd in fds)]:
            os.close(fd)
        self._fds.clear()
        self._outbox.clear()
        _open_links.discard(self)
        self._socket.close()


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


# A forked child, such as a data loader's worker, holds copies of the sockets. If they stayed open, nobody would notice
# this rank's death while the child lives.
_open_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for link in list(_open_links):
        link.close()


os.register_at_fork(after_in_child=_let_go_in_child)


class Pump:
    """This rank's links to all others, by peer."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._handlers: list[Handler] = [_refuse] * 256
        self._backed_up: set[int] = set()
        self._poller = select.poll()
        self.links = {link.peer: link for link in links}
        self._by_fd = {link.fd: link for link in self.links.values()}
        self._bells: dict[int, Callable[[], None]] = {}
        for fd in self._by_fd:
            self._poller.register(fd, _IN)

    def listen(self, fd: int, bell: Callable[[], None]) -> None:
        """Call `bell` when the descriptor is readable, along with the packets."""
        self._bells[fd] = bell
        self._poller.register(fd, _IN)

    def send_packet(self, target: int, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Send a packet; return at once, and keep what the kernel does not accept yet."""
        if not self.links[target].send(packet, fds) and target not in self._backed_up:
            self._backed_up.add(target)
            self._watch(self.links[target], _IN | _OUT)

    @property
    def all_sent(self) -> bool:
        """Whether the kernel has accepted every packet."""
        return not self._backed_up

    def pump(self) -> None:
        """Read everything that has arrived and call the handlers; never blocks."""
        while self.look():
            pass

    def look(self) -> bool:
        """Read from every rank that sent something, and return whether there was anything; never blocks."""
        events = self._poller.poll(0)
        if events:
            self._serve(events)
            return True
        return False

    @property
    def is_cut(self) -> bool:
        """Whether the connection to some rank has ended; reads nothing."""
        poller = select.poll()
        for fd in self._by_fd:
            poller.register(fd, _HANGUP)
        return len(self._by_fd) < len(self.links) or bool(poller.poll(0))

    def _serve_while(self, going_on: Callable[[], bool], seconds: float) -> None:
        """Read what arrives while `going_on`, for at most `seconds`."""
        deadline_ns = time.perf_counter_ns() + int(seconds * 1e9)
        while going_on() and (left := deadline_ns - time.perf_counter_ns()) > 0:
            self._serve(self._poller.poll(milliseconds(left)))

    def _serve(self, events: list[tuple[int, int]]) -> bool:
        """React to what the poller found, and return whether there was anything."""
        for fd, event in events:
            link = self._by_fd.get(fd)
            if link is None:
                self._bells[fd]()
                continue
            if event & _OUT and link.push():
                self._backed_up.discard(link.peer)
                self._watch(link, _IN)
            if event != _OUT and not link.read(self._handlers):
                self._end(link)
        return bool(events)

    def _watch(self, link: Link, events: int) -> None:
        if link.fd in self._by_fd:
            self._poller.modify(link.fd, events)

    def _end(self, link: Link) -> None:
        self._poller.unregister(link.fd)
        del self._by_fd[link.fd]
        self._backed_up.discard(link.peer)
        self._ended(link.peer)

    def _ended(self, peer: int) -> None:
        """React to the end of a peer's connection."""

    def _let_go(self) -> None:
        """Send the last packets, read no more, and close the sockets."""
        for fd in self._bells:
            self._poller.unregister(fd)
        self._handlers = [_ignore] * 256
        deadline = time.perf_counter_ns() + int(LINGER * 1e9)
        self._serve_while(lambda: bool(self._backed_up), LINGER)
        for link in self.links.values():
            link.end_sending()
        # Over TCP, closing with unread packets would destroy packets on their way to the peer: wait for its end too.
        left = (deadline - time.perf_counter_ns()) / 1e9
        self._serve_while(lambda: any(not link.carries_fds for link in self._by_fd.values()), left)
        for link in self.links.values():
            link.close()
        self._by_fd.clear()


def _refuse(source: int, packet: bytes, fds: list[int]) -> None:
    raise AssertionError(f"rank {source} sent a packet of the unknown kind {packet[0]}")


def _ignore(source: int, packet: bytes, fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def milliseconds(nanoseconds: int) -> int:
    """Return a time for polling: rounded up, and at most what fits the kernel's int."""
    return min(-(-nanoseconds // 1_000_000), 3_600_000)
