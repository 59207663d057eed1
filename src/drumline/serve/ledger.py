"""What a stage does now, in memory that it shares with the front and that outlives it.

    stage                          front
      beat, worked  ──────────►      does its event loop run, and does its computation?
      computing: since, name ──►     what was inside when it died? how long has it been there?
      packing: since, name   ──►

A message could be lost with the process that sends it. What a process has written to shared memory is there after its
end, so the front knows exactly on which microbatches a stage was at work when it died.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_NUMBER = struct.Struct("<Q")
_LONGEST = 64  # bytes of a name
_BEAT, _WORKED, _UNWANTED = 0, 8, 16
_COMPUTING, _PACKING = 64, 192  # since, bytes of the name, the name
_SIZE = 320


class LedgerState(NamedTuple):
    """What a ledger said when it was read."""

    beat: int = 0  # counts the turns of the stage's event loop
    worked: int = 0  # nanoseconds of processor time of the thread that computes
    computing: int = 0  # when the computation began, in nanoseconds of the stage's clock; 0: it computes nothing
    unwanted: int = 0  # the same number if nobody waits for that computation any more
    names: tuple[str, ...] = ()  # the microbatches it is at work on: one computes, another is packed to be sent on


class Ledger:
    """A stage writes it, the front reads it; without a file both are in one process.

    >>> ledger = Ledger()
    >>> with ledger.computing("seven"):
    ...     ledger.read().names
    ('seven',)
    >>> ledger.read().names
    ()
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._memory = mmap.mmap(-1, _SIZE)
            return
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)

    @staticmethod
    def create(path: Path) -> Ledger:
        """Make a file for an empty ledger, in the place of an old one, and open it."""
        path.unlink(missing_ok=True)  # whoever has the old one open keeps it
        path.write_bytes(bytes(_SIZE))
        return Ledger(path)

    def read(self) -> LedgerState:
        """Return what it says now."""
        computing, packing = self._get(_COMPUTING), self._get(_PACKING)
        names = tuple(self._name(at) for at, since in ((_COMPUTING, computing), (_PACKING, packing)) if since)
        return LedgerState(self._get(_BEAT), self._get(_WORKED), computing, self._get(_UNWANTED), names)

    def beat(self, worked: int) -> None:
        """Say that the event loop runs, and how many nanoseconds computations have used of the processor."""
        self._put(_WORKED, worked)
        self._put(_BEAT, self._get(_BEAT) + 1)

    @contextmanager
    def computing(self, name: str) -> Iterator[int]:
        """Say what is being computed, from before its start; yields the number of this computation."""
        with self._at(_COMPUTING, name) as since:
            yield since

    @contextmanager
    def packing(self, name: str) -> Iterator[None]:
        """Say what the event loop makes a message of."""
        with self._at(_PACKING, name):
            yield

    def unwanted(self, number: int) -> None:
        """Say that no request waits for a computation any more."""
        self._put(_UNWANTED, number)

    @contextmanager
    def _at(self, at: int, name: str) -> Iterator[int]:
        data = name.encode()[:_LONGEST]
        self._put(at + 8, len(data))
        self._memory[at + 16 : at + 16 + len(data)] = data
        since = max(1, time.monotonic_ns())
        self._put(at, since)  # last: only now it counts
        try:
            yield since
        finally:
            self._put(at, 0)

    def _name(self, at: int) -> str:
        size = min(self._get(at + 8), _LONGEST)
        return self._memory[at + 16 : at + 16 + size].decode(errors="replace")

    def _get(self, at: int) -> int:
        return int(_NUMBER.unpack_from(self._memory, at)[0])

    def _put(self, at: int, value: int) -> None:
        _NUMBER.pack_into(self._memory, at, value)
