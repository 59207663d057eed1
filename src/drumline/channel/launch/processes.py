"""The processes that `launch` started: send them their task, forward what they print, and collect their answers.

All of this happens in the thread that called `launch`, in rounds of `select`. So prints appear in the running notebook
cell, Ctrl-C works at once, and nothing keeps running after `launch` returns.
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

from drumline.channel.launch import by_value
from drumline.channel.launch.wire import FAILED, STOPS, Failure, blank, read
from drumline.core.errors import LaunchError

_SECONDS_TO_EXIT = 5.0
_SECONDS_TO_TERMINATE = 15.0  # enough for a rank to clean up on a busy machine
_SECONDS_TO_TERMINATE_AT_ONCE = 1.5  # where somebody pressed Ctrl-C a second time
_SECONDS_TO_SHOW_STACKS = 2.0
_SECONDS_A_ROUND = 0.1
_SECONDS_AN_EXIT_ROUND = 0.01  # select does not notice exits
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")


@dataclass(eq=False)
class Rank:
    """A process, its socket, the file for its answer, and its outcome: `failure`, or the `parts` of a result."""

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
        """Return whether its process is still running."""
        return self.process.poll() is None

    def take_in(self) -> None:
        """Read the answer if it is there: the socket has a byte that says so, or has ended."""
        try:
            kind = self.control.recv(1)
        except ConnectionError:
            return
        if kind == FAILED:
            self.failure = by_value.loads(read(self.answer.fileno()))
        elif kind:
            self.parts = read(self.answer.fileno())


@dataclass(eq=False)
class OutputStream:
    """One of a rank's two output streams, forwarded line by line to the current stream of this process."""

    rank: Rank
    name: str
    source: int
    prefix: str
    pending: bytes = b""

    def pass_on(self) -> bool:
        """Write all complete lines; at the end of the stream, write the rest and return False."""
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
        self._asked = ""
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.end(at_once=bool(self._asked) and kind is KeyboardInterrupt)

    def __iter__(self) -> Iterator[Rank]:
        return iter(self._all)

    def start(self, command: Callable[[int], Sequence[str]], env: Mapping[str, str], task: int, prefix: str) -> None:
        """Start one more rank; `command` gets the number of its socket."""
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
        with contextlib.suppress(ConnectionError):  # other code notices that the rank is gone
            socket.send_fds(ours, [b"."], [task, rank.answer.fileno()])
        self._selector.register(ours, selectors.EVENT_READ, rank)
        for name, pipe in (("stdout", process.stdout), ("stderr", process.stderr)):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._selector.register(pipe, selectors.EVENT_READ, OutputStream(rank, name, pipe.fileno(), prefix))

    def turn(self, seconds: float = _SECONDS_A_ROUND) -> None:
        """Wait briefly for output or answers of the ranks, and handle them."""
        gone = [rank for rank in self._all if not rank.is_finished and not rank.is_alive]
        heard = set()
        for key, _ in self._selector.select(seconds):
            heard.add(key.data)
            if isinstance(key.data, OutputStream):
                if key.data.pass_on():
                    continue
            else:
                rank: Rank = key.data
                rank.take_in()
                if not rank.is_finished:
                    self._bury(rank)
            self._selector.unregister(key.fileobj)
        for rank in gone:
            # Its answer may have arrived just before it exited, so only silence is conclusive.
            if rank not in heard and not rank.is_finished:
                self._bury(rank)

    def _bury(self, rank: Rank) -> None:
        """Record how a process ended without giving an answer."""
        at = time.monotonic()
        try:
            code = rank.process.wait(_SECONDS_TO_EXIT)
        except subprocess.TimeoutExpired:
            rank.process.kill()
            code = rank.process.wait()
        text = f"exited with code {code} before fn returned" if code >= 0 else f"was killed by {_signal_name(-code)}"
        rank.failure = Failure(kind="", text=text, at=at)

    def show_stacks(self) -> None:
        """Let every running rank write its Python stacks, and forward them."""
        asked = [(rank, rank.num_written) for rank in self._all if not rank.is_finished and rank.is_alive]
        for rank, _ in asked:
            rank.process.send_signal(signal.SIGUSR1)
        limit = time.monotonic() + _SECONDS_TO_SHOW_STACKS
        while time.monotonic() < limit and any(rank.num_written == before for rank, before in asked):
            self.turn()
        self.turn()

    def ask_to_stop(self, cause: str) -> None:
        """Ask every rank once to stop after its step."""
        if self._asked:
            return
        self._asked = cause
        word = next(word for word, name in STOPS.items() if name == cause)
        for rank in self._all:
            with contextlib.suppress(OSError):  # a rank that has ended need not stop
                rank.control.send(word)

    def let_go(self) -> None:
        """Tell every rank that all have finished, and wait for their processes to exit."""
        for rank in self._all:
            # The send cannot block, because the rank has read all earlier bytes.
            with contextlib.suppress(OSError):
                rank.control.send(b".")
        self._wait(_SECONDS_TO_EXIT)

    def end(self, *, at_once: bool = False) -> None:
        """End all processes, first politely and then by force, and release everything; calling it twice is fine."""
        try:
            for rank in self._all:
                if rank.is_alive:
                    with contextlib.suppress(OSError):
                        rank.control.shutdown(socket.SHUT_WR)  # a stoppable rank takes SIGTERM alone for a request
                    rank.process.terminate()
                    rank.process.send_signal(signal.SIGCONT)  # one that somebody stopped would not hear it
            self._wait(_SECONDS_TO_TERMINATE_AT_ONCE if at_once else _SECONDS_TO_TERMINATE)
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
        streams = [key.data for key in (self._selector.get_map() or {}).values() if isinstance(key.data, OutputStream)]
        for stream in streams:
            # A child process of a rank may keep the stream open: read what is there and do not wait for more.
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
