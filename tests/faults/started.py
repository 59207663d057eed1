"""A command with all that it starts: its lines as they appear, waits with an end, and which of its processes are left.

Every process of a command inherits a word in its environment. So it is found by its id even if its parent has died.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

_WORD = "FAULTS_COMMAND"
_SECONDS_BETWEEN_LOOKS = 0.05
_SECONDS_TO_READ_THE_REST = 5.0


STARTED: set[Started] = set()  # that have not been ended


class Late(AssertionError):
    """Something did not happen in time."""


def until(look: Callable[[], object], seconds: float, what: str) -> float:
    """Wait until `look` returns something true, and return the time of day; raise Late after `seconds`."""
    limit = time.monotonic() + seconds
    while not look():
        if time.monotonic() > limit:
            raise Late(f"{what}: not within {seconds:g} s")
        time.sleep(_SECONDS_BETWEEN_LOOKS)
    return time.time()


class Started:
    """A command that runs in a session of its own; `name` is for messages."""

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], name: str, before: Sequence[str] = ()
    ) -> None:
        self.name, self._word = name, secrets.token_hex(8)
        self.lines: list[tuple[float, str]] = []
        self.began = time.time()
        # A shell in the background ignores Ctrl-C, and so would all that it starts.
        self._process = subprocess.Popen(
            ["env", "--default-signal=INT", *before, *command],
            env={**env, _WORD: self._word},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.pid = self._process.pid
        self.ended = 0.0
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        STARTED.add(self)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.lines.append((time.time(), line.rstrip("\n")))

    @property
    def text(self) -> str:
        """What it has printed so far."""
        return "\n".join(line for _, line in list(self.lines))

    def said(self, pattern: str) -> tuple[float, re.Match[str]] | None:
        """Return when a line matched first, and how."""
        for at, line in list(self.lines):
            if match := re.search(pattern, line):
                return at, match
        return None

    def says(self, pattern: str, seconds: float) -> tuple[float, re.Match[str]]:
        """Wait for a line, at most so long, or until the command has ended without it."""
        until(lambda: self.said(pattern) or self.is_over, seconds, f"the line /{pattern}/ of {self.name}")
        found = self.said(pattern)
        assert found is not None, f"{self.name} ended without a line like /{pattern}/"
        return found

    def ends(self, seconds: float) -> int:
        """Wait for the end of the command, at most so long, and return its exit code, negative for a signal."""
        until(lambda: self._process.poll() is not None, seconds, f"the end of {self.name}")
        self.ended = self.ended or time.time()
        self._reader.join(_SECONDS_TO_READ_THE_REST)  # a process left behind may keep the stream open
        assert self._process.returncode is not None
        return self._process.returncode

    @property
    def is_over(self) -> bool:
        """Whether the command has ended, and all that it printed was read."""
        return self._process.poll() is not None and not self._reader.is_alive()

    def send(self, number: signal.Signals, pid: int | None = None) -> float:
        """Send a signal to the command, or to one of its processes, and return the time of day."""
        os.kill(self.pid if pid is None else pid, number)
        return time.time()

    def processes(self) -> dict[int, dict[str, str]]:
        """Return every living process of the command, by its id, with its environment."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with suppress(OSError):
                    words = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
                    if f"{_WORD}={self._word}" in words:
                        found[int(folder.name)] = dict(word.split("=", 1) for word in words if "=" in word)
        return found

    def rank(self, number: int) -> int:
        """Return the process of a rank: the newest of those that have its number."""
        mine = [pid for pid, env in self.processes().items() if env.get("RANK") == str(number)]
        assert mine, f"{self.name} has no rank {number}"
        return max(mine)

    def left_behind(self, seconds: float) -> list[int]:
        """Return which processes still live after so long at most."""
        with suppress(Late):
            until(lambda: not self.processes(), seconds, "")
        return sorted(self.processes())

    def end(self) -> None:
        """Kill what is left, by its id."""
        STARTED.discard(self)
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait(10)
        self._reader.join(_SECONDS_TO_READ_THE_REST)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
