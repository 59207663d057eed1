"""The checkpoints in a folder: which are whole, of which line, which one to continue from, and which to remove.

Looking is cheap: a manifest is read once, and files are held against their sizes. What a flipped bit has changed is
found when a checkpoint is loaded, where every tensor is compared with its checksum. Then training continues from an
earlier one, and the changed one no longer counts: it is on a line that was left.

    FOLDER/line.json    the line that was saved last, where the folder holds checkpoints of others too
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drumline.checkpoint.folder import checkpoints, step_of
from drumline.checkpoint.line import Lineage
from drumline.checkpoint.manifest import MANIFEST, OtherVersion, problem_of_files, read_content, write_json
from drumline.core.errors import RecordError
from drumline.core.files import FileKind, read_object

LAST = "line.json"
_LINE = FileKind("line of checkpoints", RecordError, "a line.json that Drumline wrote")


@dataclass(frozen=True, slots=True)
class ShelfEntry:
    """A checkpoint; `line` is None where its manifest cannot be read, `problem` says why it is not whole."""

    path: Path
    step: int
    line: Lineage | None
    problem: str = ""
    is_foreign: bool = False  # of another version of Drumline

    def is_on(self, line: Lineage) -> bool:
        """Whether it led to a line."""
        return self.line is not None and line.holds(self.line, self.step)


@dataclass(frozen=True, slots=True)
class ResumeOrder:
    """The checkpoints to continue from, in the order to try them, and whole ones that were left."""

    paths: tuple[Path, ...] = ()
    left: tuple[Path, ...] = ()


@dataclass(slots=True)
class Shelf:
    """A folder of checkpoints; remembers manifests that have not changed."""

    _known: dict[Path, tuple[tuple[int, ...], Mapping[str, Any]]] = field(default_factory=dict)

    def survey(self, folder: Path) -> list[ShelfEntry]:
        """Return the checkpoints of a folder, the largest step first."""
        paths = checkpoints(folder)
        self._known = {path: entry for path, entry in self._known.items() if path in paths}
        return sorted((self._entry(path) for path in paths), key=lambda shelf_entry: -shelf_entry.step)

    def _entry(self, path: Path) -> ShelfEntry:
        try:
            content = self._content(path)
            problem = problem_of_files(path, content["files"])
        except OtherVersion as error:
            return ShelfEntry(path, step_of(path), None, str(error), is_foreign=True)
        except (RecordError, OSError) as error:
            return ShelfEntry(path, step_of(path), None, str(error))
        return ShelfEntry(path, content["step"], Lineage.of(content), problem)

    def _content(self, path: Path) -> Mapping[str, Any]:
        """Return step, line and files of a checkpoint."""
        with suppress(OSError):
            status = os.stat(path / MANIFEST)
            mark = (status.st_ino, status.st_size, status.st_mtime_ns)
            if (known := self._known.get(path)) is not None and known[0] == mark:
                return known[1]
            content = read_content(path)
            brief: dict[str, Any] = {name: content[name] for name in ("step", "files", "line") if name in content}
            self._known[path] = mark, brief
            return brief
        raise RecordError(f"{path / MANIFEST} is missing")

    def choose(self, folder: Path) -> ResumeOrder:
        """Return which checkpoints of a folder to continue from: of the line that was saved last, the newest first.

        Those whose manifests cannot be read are among them, for whoever loads to say so.
        """
        entries = self.survey(folder)
        line = _line_of(folder, entries)
        mine = [shelf_entry for shelf_entry in entries if shelf_entry.line is None or shelf_entry.is_on(line)]
        left = [shelf_entry for shelf_entry in entries if shelf_entry not in mine and not shelf_entry.problem]
        return ResumeOrder(
            tuple(shelf_entry.path for shelf_entry in mine), tuple(shelf_entry.path for shelf_entry in left)
        )

    def newest(self, folder: Path) -> ShelfEntry | None:
        """Return the checkpoint to continue from, as far as its size tells."""
        entries = map(self._entry, self.choose(folder).paths)
        return next((shelf_entry for shelf_entry in entries if not shelf_entry.problem), None)

    def announce(self, folder: Path, line: Lineage) -> None:
        """Write down which line continues, before a checkpoint of it appears, if there are others to mistake for it."""
        is_there = (folder / LAST).exists()
        if is_there and last_line(folder) == line:
            return
        if is_there or any(not shelf_entry.is_on(line) for shelf_entry in self.survey(folder)):
            beside = folder / f".{LAST}.part"
            write_json(beside, {"line": [list(part) for part in line.parts]})
            os.replace(beside, folder / LAST)

    def surplus(self, folder: Path, written: Path, line: Lineage, keep: int) -> list[Path]:
        """Return which checkpoints to remove once another is written, so that `keep` whole ones of its line stay.

        Once these are there, damaged ones go too, and what the run has left. Until then these stay, and checkpoints of
        other runs always do.
        """
        others = [shelf_entry for shelf_entry in self.survey(folder) if shelf_entry.path != written]
        whole = [other for other in others if other.is_on(line) and not other.problem]
        gone = whole[keep - 1 :]
        if len(whole) >= keep - 1:
            gone += [other for other in others if other not in whole and _is_worthless(other, line)]
        return [shelf_entry.path for shelf_entry in gone]


def last_line(folder: Path) -> Lineage | None:
    """Return the line that a folder names, if it names one."""
    with suppress(RecordError, TypeError, ValueError, KeyError):
        parts = read_object(folder / LAST, _LINE)["line"]
        lineage = Lineage(tuple((str(name), None if until is None else int(until)) for name, until in parts))
        return lineage if lineage.is_open else None
    return None


def _line_of(folder: Path, entries: Sequence[ShelfEntry]) -> Lineage:
    """Return the line to continue from: the one that the folder names, else the one that was never left."""
    named = last_line(folder)
    if named is not None and any(shelf_entry.is_on(named) or shelf_entry.line is None for shelf_entry in entries):
        return named
    lines = [shelf_entry.line for shelf_entry in entries if shelf_entry.line is not None]
    for shelf_entry in entries:  # the largest step first
        if shelf_entry.line is not None and not any(_leaves(line, shelf_entry) for line in lines):
            return shelf_entry.line
    return Lineage()


def _leaves(line: Lineage, shelf_entry: ShelfEntry) -> bool:
    """Whether a line has left another before a checkpoint of that."""
    assert shelf_entry.line is not None
    return any(name == shelf_entry.line.parts[-1][0] for name, _ in line.parts) and not shelf_entry.is_on(line)


def _is_worthless(shelf_entry: ShelfEntry, line: Lineage) -> bool:
    """Whether nothing is lost with a checkpoint: no one can read it, or the run has left it or found it damaged."""
    if shelf_entry.line is None:
        return not shelf_entry.is_foreign
    return line.is_kin(shelf_entry.line)
