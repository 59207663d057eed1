"""The stacks of all ranks on this host, for the moment when one of them gives up waiting for another.

    each process       lets SIGUSR1 write its stacks to a file in memory, and tells the others its number and the file's
    one that gives up  signals the others, reads their files, and prints what they wrote by rank

A process writes its stacks whatever its threads do, unless it is stopped. A rank started by `launch` writes them to
stderr, because `launch` asks for them.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from drumline.channel.rank_names import BY_NUMBER, RankNames

_SECONDS = 2.0  # for all of them to write
_SECONDS_A_LOOK = 0.02
_STDERR = -1
_NOWHERE = -2
_STATES = {"T": "is stopped, by SIGSTOP or Ctrl-Z", "t": "is stopped by a debugger", "Z": "is dead", "X": "is dead"}

_target: int | None = None  # where this process writes its stacks: signals belong to the process


@dataclass(frozen=True, slots=True)
class StackSource:
    """A process that may be asked for its stacks by processes of the same place: its number and that of its file."""

    place: str
    process: int
    file: int

    @property
    def is_near(self) -> bool:
        """Whether this process can signal it."""
        return self.place == _place()

    @property
    def state(self) -> str:
        """Why it cannot answer, in words; empty if it can, or if that is unknown."""
        if not self.is_near:
            return ""
        try:
            with open(f"/proc/{self.process}/stat", encoding="utf-8", errors="replace") as file:
                letter = file.read().rpartition(")")[2].split()[0]
        except OSError:
            return f"its process {self.process} is dead"
        return f"its process {self.process} {_STATES[letter]}" if letter in _STATES else ""


def witness() -> StackSource:
    """Return how others ask this process for its stacks; from the first call on, SIGUSR1 writes them.

    >>> witness().is_near
    True
    """
    if _target is None:
        _register()
    assert _target is not None
    return StackSource(_place(), os.getpid(), _target)


def write_to_stderr() -> None:
    """Let SIGUSR1 write this process's stacks to stderr."""
    global _target
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    _target = _STDERR


def _register() -> None:
    global _target
    _target = _NOWHERE
    if hasattr(os, "memfd_create") and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:  # else it is the user's
        _target = os.memfd_create("drumline-stacks")
        faulthandler.register(signal.SIGUSR1, file=_target, all_threads=True)


def _forget_in_child() -> None:
    global _target
    _target = None


os.register_at_fork(after_in_child=_forget_in_child)


@cache
def _place() -> str:
    """Return a name that is the same only for processes that can signal each other by number."""
    with suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.stat('/proc/self/ns/pid').st_ino}"
    return f"{os.uname().nodename}"


def show(others: Mapping[int, StackSource], naming: RankNames = BY_NUMBER) -> str:
    """Return the stacks of other ranks, or why there are none, as text for stderr.

    >>> print(show({1: StackSource("elsewhere", 7, 3)}))
    drumline: no stacks of rank 1: it runs on another host
    """
    readable = {rank: other for rank, other in others.items() if other.is_near and other.file >= 0}
    stacks = _written([source for source in readable.values() if source.process != os.getpid()])
    lines = []
    for rank, other in sorted(others.items()):
        if other.process == os.getpid() or (other.is_near and other.file == _STDERR):
            continue  # `launch` lets it write them
        if text := stacks.get(other.process, ""):
            lines.append(f"drumline: stacks of {naming.rank(rank)}, process {other.process}:\n{text.rstrip()}")
            continue
        why = "it runs on another host" if not other.is_near else other.state or "its process wrote none"
        lines.append(f"drumline: no stacks of {naming.rank(rank)}: {why}")
    return "\n".join(lines)


def _written(asked: list[StackSource]) -> dict[int, str]:
    """Ask processes for their stacks, and return what each wrote within a moment."""
    files = {}
    for source in asked:
        with suppress(OSError):
            file = open(f"/proc/{source.process}/fd/{source.file}", "rb")  # noqa: SIM115 - closed below
            file.seek(0, os.SEEK_END)
            files[source.process] = file
            os.kill(source.process, signal.SIGUSR1)
    texts, sizes, limit = dict.fromkeys(files, b""), [-1], time.monotonic() + _SECONDS
    # All have written, and nobody writes any more.
    while time.monotonic() < limit and not (all(texts.values()) and sizes[-1] == sum(map(len, texts.values()))):
        sizes.append(sum(map(len, texts.values())))
        time.sleep(_SECONDS_A_LOOK)
        for process, file in files.items():
            texts[process] += file.read()
    for file in files.values():
        file.close()
    return {process: text.decode(errors="replace") for process, text in texts.items()}


def dump_later(seconds: float) -> None:
    """Write this process's stacks to stderr unless this is called again, or `keep_quiet`, within so many seconds.

    No other host can ask for them.
    """
    with suppress(ValueError, AttributeError, OSError):  # the stderr of a notebook or a test is not a file
        faulthandler.dump_traceback_later(seconds, file=sys.stderr)


def keep_quiet() -> None:
    """Write no stacks later."""
    faulthandler.cancel_dump_traceback_later()
