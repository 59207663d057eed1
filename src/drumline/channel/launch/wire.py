"""The messages between `launch` and its ranks: task and outcome, each a file with sizes followed by parts.

    number of parts | size of part 0 | size of part 1 | ... | part 0 | part 1 | ...

`launch` writes the task once, and all ranks read it. Each rank answers in its own file. Large tensors are separate
parts, so they are read directly into their final memory.
"""

from __future__ import annotations

import os
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from mmap import ACCESS_READ, mmap
from typing import IO

Parts = Sequence[bytes | bytearray | memoryview]

# What a rank sends after it has written its outcome.
RETURNED, FAILED = b"r", b"f"

# What `launch` sends where somebody asks the ranks to stop after their step, and by what.
STOPS = {b"t": "SIGTERM", b"c": "Ctrl-C"}

_SIZE = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a rank did not finish: the error's name and text, its traceback, and the error itself if it can be pickled.

    An echo is an error caused by the end of another rank (a closed connection, RankFailed). It is never chosen as the
    cause if there is another error. `at` is the monotonic clock, which all processes of a machine share.
    """

    kind: str
    text: str
    at: float
    traceback: str = ""
    exception: tuple[bytes, ...] | None = None
    echo: bool = False

    def __str__(self) -> str:
        return f"failed with {self.kind}: {self.text}" if self.kind else self.text


def blank() -> IO[bytes]:
    """Return an empty file without a name, in memory if the system supports it."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("drumline"), "w+b")
    return tempfile.TemporaryFile()


def write(file: IO[bytes], parts: Parts) -> None:
    """Write a message, starting at the beginning of the file."""
    runs = [memoryview(part).cast("B") for part in parts]
    file.seek(0)
    file.write(b"".join(_SIZE.pack(size) for size in (len(runs), *(run.nbytes for run in runs))))
    for run in runs:
        file.write(run)
    file.flush()


def read(file: int) -> list[bytearray]:
    """Return the parts of the message in a file; several processes may read it at the same time.

    >>> with blank() as file:
    ...     write(file, [b"ab", b"", b"c"])
    ...     read(file.fileno())
    [bytearray(b'ab'), bytearray(b''), bytearray(b'c')]
    """
    with mmap(file, 0, access=ACCESS_READ) as mapping, memoryview(mapping) as view:
        (number,) = _SIZE.unpack_from(view)
        sizes = [_SIZE.unpack_from(view, _SIZE.size * at)[0] for at in range(1, 1 + number)]
        starts = accumulate(sizes, initial=_SIZE.size * (1 + number))
        return [bytearray(view[at : at + size]) for at, size in zip(starts, sizes, strict=False)]
