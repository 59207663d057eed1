"""The processes that `launch` started: hands them their task, passes on what they print, takes in what they answer.

All of it happens in the thread that called `launch`, one round of `select` after the other: prints appear in the
notebook cell that runs, Ctrl-C is noticed at once, and nothing runs on when `launch` is left.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Self

from drumline.core.errors import LaunchError
from drumline.pipeline.launch import by_value
from drumline.pipeline.launch.wire import FAILED, Failure, blank, read

_SECONDS_TO_EXIT = 5.0
_SECONDS_TO_TERMINATE = 15.0  # a rank that cleans up on a busy machine is not to be killed over it
_SECONDS_TO_SHOW_STACKS = 2.0
_SECONDS_A_ROUND = 0.1
_SECONDS_AN_EXIT_ROUND = 0.01  # an exit makes nothing readable
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")


@dataclass(eq=False)
class Rank:
    """One process, its socket, the file that it answers in, and what came of it: `failure`, or `parts` of a result."""

    number: int
    process: subprocess.Popen[bytes]
    control: socket.socket
    answer: IO[bytes]
    num_written: int = 0
    parts: list[bytearray] | None = None
    failure: Failure | None = None

    @property
    def is_finished(self) -> bool:
        """Return whether its outcome is known."""
        return self.parts is not None or self.failure is not None

    @property
    def is_alive(self) -> bool:
        """Return whether its process still runs."""
        return self.process.poll() is None

    def take_in(self) -> None:
        """Take the answer, if there is one: the socket has a byte that says so, or has come to its end."""
        try:
            kind = self.control.recv(1)
        except ConnectionError:
            return
        if kind == FAILED:
            self.failure = by_value.loads(read(self.answer.fileno()))
        elif kind:
            self.parts = read(self.answer.fileno())


@dataclass(eq=False)
class Stream:
    """One of a rank's two output streams, passed on line by line to this process's own, as it is now."""

    rank: Rank
    name: str
    source: int
    prefix: str
    pending: bytes = b""

    def pass_on(self) -> bool:
        """Write all lines that are complete; return False at the stream's end, with all of it written."""
        try:
            got = os.read(self.source, 1 << 16)
        except BlockingIOError:
            return True
        self.rank.num_written += len(got)
        self.pending += got
        lines = _LINE.findall(self.pending)
        self.pending = self.pending[sum(map(len, lines)) :]
        if not got and self.pending:
            lines, self.pending = [self.pending + b"\n"], b""
        if lines:
            text = "".join(self.prefix + line.decode(errors="replace") for line in lines)
            print(text, end="", file=getattr(sys, self.name), flush=True)
        return bool(got)


class Processes:
    """All ranks of a launch; leaving the block ends those that still run."""

    def __init__(self) -> None:
        self._all: list[Rank] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._all)

    def start(self, command: Callable[[int], Sequence[str]], env: Mapping[str, str], task: int, prefix: str) -> None:
        """Start one more rank; `command` is told the number of its socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = subprocess.Popen(
                    command(theirs.fileno()),
                    env=env,
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                )
            except OSError as error:
                ours.close()
                raise LaunchError(f"cannot start {sys.executable or 'Python'}: {error}") from error
        rank = Rank(len(self._all), process, ours, blank())
        self._all.append(rank)
        with contextlib.suppress(ConnectionError):  # a rank that is gone is noticed elsewhere
            socket.send_fds(ours, [b"."], [task, rank.answer.fileno()])
        self._selector.register(ours, selectors.EVENT_READ, rank)
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, Stream(rank, name, pipe.fileno(), prefix))

    def turn(self, seconds: float = _SECONDS_A_ROUND) -> None:
        """Wait a moment for anything that the ranks say, and act on it."""
        gone = [rank for rank in self._all if not rank.is_finished and not rank.is_alive]
        heard = set()
        for key, _ in self._selector.select(seconds):
            heard.add(key.data)
            if isinstance(key.data, Stream):
                if key.data.pass_on():
                    continue
            else:
                rank: Rank = key.data
                rank.take_in()
                if not rank.is_finished:
                    self._bury(rank)
            self._selector.unregister(key.fileobj)
        for rank in gone:
            # Its answer may have arrived just before its end, so only silence settles it.
            if rank not in heard and not rank.is_finished:
                self._bury(rank)

    def _bury(self, rank: Rank) -> None:
        """Note how a process ended that gave no answer."""
        at = time.monotonic()
        try:
            code = rank.process.wait(_SECONDS_TO_EXIT)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            code = rank.process.wait()
        text = f"exited with code {code} before fn returned" if code >= 0 else f"was killed by {_signal_name(-code)}"
        rank.failure = Failure(kind="", text=text, at=at)

    def show_stacks(self) -> None:
        """Have every rank that works write its Python stacks, and pass them on."""
        asked = [(rank, rank.num_written) for rank in self._all if not rank.is_finished and rank.is_alive]
        for rank, _ in asked:
            rank.process.send_signal(signal.SIGUSR1)
        limit = time.monotonic() + _SECONDS_TO_SHOW_STACKS
        while time.monotonic() < limit and any(rank.num_written == before for rank, before in asked):
            self.turn()
        self.turn()

    def let_go(self) -> None:
        """Tell every rank that all are finished, and wait for their processes to exit."""
        for rank in self._all:
            # The socket takes one byte: all that was sent before has been read.
            with contextlib.suppress(OSError):
                rank.control.send(b".")
        self._wait(_SECONDS_TO_EXIT)

    def end(self) -> None:
        """End all processes, gently and then not, and let go of everything; ending twice is fine."""
        try:
            for rank in self._all:
                if rank.is_alive:
                    rank.process.terminate()
            self._wait(_SECONDS_TO_TERMINATE)
        finally:
            for rank in self._all:
                rank.process.kill()
                rank.process.wait()
            self._close()

    def _wait(self, seconds: float) -> None:
        limit = time.monotonic() + seconds
        while any(rank.is_alive for rank in self._all) and time.monotonic() < limit:
            self.turn(_SECONDS_AN_EXIT_ROUND)

    def _close(self) -> None:
        streams = [key.data for key in (self._selector.get_map() or {}).values() if isinstance(key.data, Stream)]
        for stream in streams:
            # A process that a rank left behind may hold the stream open: take what is there, wait for no more.
            with contextlib.suppress(OSError, ValueError):
                while stream.pass_on() and select.select([stream.source], [], [], 0)[0]:
                    pass
        self._selector.close()
        for rank in self._all:
            for resource in (rank.control, rank.answer, rank.process.stdout, rank.process.stderr):
                if resource is not None:
                    resource.close()
        self._all.clear()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
