"""Copies of the tree in which changes are planted, and runs of pytest there."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue

from planting import ROOT

COPIED = ("src", "tests", "benchmarks", "scripts", "docs", "notebooks", "deploy", "examples", ".github")
COPIED_FILES = (
    "conftest.py",
    "hatch_build.py",
    "pyproject.toml",
    "constraints.txt",
    "Makefile",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "CITATION.cff",
    "LICENSE",
)
LEFT_OUT = shutil.ignore_patterns("__pycache__", "_build", "out", ".*")
PLUGINS = ("planting_plugin.py", "planting_map.py")
# An own configuration: that of the project names options of plugins that need not be installed.
CONFIG = """\
[pytest]
addopts = --import-mode=importlib --doctest-modules -q -p no:cacheprovider -p no:timeout -p planting_plugin
pythonpath = tests benchmarks
doctest_optionflags = ELLIPSIS
filterwarnings = error
markers =
    timeout: at most so many seconds
"""
ENDING = threading.Event()  # set as the whole is told to end: what runs is ended, and nothing is begun
NO_TESTS = 5  # pytest's exit code where nothing was collected
_NOT_KEPT = ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER")


@dataclass
class Ran:
    """How one run of pytest went: the names of what failed, of files that cannot be collected, and its seconds.

    `ended` names the tests that ended, `unfinished` the one that began and did not.
    """

    code: int
    failed: list[str]
    uncollected: list[str]
    seconds: float
    timed_out: bool = False
    output: str = ""
    ended: list[str] = field(default_factory=list)
    unfinished: str = ""
    cut: bool = False  # ended by a limit that says nothing of what ran


def _markers() -> str:
    """Return the project's own markers, as lines of that configuration."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return "".join(f"    {marker}\n" for marker in project["tool"]["pytest"]["ini_options"]["markers"])


class Trees:
    """Copies of the tree, one for each job."""

    def __init__(self, folder: Path, jobs: int, name: str = "tree") -> None:
        self.all: list[Path] = []
        self._free: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            tree = folder / f"{name}{number}"
            tree.mkdir()
            for text in COPIED:
                shutil.copytree(ROOT / text, tree / text, ignore=LEFT_OUT)
            for text in COPIED_FILES:
                shutil.copy2(ROOT / text, tree / text)
            for text in PLUGINS:
                shutil.copy2(Path(__file__).with_name(text), tree / text)
            (tree / "planted.ini").write_text(CONFIG + _markers())
            self.all.append(tree)
            self._free.put(tree)

    @contextmanager
    def free_copy(self) -> Iterator[Path]:
        """Take a copy for as long as the block lasts."""
        tree = self._free.get()
        try:
            yield tree
        finally:
            self._free.put(tree)


def run_tests(
    tree: Path,
    tests: Sequence[str],
    limit: float,
    *,
    deselect: Sequence[str] = (),
    first: bool,
    chosen: Sequence[tuple[str, float]] = (),
    env: Mapping[str, str] | None = None,
) -> Ran:
    """Run test files in a tree, up to the first failure if asked to, and end all of it past the limit.

    `chosen` names the tests of these files that run, in their order, each with its own limit.
    """
    report, listed = tree / "planted.txt", tree / "planted_chosen.json"
    report.write_text("")
    paths = [str(tree / "src"), str(tree), *filter(None, [os.environ.get("PYTHONPATH")])]
    around = {name: value for name, value in os.environ.items() if name not in _NOT_KEPT}
    around |= {"PYTHONPATH": os.pathsep.join(paths), "PLANTED_REPORT": str(report), "OMP_NUM_THREADS": "1"}
    around |= env or {}
    if chosen:
        listed.write_text(json.dumps(chosen))
        around["PLANTED_CHOSEN"] = str(listed)
    command = [sys.executable, "-m", "pytest", "-c", "planted.ini", "--rootdir", str(tree), "--tb=line"]
    command += ["-x"] if first else ["--continue-on-collection-errors"]
    if env and "PLANTED_REACH" in env:  # pytest compiles files that it is given anew for its assertions: without marks
        command += ["--assert=plain"]
    command += [part for name in deselect for part in ("--deselect", name)]
    began = time.monotonic()
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            [*command, *tests], cwd=tree, env=around, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        timed_out = not _ended(process.pid, began + limit)
        # All that is left of its session; until it is waited for, nobody else can have its number.
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        output.seek(0)
        text = output.read().decode(errors="replace")
    named = [json.loads(line) for line in report.read_text().splitlines() if line.endswith("]")]
    ended = [name for kind, name in named if kind == "end"]
    begun = [name for kind, name in named if kind == "begin"]
    return Ran(
        code,
        list(dict.fromkeys(name for kind, name in named if kind == "test")),
        [name for kind, name in named if kind == "collect"],
        time.monotonic() - began,
        timed_out,
        text,
        ended,
        begun[-1] if begun and begun[-1] not in ended else "",
    )


def _ended(process: int, deadline: float) -> bool:
    """Wait until a child has ended, without taking leave of it; return False past the deadline."""
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
        if time.monotonic() > deadline or ENDING.is_set():
            return False
        time.sleep(0.05)
    return True
