"""One fault from beginning to end: start a run, strike, see what it says, resume, compare with a run without fault."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from faults.config import Config
from faults.outcome import Outcome, checkpoints, near, outcome_of, same, step_of
from faults.plain import plain_losses
from faults.started import Started, until

ROOT = Path(__file__).resolve().parents[2]
SECONDS_TO_START = 300.0  # for PyTorch's imports on a busy machine
SECONDS_TO_FINISH = 300.0
SECONDS_TO_NOTICE = 60.0  # a failure that nobody has to wait for
SECONDS_TO_LEAVE = 30.0  # for the last process after a command has ended
_NOT_PASSED_ON = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "FAULT"}
_NOT_PASSED_ON |= {"PYTHONDONTWRITEBYTECODE"}  # it would compile Drumline anew for every rank


class Skip(Exception):
    """A fault that cannot be injected on this machine."""


@dataclass
class Row:
    """A line of the table."""

    name: str
    what: str
    detected: float | None = None  # seconds from the fault until it was told, or refused
    recovered: float | None = None  # seconds from the fault until the first step after it
    lost: int | None = None  # steps that were made and had to be made again
    outcome: str = ""
    result: str = "ok"
    seconds: float = 0.0
    output: str = field(default="", repr=False)  # of the commands, where it failed


@dataclass(frozen=True)
class Strike:
    """When a fault struck, after how many steps of its rank, and in which process."""

    time: float
    steps: int
    pid: int


class References:
    """Uninterrupted runs, made once for each config, and held against plain PyTorch."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[Config, tuple[Outcome, Path]] = {}
        self._locks: dict[Config, threading.Lock] = {}
        self._lock = threading.Lock()
        self.worst = 0.0  # the largest distance from plain PyTorch

    def of(self, config: Config) -> Outcome:
        """Return what a run of this config comes to if nothing happens to it."""
        return self._ran(config)[0]

    def copied(self, config: Config, to: Path) -> None:
        """Copy the folder of a run to which nothing happened."""
        shutil.copytree(self._ran(config)[1], to)

    def _ran(self, config: Config) -> tuple[Outcome, Path]:
        with self._lock:
            mine = self._locks.setdefault(config, threading.Lock())
        with mine:
            if config not in self._made:
                self._made[config] = self._run(config)
            return self._made[config]

    def _run(self, config: Config) -> tuple[Outcome, Path]:
        folder = Path(tempfile.mkdtemp(prefix="reference-", dir=self._folder))
        lab = Lab(Row("reference", "no fault"), folder, self)
        with lab:
            run = lab.train(config, "run")
            assert run.ends(SECONDS_TO_FINISH) == 0, f"the run without a fault failed:\n{run.text}"
            found = outcome_of(folder / "run")
            assert sorted(found.losses) == list(range(1, config.steps + 1)), "the run without a fault lacks steps"
            if not config.dropout:
                self.worst = max(self.worst, near(found.losses, plain_losses(config)))
        return found, folder / "run"


