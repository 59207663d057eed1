"""Plants single bugs, one at a time, and shows which test notices each; what nothing notices needs a test.

    python benchmarks/planted.py [--jobs N] [--only PATTERN] [--limit SECONDS] [--json FILE]

Every bug is a text of one file in the place of another, in a copy of the tree; the tests of that file run until one
fails. First all tests run once without a bug: what fails then, or cannot be run here, is left out and listed. A run
that takes longer than it should counts as noticed.

    --only PATTERN    bugs whose name or file matches, as a shell would: "core/*", "*finite*"
    --tests FILE      run this file in place of those that belong to the bug's own; may be given several times
    --no-baseline     leave the run without a bug out, for a tree that is known to be green
    --list            only list the bugs
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from queue import SimpleQueue

from planted_bugs import BUGS
from planting import ROOT, Bug, Planted

COPIED = ("src", "tests", "benchmarks", "scripts", "docs", "notebooks", "conftest.py", "pyproject.toml", "README.md")
LEFT_OUT = shutil.ignore_patterns("__pycache__", "_build", "out", ".*")
# An own configuration: that of the project names options of plugins that need not be installed.
CONFIG = """\
[pytest]
addopts = --import-mode=importlib --doctest-modules -q -p no:cacheprovider -p noted_failures
pythonpath = tests benchmarks
doctest_optionflags = ELLIPSIS
filterwarnings = error
markers =
    torch: compares with PyTorch
    slow: full matrices
    browser: opens pages
    matrix: thinned
    cold_ranks: fresh processes
"""
# A plugin that writes down what failed, in words that need no parsing.
REPORT = """\
import os

import drumline.schedules  # first by its own name: doctests that import a recipe by its path would register it again

def _write(kind, report):
    with open(os.environ["PLANTED_REPORT"], "a") as file:
        file.write(f"{kind} {report.nodeid}\\n")

def pytest_collectreport(report):
    if report.failed:
        _write("collect", report)

def pytest_runtest_logreport(report):
    if report.failed:
        _write("test", report)
