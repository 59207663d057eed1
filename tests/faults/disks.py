"""Disks that are full, damaged or closed, and folders that another run has."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from faults.cases import fault
from faults.config import Config
from faults.lab import SECONDS_TO_FINISH, SECONDS_TO_START, Lab, Strike
from faults.outcome import checkpoints, losses_of

BASE = Config()
_REFUSED = 2  # the exit code of a command that was not started


# ---- no room ---------------------------------------------------------------------------------------------------------


@fault("disk-full", "the disk is full from step 8 on (ENOSPC)", short=True)
def disk_full(lab: Lab) -> None:
    """Two checkpoints are whole; later ones and the record of the steps do not fit, and training goes on to its end."""
    disk = lab.mounted("disk", size="2m")
    filler = disk / "filler"
    whole = str(disk / "run" / "checkpoints" / "step-00000006")
    given = {"do": "fill", "rank": 0, "step": 7, "at": "optimizer done", "filler": str(filler), "whole": whole}
    run = lab.train(BASE, "disk/run", fault=given)
    struck = lab.strike(run)
    code = lab.detected(run, struck.time, r"training continues without a checkpoint: .* No space left on device")
    assert code == 3, f"exit code {code}"
    assert run.said("step 12/12 "), "training did not go on"
    filler.unlink()
    assert lab.newest("disk/run") == 6, "a checkpoint appeared for which there was no room"
    lab.resumed(BASE, "disk/run", Strike(struck.time, BASE.steps, struck.pid))


@fault("quota", "rank 1 may write no file beyond 48 KiB while saving (EFBIG)")
def quota(lab: Lab) -> None:
    """One rank's part is missing, so no checkpoint appears, and training goes on to its end."""
    whole = str(lab.folder / "run" / "checkpoints" / "step-00000006")
    run = lab.train(BASE, "run", fault={"do": "shrink", "rank": 1, "step": 7, "at": "optimizer", "whole": whole})
    struck = lab.strike(run)
    code = lab.detected(run, struck.time, r"checkpoint .* process 1 could not write its files|File too large")
    assert code == 3, f"exit code {code}"
    assert max(losses_of(lab.folder / "run")) == BASE.steps, "training did not go on"
    assert lab.newest("run") == 6, "a checkpoint without rank 1's part appeared"
    lab.resumed(BASE, "run", Strike(struck.time, BASE.steps, struck.pid))


@fault("folder-replaced", "the folder of checkpoints is replaced by a file at step 8")
def folder_replaced(lab: Lab) -> None:
    """No checkpoint can even begin, and training goes on; the earlier ones were moved away, and are whole."""
    run = lab.train(BASE, "run", fault={"do": "nothing", "rank": 0, "step": 7, "at": "optimizer done", "pace": 1})
    struck, folder = lab.strike(run), lab.folder / "run" / "checkpoints"
    folder.rename(lab.folder / "kept")
    folder.write_text("mine")
    code = lab.detected(run, struck.time, r"training continues without a checkpoint: .*checkpoints cannot be written")
    assert code == 3, f"exit code {code}"
    assert run.said("step 12/12 "), "training did not go on"
    folder.unlink()
    (lab.folder / "kept").rename(folder)
    lab.resumed(BASE, "run", Strike(struck.time, max(losses_of(lab.folder / "run")), struck.pid))


# ---- damage ----------------------------------------------------------------------------------------------------------


def _truncate(checkpoint: Path) -> Path:
    file = next(checkpoint.glob("training-00002*"))
    os.truncate(file, file.stat().st_size - 100)
    return file


def _flip(checkpoint: Path) -> Path:
    file = next(checkpoint.glob("model-00001*"))
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 4
    file.write_bytes(raw)
    return file


def _remove(checkpoint: Path) -> Path:
    file = next(checkpoint.glob("model-00002*"))
    file.unlink()
    return file


def _flip_manifest(checkpoint: Path) -> Path:
    file = checkpoint / "manifest.json"
    raw = bytearray(file.read_bytes())
    at = raw.index(b'"step"') + 1
    raw[at] ^= 1
    file.write_bytes(raw)
    return file


