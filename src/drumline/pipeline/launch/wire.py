"""What crosses between `launch` and one of its ranks: a message is some parts, each a run of bytes, with sizes ahead.

    number of parts | size of part 0 | size of part 1 | ... | part 0 | part 1 | ...

`launch` sends one message, the task; the rank answers with one, the outcome. Large tensors are parts of their own, so
they are received straight into the memory that they end up in.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

Parts = Sequence[bytes | bytearray | memoryview]

# The first part of an outcome.
RETURNED, FAILED = b"returned", b"failed"

_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank did not finish: the error's name and text, its traceback, and itself if it could be pickled.

    An echo is an error that comes of another rank's end (a closed connection, RankFailed): never chosen as the cause
    while there is another. `at` is the monotonic clock, which the processes of a machine share.
    """

    kind: str
    text: str
    at: float
    traceback: str = ""
    exception: tuple[bytes, ...] | None = None
    echo: bool = False

    def __str__(self) -> str:
        return f"failed with {self.kind}: {self.text}" if self.kind else self.text


def framed(parts: Parts) -> list[memoryview]:
    """Return a message's bytes, in runs to be written one after the other.

    >>> head, part = framed([b"ab"])
    >>> list(_SIZE.iter_unpack(head)), bytes(part)
    ([(1,), (2,)], b'ab')
    """
    runs = [memoryview(part).cast("B") for part in parts]
    head = b"".join(_SIZE.pack(size) for size in (len(runs), *(run.nbytes for run in runs)))
    return [memoryview(head), *(run for run in runs if run.nbytes)]


class Inbox:
    """Takes one message in, as its bytes arrive; `read` returns whether it is complete.

    >>> near, far = socket.socketpair()
    >>> for run in framed([b"ab", b"", b"c"]):
    ...     near.sendall(run)
    >>> inbox = Inbox()
    >>> while not inbox.read(far):
    ...     pass
    >>> inbox.parts
    [bytearray(b'ab'), bytearray(b''), bytearray(b'c')]
    >>> near.close(), far.close()
    (None, None)
    """

    def __init__(self) -> None:
        self.parts: list[bytearray] = []
        self._head = bytearray(_SIZE.size)
        self._num_parts: int | None = None
        self._open: list[memoryview] = [memoryview(self._head)]

    def read(self, source: socket.socket) -> bool:
        """Take in what one receive gives; raises EOFError if the other end is gone."""
        if self._open:
            number = source.recv_into(self._open[0])
            if number == 0:
                raise EOFError
            rest = self._open[0][number:]
            self._open = [rest, *self._open[1:]] if rest.nbytes else self._open[1:]
        while not self._open and self._advance():
            pass
        return not self._open

    def _advance(self) -> bool:
        """Go on to what follows a part of the message that is now complete, if anything does."""
        if self._num_parts is None:
            (self._num_parts,) = _SIZE.unpack(self._head)
            self._head = bytearray(_SIZE.size * self._num_parts)
            self._open = [memoryview(self._head)] if self._head else []
            return bool(self._head)
        if self._num_parts and not self.parts:
            self.parts = [bytearray(size) for (size,) in _SIZE.iter_unpack(self._head)]
            self._open = [memoryview(part) for part in self.parts if part]
            return bool(self._open)
        return False
