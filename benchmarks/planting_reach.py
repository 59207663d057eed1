"""Which tests reach which blocks of the package, as a file keeps it that `planting_suite.py` writes.

The file is lines of JSON that are only ever appended. A line with `sources` tells how blocks are numbered in those that
follow; one with `test` tells what a test reached; one with `done` names a test file that ran, and its text's hash. A
test file that is new or changed runs again, the others do not. In a source that has changed since, a test reaches any
block if it reached one.
"""

from __future__ import annotations

import base64
import hashlib
import json
import platform
import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from planting import PACKAGE, ROOT, Change
from planting_blocks import Blocks, blocks_of


@dataclass
class Test:
    """A test that passed without a change: its seconds, and what it reached, by one numbering."""

    name: str
    seconds: float
    mask: int
    numbering: Numbering

    @property
    def file(self) -> str:
        """The file it stands in."""
        return self.name.split("::")[0]


@dataclass
class Numbering:
    """How blocks were numbered: each file's hash, first number and count."""

    sources: dict[str, tuple[str, int, int]]

    def mask(self, file: str, blocks: Iterable[int], digest: str) -> int:
        """Return the bits of these blocks, or of the whole file if it has changed since."""
        then, first, count = self.sources.get(file, ("", 0, 0))
        if then != digest:
            return ((1 << count) - 1) << first
        return sum(1 << first + block for block in set(blocks))


@dataclass
class Reach:
    """What is known of which tests reach what."""

    tests: dict[str, Test] = field(default_factory=dict)
    done: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # of each unit of work, by its name
    left_out: dict[str, str] = field(default_factory=dict)  # tests that fail without a change, and files
    machine: str = ""

    def add(self, told: dict[str, Any], numbering: Numbering) -> None:
        """Take in what is told of a test."""
        name = told["test"]
        self.tests.pop(name, None)
        self.left_out.pop(name, None)
        if told["outcome"] == "passed":
            self.tests[name] = Test(name, told["seconds"], unpacked(told["blocks"]), numbering)
        elif told["outcome"] == "failed":
            self.left_out[name] = "fails without a change"

    def end_of_unit(self, told: dict[str, Any], fresh: set[str]) -> None:
        """Take in which files ran, and forget what an earlier text of them held."""
        files = told["done"]
        self.done |= files
        self.seconds[told["unit"]] = told["seconds"]
        for known in (self.tests, self.left_out):
            for name in [name for name in known if name.split("::")[0] in files and name not in fresh]:
                del known[name]
        self.left_out |= told["left_out"]

    @property
    def is_from_here(self) -> bool:
        """Whether it was made on a machine like this one: otherwise tests may fail here that passed there."""
        return self.machine == this_machine()


def this_machine() -> str:
    """Return what tests depend on: processor, Python, PyTorch."""
    found = [platform.machine(), platform.python_version()]
    for name in ("torch", "transformers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    return ", ".join(found)


def digest_of(path: Path) -> str:
    """Return a hash of a file's text."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def sources() -> list[str]:
    """Return the files of the package, as paths in the tree."""
    return [str(path.relative_to(ROOT)) for path in sorted((ROOT / PACKAGE).rglob("*.py"))]


def read(path: Path) -> Reach:
    """Read what a file tells, the newest of each test."""
    reach = Reach()
    if not path.exists():
        return reach
    numbering = Numbering({})
    fresh: set[str] = set()
    with path.open(encoding="utf-8") as file:
        for line in file:
            if not line.endswith("}\n"):
                continue  # cut off as the run was ended
            told = json.loads(line)
            if "sources" in told:
                numbering = Numbering({report: tuple(rest) for report, rest in told["sources"].items()})
                reach.machine = told["machine"]
            elif "done" in told:
                reach.end_of_unit(told, fresh)
                fresh = set()
            else:
                reach.add(told, numbering)
                fresh.add(told["test"])
    for name in [name for name, test in reach.tests.items() if test.file not in reach.done]:
        del reach.tests[name]
    return reach


def unpacked(text: str) -> int:
    """Return the bits of a map."""
    return int.from_bytes(zlib.decompress(base64.b85decode(text)), "little")


def packed(bits: int) -> str:
    """Return bits as text."""
    return base64.b85encode(zlib.compress(bits.to_bytes((bits.bit_length() + 7) // 8, "little"))).decode()


class Sites:
    """Looks up which tests reach a change."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach
        self._blocks: dict[str, tuple[str, Blocks, str]] = {}
        self._reached: dict[int, tuple[Numbering, int]] = {}

    def tests(self, bug: Change) -> list[Test]:
        """Return the tests that reach a change: those of its area first, then by their seconds.

        What runs as its file is imported counts as reached by what reaches anything of the file, and by its area; the
        value of a name of the file's own, such as `_LIMIT = 3`, only by what reaches a use of it. A change in C counts
        as reached by its area.
        """
        if not bug.path.endswith(".py"):  # C is not marked
            near = [test for test in self.reach.tests.values() if test.file in bug.tests()]
            return sorted(near, key=lambda item: (item.seconds, item.name))
        text, blocks, digest = self._of(bug.path)
        at, place = blocks.at(*bug.place(text)), bug.place(text)[0]
        area = set(bug.tests())
        imported = bool(at & blocks.imported)
        wanted = set(range(blocks.count)) - blocks.imported if imported else at
        own = imported and re.match(r"(_\w+)(?::[^\n=]+)? = ", text[text.rfind("\n", 0, place) + 1 :])
        if own and (users := blocks.users(text, own[1])):
            imported, wanted = False, users
        masks = dict[int, int]()
        found = []
        for test in self.reach.tests.values():
            key = id(test.numbering)
            if key not in masks:
                masks[key] = test.numbering.mask(bug.path, wanted, digest)
            if test.mask & masks[key] or (imported and test.file in area):
                found.append(test)
        return sorted(found, key=lambda item: (item.file not in area, item.seconds, item.name))

    def unreached(self, path: str) -> list[int]:
        """Return the lines of a file that begin a block which no test reaches; what is imported does not count."""
        text, blocks, digest = self._of(path)
        seen: set[int] = set()
        for numbering, bits in self._every().values():
            then, first, count = numbering.sources.get(path, ("", 0, 0))
            if then == digest:
                seen |= {at for at in range(count) if bits >> first + at & 1}
        firsts: dict[int, int] = {}
        for start, _, block in blocks.pieces:
            if not text.startswith(("def ", "async def "), start):
                firsts.setdefault(block, start)
        left = [start for block, start in firsts.items() if block not in seen | blocks.imported]
        return sorted(text.count("\n", 0, start) + 1 for start in left)

    def _every(self) -> dict[int, tuple[Numbering, int]]:
        """Return what all tests together reach, by each numbering."""
        if not self._reached:
            for test in self.reach.tests.values():
                _, bits = self._reached.get(id(test.numbering), (test.numbering, 0))
                self._reached[id(test.numbering)] = (test.numbering, bits | test.mask)
        return self._reached

    def _of(self, path: str) -> tuple[str, Blocks, str]:
        if path not in self._blocks:
            text = (ROOT / path).read_text(encoding="utf-8")
            self._blocks[path] = (text, blocks_of(text), digest_of(ROOT / path))
        return self._blocks[path]