def _add_damage(name: str, what: str, damage: Callable[[Path], Path], *, short: bool = False) -> None:
    @fault(f"damage-{name}", what, short=short)
    def damaged(lab: Lab) -> None:
        lab.references.copied(BASE, lab.folder / "run")
        *_, before, newest = checkpoints(lab.folder / "run")
        file = damage(newest)
        struck = Strike(time.time(), BASE.steps, 0)
        says = rf"(?=.*{newest.name})(?=.*{file.name})"
        lab.resumed(BASE, "run", struck, expected_step=int(before.name[-8:]), says=says)
        told = lab.started[-1].said(says)
        assert told is not None
        lab.row.detected = told[0] - struck.time


_add_damage("truncated", "the newest checkpoint's shard is truncated", _truncate)
_add_damage("flipped", "a bit of the newest checkpoint's shard is flipped", _flip, short=True)
_add_damage("missing", "the newest checkpoint's shard is missing", _remove)
_add_damage("manifest", "a bit of the newest checkpoint's manifest is flipped", _flip_manifest)


@fault("damage-two", "the two newest checkpoints are damaged; --continue, and keep lowered to 2")
def two_damaged(lab: Lab) -> None:
    """The run continues in its folder from the third, and what was damaged pushes no whole checkpoint out."""
    lab.references.copied(BASE, lab.folder / "run")
    third, *damaged = checkpoints(lab.folder / "run")
    for path in damaged:
        _flip(path)
    struck = time.time()
    run = lab.train(replace(BASE, keep=2), "run", "--continue")
    says = rf"passed over a damaged checkpoint: .*{damaged[-1].name}"
    assert lab.detected(run, struck, says, SECONDS_TO_START) == 0, "the run failed"
    first = run.said(r"step (\d+)/\d+ ")
    assert first is not None
    assert int(first[1][1]) - 1 == int(third.name[-8:]), f"continued from step {first[1][1]}"
    assert run.said(r"continues changed: checkpoint\.keep 3 is now 2"), "the changed setting is not told"
    assert [path.name for path in checkpoints(lab.folder / "run")] == [path.name for path in damaged], "saved again"
    lab.compared(BASE, "run")


@fault("damage-all", "every checkpoint is damaged")
def all_damaged(lab: Lab) -> None:
    """There is nothing to resume from, and training from the beginning was not asked for."""
    lab.references.copied(BASE, lab.folder / "run")
    for checkpoint in checkpoints(lab.folder / "run"):
        _flip(checkpoint)
    struck = time.time()
    run = lab.train(BASE, "resumed", "--resume", str(lab.folder / "run"))
    code = lab.detected(run, struck, r"drumline: .* holds no checkpoint that is whole", SECONDS_TO_START)
    assert code != 0, "it trained from nothing"
    lab.row.outcome = f"refused, exit code {code}"


# ---- folders ---------------------------------------------------------------------------------------------------------


def _refused(lab: Lab, out: Path, pattern: str) -> None:
    struck = time.time()
    run = lab.train(BASE, out)
    code = lab.detected(run, struck, pattern, SECONDS_TO_START)
    assert code in (_REFUSED, 3), f"exit code {code}"
    assert "Traceback" not in run.text, "a traceback is no message"
    lab.row.outcome = f"refused, exit code {code}"


@fault("folder-is-file", "a file in the place of the run's folder")
def folder_is_file(lab: Lab) -> None:
    """Refused before any rank starts."""
    (lab.folder / "run").write_text("mine")
    _refused(lab, lab.folder / "run", r"run is a file")
    assert (lab.folder / "run").read_text() == "mine"


@fault("folder-read-only", "the run's folder is on a read-only disk", short=True)
def folder_read_only(lab: Lab) -> None:
    """Not even root can write there."""
    disk = lab.mounted("disk")
    lab.read_only(disk)
    _refused(lab, disk / "run", r"drumline: .*(Read-only file system|cannot be written)")


@fault("second-run", "a second run in the folder of one that trains")
def second_run(lab: Lab) -> None:
    """The second is refused, and the first does not notice."""
    patient = replace(BASE, timeout=400.0)
    first = lab.train(patient, "run", fault={"do": "pause", "rank": 0, "step": 2, "at": "optimizer done"})
    lab.strike(first)
    struck = time.time()
    second = lab.train(BASE, "run")
    code = lab.detected(second, struck, r"run\.out: a run in .*run is under way: process \d+", SECONDS_TO_START)
    assert code == _REFUSED, f"exit code {code}"
    lab.go_on()
    assert first.ends(SECONDS_TO_FINISH) == 0, "the first run failed"
    lab.compared(BASE, "run")
    lab.row.outcome = f"second refused; the first {lab.row.outcome}"
    assert json.loads((lab.folder / "run" / "ended.json").read_text())