class Lab:
    """The folder and the commands of one fault; leaving the block ends what is left, and complains about it."""

    def __init__(self, row: Row, folder: Path, references: References) -> None:
        self.row, self.folder, self.references = row, folder, references
        self.marker = folder / "fired"
        self.started: list[Started] = []
        self._mounts: list[Path] = []

    # ---- commands ----------------------------------------------------------------------------------------------------

    def train(
        self,
        config: Config,
        out: str | Path,
        *words: str,
        fault: Mapping[str, Any] | None = None,
        torchrun: Sequence[str] | None = None,
        before: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Started:
        """Start `drumline train`, by itself or with these options of torchrun."""
        file = self.folder / f"config-{len(self.started)}.toml"
        file.write_text(config.text(), encoding="utf-8")
        command = ["-m", "drumline", "train", str(file), "--out", str(self.folder / out), *words]
        if torchrun is not None:
            ranks = () if "--nproc-per-node" in torchrun else ("--nproc-per-node", str(config.ranks))
            command = ["-m", "torch.distributed.run", *ranks, *torchrun, *command]
        return self.start([sys.executable, *command], name=f"run {Path(out).name}", fault=fault, before=before, env=env)

    def start(
        self,
        command: Sequence[str],
        *,
        name: str,
        fault: Mapping[str, Any] | None = None,
        before: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> Started:
        """Start a command that is ended with this fault."""
        made = {key: value for key, value in os.environ.items() if key not in _NOT_PASSED_ON}
        made |= {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", **(env or {})}
        if fault is not None:
            self.marker.unlink(missing_ok=True)
            made["FAULT"] = json.dumps({"marker": str(self.marker), **fault})
        self.started.append(Started(command, env=made, name=name, before=before))
        return self.started[-1]

    def strike(self, run: Started, seconds: float = SECONDS_TO_START) -> Strike:
        """Wait until the fault has struck."""

        def read() -> dict[str, Any] | None:
            with suppress(OSError, ValueError):
                found: dict[str, Any] = json.loads(self.marker.read_text())
                return found
            assert self.marker.exists() or not run.is_over, f"{run.name} ended before the fault"
            return None

        until(read, seconds, f"the fault in {run.name}")
        return Strike(**(read() or {}))

    def go_on(self) -> None:
        """Let a rank go on that was told to pause."""
        self.marker.with_name(f"{self.marker.name}.go").touch()

    # ---- what follows a fault ----------------------------------------------------------------------------------------

    def detected(self, run: Started, struck: float, pattern: str, seconds: float = SECONDS_TO_NOTICE) -> int:
        """Demand a line about the fault and an end of the run within `seconds` of it; returns the exit code."""
        at, _ = run.says(pattern, seconds)
        self.row.detected = max(at - struck, 0.0)
        return run.ends(seconds)

    def newest(self, out: str | Path) -> int:
        """Return the step of a run's newest whole checkpoint; 0 if it has none."""
        found = checkpoints(self.folder / out)
        return step_of(found[-1]) if found else 0

    def resumed(
        self,
        config: Config,
        source: str,
        struck: Strike,
        *,
        out: str = "resumed",
        on: Config | None = None,
        says: str = "",
        expected_step: int | None = None,
    ) -> None:
        """Resume, on another config if one is given; demand the newest checkpoint and the results of no fault."""
        newest = self.newest(source) if expected_step is None else expected_step
        run = self.train(on or config, out, "--resume", str(self.folder / source))
        at, match = run.says(r"step (\d+)/\d+ ", SECONDS_TO_START)
        assert run.ends(SECONDS_TO_FINISH) == 0, "the resumed run failed"
        first = int(match[1]) - 1
        assert first == newest, f"resumed from step {first}; the newest whole checkpoint is of step {newest}"
        if says:
            assert run.said(says), f"the resumed run does not say /{says}/"
        self.row.recovered, self.row.lost = at - struck.time, struck.steps - first
        self.compared(config, out, on)
        self.row.outcome = f"resumed from step {first}; {self.row.outcome}"

    def compared(self, config: Config, out: str, on: Config | None = None) -> None:
        """Demand that a run came to the same as one without a fault."""
        expected, found = self.references.of(config), outcome_of(self.folder / out)
        if on is None or on.ranks == config.ranks:
            same(found, expected)
            self.row.outcome = f"equal bit for bit ({len(found.losses)} losses, {len(found.tensors)} tensors)"
        else:
            worst = near(found.losses, expected.losses)
            self.row.outcome = f"on {on.ranks} ranks, {len(found.losses)} losses within {worst:.0e}"

    # ---- disks -------------------------------------------------------------------------------------------------------

    def mounted(self, name: str, *, size: str = "4m") -> Path:
        """Return a folder on a small disk of its own; skip where that is not permitted."""
        path = self.folder / name
        path.mkdir()
        made = _run("mount", "-t", "tmpfs", "-o", f"size={size}", "faults", str(path))
        if made:
            raise Skip(f"no file system can be mounted here: {made}")
        self._mounts.append(path)
        return path

    def read_only(self, path: Path) -> None:
        """Let nobody write to a mounted folder, root included."""
        made = _run("mount", "-o", "remount,ro", str(path))
        assert not made, made

    def __enter__(self) -> Lab:
        return self

    def __exit__(self, *error: object) -> None:
        left = {
            run.name: pids for run in self.started if (pids := run.left_behind(0 if error[0] else SECONDS_TO_LEAVE))
        }
        for run in self.started:
            run.end()
        self.row.output = "\n".join(f"--- {run.name}\n{run.text}" for run in self.started)
        for path in self._mounts:
            _run("umount", "-l", str(path))
        assert error[0] or not left, f"processes are left behind: {left}"


def _run(*command: str) -> str:
    """Run a tool, and return why it failed, or nothing."""
    try:
        made = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except OSError as error:
        return str(error)
    return made.stderr.strip() or f"exit code {made.returncode}" if made.returncode else ""


@contextmanager
def temporary() -> Iterator[Path]:
    """Yield a folder that is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="drumline-faults-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


Case = Callable[[Lab], None]
