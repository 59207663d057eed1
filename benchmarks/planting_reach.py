"""Which tests reach which blocks of the package: one run of the suite with marked code, kept in a file.

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
import shutil
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from planting import PACKAGE, ROOT, Change
from planting_blocks import Blocks, blocks_of, write_marked
from planting_trees import NO_TESTS, Ran, Trees, run_tests

# Folders whose files take longest go first, so that none is left alone at the end.
_LONGEST = ("mesh", "train", "pipeline", "served", "cli", "hosts", "peers", "tests", "runtime", "plan", "report")


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


def units() -> dict[str, list[str]]:
    """Return what is run together: a test file each; helpers and the package's doctests by folder."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        name = str(path.relative_to(ROOT))
        if path.name.startswith("test_"):
            found[name] = [name]
        elif ">>>" in path.read_text(encoding="utf-8") and path.name != "conftest.py":
            found.setdefault(f"doctests of {path.parent.relative_to(ROOT)}", []).append(name)
    for name in sources():
        if ">>>" in (ROOT / name).read_text(encoding="utf-8"):
            found.setdefault(f"doctests of {'/'.join(name.split('/')[:3])}", []).append(name)
    return found


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
                numbering = Numbering({one: tuple(rest) for one, rest in told["sources"].items()})
                reach.machine = told["machine"]
            elif "done" in told:
                reach.end_of_unit(told, fresh)
                fresh = set()
            else:
                reach.add(told, numbering)
                fresh.add(told["test"])
    for name in [name for name, one in reach.tests.items() if one.file not in reach.done]:
        del reach.tests[name]
    return reach


def extend(path: Path, jobs: int, limit: float, deadline: float = float("inf"), only: Sequence[str] = ()) -> Reach:
    """Run what is not in the file yet with marked code, append what it reached, and return all that is known."""
    reach = read(path)
    stale = {
        unit: files
        for unit, files in units().items()
        if (not only or any(one in unit for one in only))
        and any(reach.done.get(one) != digest_of(ROOT / one) for one in files)
    }
    if not stale:
        return reach
    print(f"reach: {len(stale)} of {len(units())} units of tests to run, {jobs} at a time", flush=True)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees = Trees(Path(folder), min(jobs, len(stale)))
        numbered = _mark(trees.all)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"sources": numbered, "machine": this_machine()}) + "\n")

            def run(unit: str) -> tuple[str, Ran | None, list[dict[str, object]]]:
                if time.monotonic() > deadline:
                    return unit, None, []
                with trees.one() as tree, tempfile.TemporaryDirectory(dir=folder) as raw:
                    left = min(limit, deadline + 30 - time.monotonic())
                    ran = run_tests(tree, stale[unit], left, first=False, env={"PLANTED_REACH": raw})
                    return unit, ran, list(_resolved(Path(raw)))

            order = sorted(stale, key=lambda one: (-reach.seconds.get(one, 0.0), _guess(one)))
            for number, done in enumerate(as_completed([pool.submit(run, unit) for unit in order]), 1):
                unit, ran, told = done.result()
                if ran is None:
                    continue
                for one in told:
                    file.write(json.dumps(one) + "\n")
                left_out = _left_out(stale[unit], ran)
                hashes = {one: digest_of(ROOT / one) for one in stale[unit]}
                end = {"done": hashes, "unit": unit, "seconds": round(ran.seconds, 2), "left_out": left_out}
                file.write(json.dumps(end) + "\n")
                file.flush()
                gone = sum(one["outcome"] == "failed" for one in told)
                said = f"{len(told)} tests, {ran.seconds:.0f} s"
                said += f", {gone} fail without a change" if gone else ""
                said += "".join(f"; left out: {one}: {why}" for one, why in left_out.items())
                print(f"[{number}/{len(order)}, {time.monotonic() - began:.0f} s] {unit}: {said}", flush=True)
    return read(path)


def _guess(unit: str) -> tuple[int, int]:
    """Return where a unit of unknown length belongs."""
    folder = Path(unit).parent.name
    rank = _LONGEST.index(folder) if folder in _LONGEST else len(_LONGEST)
    return rank, -(ROOT / unit).stat().st_size if (ROOT / unit).exists() else 0


def _mark(trees: Sequence[Path]) -> dict[str, tuple[str, int, int]]:
    """Mark all files of the package in all trees; return how their blocks are numbered."""
    first, found = 0, {}
    for name in sources():
        written, count = write_marked(trees[0] / name, first)
        found[name] = (digest_of(trees[0] / name), first, count)
        first += count
        for tree in trees[1:]:
            target = tree / written.relative_to(trees[0])
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(written, target)
    return found


def _left_out(files: Sequence[str], ran: Ran) -> dict[str, str]:
    """Return the files that cannot be run here, and why."""
    lines = [line for line in ran.output.splitlines() if line.strip()]
    last = lines[-1][:150] if lines else "no output"
    if ran.timed_out:
        return dict.fromkeys(files, f"took longer than {ran.seconds:.0f} s")
    if not ran.ended and not ran.uncollected and ran.code not in (0, NO_TESTS):
        return dict.fromkeys(files, last)
    return {one: last for one in files if one in ran.uncollected}


def _resolved(raw: Path) -> Iterator[dict[str, object]]:
    """Yield what each test of a process reached, with what was set up for it and others."""
    for path in sorted(raw.glob("reach-*.jsonl")):
        told = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        shared: dict[tuple[str, str], int] = {}
        for one in told:
            if "fixture" in one:
                key = (one["fixture"], one["file"])
                shared[key] = shared.get(key, 0) | unpacked(one["blocks"])
        for one in told:
            if "test" in one:
                file = one["test"].split("::")[0]
                bits = unpacked(one["blocks"])
                for (name, place), more in shared.items():
                    if name in one["uses"] and (place in ("", ".") or file.startswith(place)):
                        bits |= more
                yield {**{key: one[key] for key in ("test", "outcome", "seconds")}, "blocks": packed(bits)}


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

    def tests(self, bug: Change) -> list[Test]:
        """Return the tests that reach a change: those of its area first, then by their seconds.

        What runs as its file is imported counts as reached by what reaches anything of the file, and by its area; the
        value of a name of the file's own, such as `_LIMIT = 3`, only by what reaches a use of it.
        """
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
        return sorted(found, key=lambda one: (one.file not in area, one.seconds, one.name))

    def _of(self, path: str) -> tuple[str, Blocks, str]:
        if path not in self._blocks:
            text = (ROOT / path).read_text(encoding="utf-8")
            self._blocks[path] = (text, blocks_of(text), digest_of(ROOT / path))
        return self._blocks[path]