"""
NO_TESTS = 5  # pytest's exit code where nothing was collected


@dataclass
class Ran:
    """How one run of pytest went: the names of what failed, of files that cannot be collected, and its seconds."""

    code: int
    failed: list[str]
    uncollected: list[str]
    seconds: float
    timed_out: bool = False
    output: str = ""


@dataclass
class Baseline:
    """What the tests do without a bug: what is left out, and how long each file takes."""

    not_run: list[str] = field(default_factory=list)
    failing: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Outcome:
    """What came of a bug: the test that noticed it, or none."""

    name: str
    file: str
    breaks: str
    caught: bool
    by: str
    seconds: float
    survives: str = ""


class Trees:
    """Copies of the tree, one for each job."""

    def __init__(self, folder: Path, jobs: int) -> None:
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            tree = folder / f"tree{number}"
            tree.mkdir()
            for name in COPIED:
                source = ROOT / name
                if source.is_dir():
                    shutil.copytree(source, tree / name, ignore=LEFT_OUT)
                elif source.exists():
                    shutil.copy2(source, tree / name)
            (tree / "planted.ini").write_text(CONFIG)
            (tree / "noted_failures.py").write_text(REPORT)
            self._free.put(tree)

    @contextmanager
    def one(self) -> Iterator[Path]:
        """Take a copy for as long as the block lasts."""
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)


def run_tests(tree: Path, tests: Sequence[str], limit: float, *, deselect: Sequence[str] = (), first: bool) -> Ran:
    """Run test files in a tree, up to the first failure if asked to, and end all of it past the limit."""
    report = tree / "planted.txt"
    report.write_text("")
    paths = [str(tree / "src"), str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PLANTED_REPORT": str(report), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-c", "planted.ini", "--rootdir", str(tree), "--tb=line"]
    command += ["-x"] if first else ["--continue-on-collection-errors"]
    command += [part for name in deselect for part in ("--deselect", name)]
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, *tests], cwd=tree, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        timed_out = not _ended(process.pid, began + limit)
        # All that is left of its session; until it is waited for, nobody else can have its number.
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    named = [line.split(" ", 1) for line in report.read_text().splitlines()]
    return Ran(
        code,
        [name for kind, name in named if kind == "test"],
        [name for kind, name in named if kind == "collect"],
        time.monotonic() - began,
        timed_out,
        text,
    )


def _ended(process: int, deadline: float) -> bool:
    """Wait until a child has ended, without taking leave of it; return False past the deadline."""
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def baseline(trees: Trees, pool: ThreadPoolExecutor, files: Sequence[str], limit: float) -> Baseline:
    """Run every test file once, without a bug."""
    found = Baseline()

    def run(file: str) -> tuple[str, Ran]:
        with trees.one() as tree:
            return file, run_tests(tree, [file], limit, first=False)

    for done in as_completed([pool.submit(run, file) for file in files]):
        file, ran = done.result()
        found.seconds[file] = ran.seconds
        if ran.uncollected or ran.timed_out or (ran.code not in (0, NO_TESTS) and not ran.failed):
            found.not_run.append(file)
            lines = [line for line in ran.output.splitlines() if line.strip()]
            print(f"  not run: {file}: {lines[-1][:150] if lines else 'no output'}", flush=True)
        found.failing += ran.failed
        for name in ran.failed:
            print(f"  fails without a bug, left out: {name}", flush=True)
    return found


def noticed(bug: Bug, files: Sequence[str], trees: Trees, known: Baseline, limit: float, number: int) -> Outcome:
    """Plant a bug and return which test of the files noticed it."""
    tests = [one for one in files if one not in known.not_run]
    allowed = max(limit, 60 + 4 * sum(known.seconds.get(one, 0.0) for one in tests))
    # Far from now, and no two alike: otherwise Python could take compiled code of another text for this one's.
    moment = 1_000_000_000 + 10.0 * number
    with trees.one() as tree, Planted(bug, tree, moment):
        ran = run_tests(tree, tests, allowed, deselect=known.failing, first=True)
    by = next(iter([*ran.failed, *ran.uncollected]), "")
    if not by and ran.timed_out:
        by = f"the time limit, {allowed:.0f} s"
    elif not by and ran.code not in (0, NO_TESTS):
        by = f"pytest itself, exit code {ran.code}: {(ran.output.strip().splitlines() or [''])[-1][:80]}"
    return Outcome(bug.name, bug.file, bug.breaks, bool(by), by, ran.seconds, bug.survives)


def table(outcomes: Sequence[Outcome]) -> str:
    """Return a line for each bug, the shares by folder, and the survivors with the reason."""
    width = max(len(one.name) for one in outcomes)
    lines = [f"{one.name:<{width}}  {one.by if one.caught else 'NOT NOTICED'}" for one in outcomes]
    folders: dict[str, list[bool]] = {}
    for one in outcomes:
        folders.setdefault(one.file.partition("/")[0], []).append(one.caught)
    lines.append("")
    for folder, caught in [*folders.items(), ("all", [one.caught for one in outcomes])]:
        lines.append(f"{folder:<10} {sum(caught):>4} of {len(caught):>4} noticed, {sum(caught) / len(caught):.0%}")
    for one in outcomes:
        if not one.caught:
            lines += ["", f"{one.name}, {one.file}: {one.breaks}", f"    {one.survives or 'needs a test'}"]
    return "\n".join(lines)


def chosen(patterns: Sequence[str]) -> list[Bug]:
    """Return the bugs that match any of the patterns, all without one."""
    texts = {bug: (bug.name, bug.file) for bug in BUGS}
    return [bug for bug in BUGS if not patterns or any(fnmatch(one, p) for one in texts[bug] for p in patterns)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--tests", action="append", default=[])
    parser.add_argument("--limit", type=float, default=600.0)
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    bugs = chosen(args.only)

    given: list[str] = args.tests

    def tests_of(bug: Bug) -> Sequence[str]:
        return given or bug.tests()

    if not bugs:
        parser.error(f"no bug matches {', '.join(args.only)}")
    if args.list:
        print("\n".join(f"{bug.file}: {bug.name}: {bug.breaks}" for bug in bugs))
        return 0
    with tempfile.TemporaryDirectory(prefix="planted-") as folder, ThreadPoolExecutor(args.jobs) as pool:
        trees = Trees(Path(folder), args.jobs)
        known = Baseline()
        if not args.no_baseline:
            print("without a bug:", flush=True)
            known = baseline(trees, pool, sorted({one for bug in bugs for one in tests_of(bug)}), args.limit)
        began, outcomes = time.monotonic(), dict[str, Outcome]()
        runs = [
            pool.submit(noticed, bug, tests_of(bug), trees, known, args.limit, number)
            for number, bug in enumerate(bugs)
        ]
        for done in as_completed(runs):
            one = done.result()
            outcomes[one.name] = one
            said = f"noticed by {one.by}" if one.caught else "NOT NOTICED"
            print(f"[{len(outcomes)}/{len(bugs)}] {one.name}: {said} ({one.seconds:.0f} s)", flush=True)
            _save(args.json, [outcomes[bug.name] for bug in bugs if bug.name in outcomes], known)
    print(f"\n{table([outcomes[bug.name] for bug in bugs])}\n\n{time.monotonic() - began:.0f} s, {args.jobs} at a time")
    return 0


def _save(path: Path | None, outcomes: Sequence[Outcome], known: Baseline) -> None:
    """Write what is known so far: a run that is ended early leaves it behind."""
    if path is not None:
        caught = sum(one.caught for one in outcomes)
        told = {"bugs": len(outcomes), "noticed": caught, "baseline": asdict(known)}
        path.write_text(json.dumps({**told, "outcomes": [asdict(one) for one in outcomes]}, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
