"""A connection to one other rank that carries whole packets and never blocks.

    rank 0                                                 rank 1
    send(packet) ──► outbox, only if full ──► socket ──► read(): a handler per packet

Between ranks of one host it is a Unix socket that keeps packets apart and carries file descriptors; between hosts it is
TCP with the length before each packet. Both hand over, in order, exactly what was sent, and say when the peer is gone.
"""

from __future__ import annotations

import array
import os
import socket
import struct
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar

# The first byte of a packet is its kind; these two belong to the links, the others to whoever sends.
FRAGMENT = 0
LAST_FRAGMENT = 1

# The kernel takes no packet larger than the send buffer (208 KiB unless set): longer ones go in pieces.
_PIECE = 32 * 1024
_MAX_FDS = 4
_FD_SPACE = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
_LENGTH = struct.Struct("<I")

# Called with the peer, the packet and the file descriptors that came along; a table has one for each of 256 kinds.
Handler = Callable[[int, bytes, list[int]], None]


class Link(ABC):
    """One end of the connection to `peer`."""

    carries_fds: ClassVar[bool]

    def __init__(self, peer: int, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.peer = peer
        self.fd = connection.fileno()
        self._socket = connection
        self._broken = False
        self._outbox: deque[tuple[bytes | memoryview, Sequence[int]]] = deque()
        _open_links.add(self)

    @abstractmethod
    def send(self, packet: bytes, fds: Sequence[int] = ()) -> bool:
        """Hand a packet over and own its file descriptors; return whether all has left for the kernel."""

    def push(self) -> bool:
        """Try again to get rid of what waits; return whether all has left."""
        while self._outbox:
            if not self._try(*self._outbox[0]):
                return False
            self._outbox.popleft()
        return True

    @abstractmethod
    def _try(self, data: bytes | memoryview, fds: Sequence[int]) -> bool:
        """Send what the kernel takes; return whether that is all."""

    @abstractmethod
    def read(self, handlers: Sequence[Handler]) -> bool:
        """Hand on some of what is there, if anything; return False at the end of the connection."""

    def end_sending(self) -> None:
        """Tell the peer that nothing more comes."""
        try:
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            self._broken = True

    def close(self) -> None:
        """Let go of the socket and of descriptors that did not leave; closing twice is fine."""
        while self._outbox:
            for fd in self._outbox.popleft()[1]:
                os.close(fd)
        _open_links.discard(self)
        self._socket.close()


class UnixLink(Link):
    """Between ranks of one host.

    >>> import socket
    >>> ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    >>> left, right = UnixLink(1, ends[0]), UnixLink(0, ends[1])
    >>> left.send(b"hello")
    True
    >>> right.read([print] * 256)
    0 b'hello' []
    True
    >>> left.close()
    >>> right.read([print] * 256)
    False
    >>> right.close()
    """

    carries_fds = True

    def __init__(self, peer: int, connection: socket.socket) -> None:
        super().__init__(peer, connection)
        self._pieces: list[bytes] = []

    def send(self, packet: bytes, fds: Sequence[int] = ()) -> bool:
        """Hand a packet over, in pieces if it is long."""
        if len(packet) > _PIECE:
            pieces = [packet[at : at + _PIECE] for at in range(0, len(packet), _PIECE)]
            self._outbox.extend((bytes((FRAGMENT,)) + piece, ()) for piece in pieces[:-1])
            self._outbox.append((bytes((LAST_FRAGMENT,)) + pieces[-1], fds))
            return self.push()
        if not self._outbox and self._try(packet, fds):
            return True
        self._outbox.append((packet, fds))
        return False

    def _try(self, packet: bytes | memoryview, fds: Sequence[int]) -> bool:
        try:
            if self._broken:
                pass
            elif fds:
                self._socket.sendmsg([packet], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
            else:
                self._socket.send(packet)
        except BlockingIOError:
            return False
        except OSError:
            self._broken = True  # reading will find the end, after what the peer still had to say
        for fd in fds:
            os.close(fd)
        return True

    def read(self, handlers: Sequence[Handler]) -> bool:
        """Hand on one packet."""
        try:
            packet, ancillary, _, _ = self._socket.recvmsg(_PIECE + 1, _FD_SPACE)
        except (BlockingIOError, ConnectionResetError):
            return True  # a reset says that the peer left packets of ours unread; what it sent is still to be read
        if not packet:
            return False
        fds = _descriptors(ancillary) if ancillary else []
        kind = packet[0]
        if kind > LAST_FRAGMENT:
            handlers[kind](self.peer, packet, fds)
            return True
        self._pieces.append(packet[1:])
        if kind == LAST_FRAGMENT:
            packet = b"".join(self._pieces)
            self._pieces.clear()
            handlers[packet[0]](self.peer, packet, fds)
        return True


class TcpLink(Link):
    """Between hosts; file descriptors do not travel.

    >>> import socket
    >>> ends = socket.socketpair()
    >>> left, right = TcpLink(1, ends[0]), TcpLink(0, ends[1])
    >>> left.send(b"hello") and left.send(b"world")
    True
    >>> right.read([print] * 256)
    0 b'hello' []
    0 b'world' []
    True
    >>> left.close(); right.close()
    """

    carries_fds = False

    def __init__(self, peer: int, connection: socket.socket) -> None:
        super().__init__(peer, connection)
        self._inbox = bytearray()

    def send(self, packet: bytes, fds: Sequence[int] = ()) -> bool:
        """Hand a packet over, its length first."""
        assert not fds, "file descriptors do not travel between hosts"
        self._outbox.append((memoryview(_LENGTH.pack(len(packet)) + packet), ()))
        return self.push()

    def _try(self, data: bytes | memoryview, fds: Sequence[int]) -> bool:
        try:
            sent = len(data) if self._broken else self._socket.send(data)
        except BlockingIOError:
            return False
        except OSError:
            self._broken = True
            return True
        self._outbox[0] = data[sent:], ()
        return sent == len(data)

    def read(self, handlers: Sequence[Handler]) -> bool:
        """Hand on every packet that is complete."""
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        inbox = self._inbox
        inbox += data
        start, end = 0, len(inbox)
        while end - start >= _LENGTH.size:
            stop = start + _LENGTH.size + _LENGTH.unpack_from(inbox, start)[0]
            if stop > end:
                break
            packet = bytes(inbox[start + _LENGTH.size : stop])
            handlers[packet[0]](self.peer, packet, [])
            start = stop
        del inbox[:start]
        return True


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    fds = array.array("i")
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
    return list(fds)


# A forked child (a data loader's worker, say) holds copies of the sockets: were they left open, this rank's death would
# go unnoticed as long as the child lives.
_open_links: weakref.WeakSet[Link] = weakref.WeakSet()


def _let_go_in_child() -> None:
    for link in list(_open_links):
        link.close()


os.register_at_fork(after_in_child=_let_go_in_child)
