"""Files of a run on a disk that may be full: what it refuses waits in memory until there is room.

    add, put ──► waiting ──► file          once the disk refuses:   told once, and training continues
                    ▲    ╳                  once it takes them:      all that waits, in order; told once

The rest of a line that was half written comes first, so that no line is torn. What waits is bounded: beyond that the
oldest lines are lost, and their number is told.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from drumline.core.files import MIB

MOST_BYTES = 64 * MIB  # of one file's lines
ADDING = os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0)
_END = ord("\n")


@dataclass(slots=True)
class PendingLines:
    r"""Lines that a file has not taken yet.

    >>> waiting = PendingLines(most=8)
    >>> for line in (b"one\n", b"two\n", b"three\n"):
    ...     waiting.add(line)
    >>> bytes(waiting.data), waiting.num_lost
    (b'three\n', 2)
    """

    most: int = MOST_BYTES
    data: bytearray = field(default_factory=bytearray)
    num_lost: int = 0
    is_torn: bool = False  # whether the file ends in the middle of a line, whose rest comes first

    def add(self, line: bytes) -> None:
        """Take a line."""
        self.data += line
        if len(self.data) > self.most:
            begin, start = self._rest(), len(self.data) - len(line)
            end = self.data.find(b"\n", max(begin, len(self.data) - self.most // 2)) + 1
            end = max(begin, min(end, start))
            self.num_lost += self.data.count(b"\n", begin, end)
            del self.data[begin:end]

    def write(self, file: int) -> None:
        """Write all of it: the kernel may accept it in parts."""
        while self.data:
            count = os.write(file, self.data)
            self.is_torn = self.data[count - 1] != _END
            del self.data[:count]

    def cut(self, is_kept: Callable[[bytes], bool]) -> None:
        """Forget lines that are not kept, and the rest of one that is not whole in the file."""
        lines = bytes(self.data[self._rest() :]).splitlines(keepends=True)
        self.data[:] = b"".join(line for line in lines if is_kept(line))
        self.is_torn = False

    def _rest(self) -> int:
        return self.data.find(b"\n") + 1 if self.is_torn else 0


class Outbox:
    """Lines and whole files of one folder; `what` is what is written there, for people."""

    def __init__(self, folder: Path, what: str) -> None:
        self.folder = folder
        self.files: dict[str, int] = {}  # not file objects: these may be closed before who writes to them
        self._what = what
        self._lines: dict[str, PendingLines] = {}
        self._texts: dict[str, str] = {}
        self.is_waiting = False  # whether the disk has refused something that is not written yet

    def open(self, name: str, how: int) -> None:
        """Open a file for lines; raises if that cannot be. Files that nobody opened are opened by their first line."""
        self.files[name] = os.open(self.folder / name, how, 0o666)

    def add(self, name: str, line: bytes) -> None:
        """Take a line of a file; the next flush writes it."""
        self._lines.setdefault(name, PendingLines()).add(line)

    def put(self, name: str, text: str) -> None:
        """Write a file atomically, at once if the disk takes it: readers find all of it or nothing."""
        self._texts[name] = text
        self.flush()

    def flush(self) -> None:
        """Write all that waits, as far as the disk takes it."""
        refused: OSError | None = None
        for name, waiting in self._lines.items():
            try:
                if waiting.data:
                    if name not in self.files:
                        self.open(name, ADDING | os.O_CREAT)
                    waiting.write(self.files[name])
            except OSError as error:
                refused = error
        try:
            for name in list(self._texts):  # in order: the last one may say that all are there
                _put(self.folder / name, self._texts[name])
                del self._texts[name]
        except OSError as error:
            refused = error
        self._tell(refused)

    def cut(self, name: str, is_kept: Callable[[bytes], bool]) -> None:
        """Remove the lines of a file that are not kept, and an unfinished one."""
        self.flush()
        if name in self._lines:
            self._lines[name].cut(is_kept)
        try:
            changed = cut_lines(self.folder / name, is_kept)
        except OSError as error:
            self._tell(error)
            return
        if changed and name in self.files:
            os.close(self.files.pop(name))
            self.open(name, ADDING)

    def close(self) -> None:
        """Write what can be written, tell of the rest, and close the files."""
        self.flush()
        left = sum(line.data.count(b"\n") for line in self._lines.values())
        if left or self._texts:
            say(f"{self._what} in {self.folder} is not complete: the disk has not taken the last {left} lines")
        self.let_go()

    def let_go(self) -> None:
        """Close the files."""
        self._lines, self._texts = {}, {}
        while self.files:
            os.close(self.files.popitem()[1])

    def _tell(self, refused: OSError | None) -> None:
        """Say once that the disk refuses, and once that it does not any more."""
        if refused is not None and not self.is_waiting:
            reason = refused.strerror or refused
            say(f"cannot write {self._what} to {self.folder}: {reason}; training continues, and the rest waits")
        elif refused is None and self.is_waiting:
            lost = sum(line.num_lost for line in self._lines.values())
            say(f"{self._what} continues in {self.folder}" + (f"; {lost} lines are lost" if lost else ""))
        self.is_waiting = refused is not None


def say(text: str) -> None:
    """Write a line to stderr, which may lie on the same full disk."""
    with suppress(OSError, ValueError):
        print(f"drumline: {text}", file=sys.stderr, flush=True)


def cut_lines(path: Path, is_kept: Callable[[bytes], bool]) -> bool:
    r"""Remove the lines of a file that are not kept, and an unfinished one; return whether there were any.

    Whoever reads the file has all of the old one or all of the new one. On a full disk it is cut off where the first
    line goes, for which there is room.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp(), "lines")
    >>> _ = path.write_text("1\n2\n3\n4")
    >>> cut_lines(path, lambda line: line != b"2\n"), path.read_text()
    (True, '1\n3\n')
    >>> cut_lines(path, lambda line: True), cut_lines(path.with_name("none"), lambda line: True)
    (False, False)
    """
    if not path.exists():
        return False
    beside, before = path.with_name(f".{path.name}.part"), 0
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n") or not is_kept(line):
                break
            before += len(line)
        else:
            return False
        try:
            with beside.open("wb") as new:
                file.seek(0)
                new.writelines(line for line in file if line.endswith(b"\n") and is_kept(line))
            os.replace(beside, path)
        except OSError:
            beside.unlink(missing_ok=True)
            os.truncate(path, before)
    return True


def _put(path: Path, text: str) -> None:
    beside = path.with_name(f".{path.name}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    except OSError:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise
