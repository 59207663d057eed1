"""Which folder a run gets, and whether it continues one there; decided once, before any rank trains."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path

from drumline.checkpoint.folder import checkpoints
from drumline.checkpoint.reader import is_intact
from drumline.checkpoint.shelf import Shelf
from drumline.core.errors import UsageError
from drumline.core.measured.run import CONFIG, METRICS
from drumline.train.changed import check_changes
from drumline.train.claim import Claim, FolderInUse, claim, job_of, last_of, same_job
from drumline.train.config.settings import TrainSettings
from drumline.train.loop.checkpoints import FOLDER, found_in
from drumline.train.loop.log import reached

_MOST = 10_000  # default folders of one name


@dataclass(frozen=True, slots=True)
class Begun:
    """Settings with the folder of the run, which is taken; `continues` says whether it resumes a run there.

    `is_done` says that the run there has made all its steps: nothing is left to do.
    """

    settings: TrainSettings
    continues: bool
    claimed: Claim
    is_done: bool = False


def begin(settings: TrainSettings, *, job: str = "") -> Begun:
    """Take the folder of a run, or raise why not.

    A folder that holds a run is taken only to continue it: by a restart of the same job, with checkpoint.continues, or
    with checkpoint.resume naming the folder itself. Without run.out the folder is out/train/NAME, or NAME-2 and so on
    where others are taken; with checkpoint.continues it is always the first of them.
    """
    if settings.run.out or settings.checkpoint.continues:
        return _begun(settings, job)
    base = settings.folder
    if job and (own_folder := _of_job(Path(base), job)):
        return _begun(_in(settings, own_folder), job)
    for number in count(1):
        named = _in(settings, base if number == 1 else f"{base}-{number}")
        if not _holds(Path(named.folder)):
            try:
                return _begun(named, job)
            except FolderInUse:
                pass  # taken a moment ago
        if number == _MOST:
            raise UsageError(f"run.out: {base} and {_MOST - 1} more hold runs", fix="name another: --out FOLDER")
    raise AssertionError


def _in(settings: TrainSettings, folder: str) -> TrainSettings:
    return replace(settings, run=replace(settings.run, out=folder))


def _of_job(base: Path, job: str) -> str:
    """Return the default folder in which a job has trained before."""
    beside = base.parent.iterdir() if base.parent.is_dir() else ()
    mine = [path for path in beside if path.name.startswith(base.name) and _holds(path) and job_of(path) == job]
    return str(max(mine, key=lambda path: (path / CONFIG).stat().st_mtime)) if mine else ""


def _holds(folder: Path) -> bool:
    return (folder / CONFIG).exists()


def _begun(settings: TrainSettings, job: str) -> Begun:
    folder = Path(settings.folder)
    claimed = claim(folder, job=job)
    try:
        again, asked = same_job(claimed, job), settings.checkpoint.continues
        has_checkpoints = bool(checkpoints(folder / FOLDER))
        continues = (_holds(folder) and (again or resumes_itself(settings))) or (
            asked and (has_checkpoints or _has_begun(folder))
        )
        if settings.checkpoint.resume and not (continues and (again or (asked and has_checkpoints))):
            found_in(settings.checkpoint.resume)
        if _has_begun(folder) and not continues:
            raise UsageError(
                f"run.out: {folder} holds a run already, of {last_of(folder)}",
                expected="a folder without a run, or none yet",
                fix=f"name another folder, --out FOLDER, or continue it: --continue --out {folder}",
            )
        if asked and continues:
            check_changes(settings, folder, has_state=has_checkpoints)
        is_done = asked and continues and _is_done(settings, folder)
        claimed.keep(job)
    except BaseException:
        claimed.close()
        raise
    return Begun(settings, continues, claimed, is_done)


def _has_begun(folder: Path) -> bool:
    """Whether a run has begun to write to a folder, however far it came."""
    return _holds(folder) or (folder / METRICS).exists() or any(folder.glob("rank*.jsonl"))


def _is_done(settings: TrainSettings, folder: Path) -> bool:
    """Whether the run in a folder has made all its steps, and what it was to save at the end is intact."""
    if settings.checkpoint.at_end:
        newest = Shelf().newest(folder / FOLDER)
        return newest is not None and newest.step >= settings.run.steps and is_intact(newest.path)
    return reached(folder / METRICS) >= settings.run.steps


def resumes_itself(settings: TrainSettings) -> bool:
    """Whether a run is to continue in its own folder.

    >>> from drumline.train.config.settings import CheckpointSettings, RunSettings
    >>> resumes_itself(TrainSettings(run=RunSettings(out="a"), checkpoint=CheckpointSettings(resume="./a/")))
    True
    """
    resume, folder = settings.checkpoint.resume, os.path.realpath(settings.folder)
    return bool(resume) and os.path.realpath(resume) in (folder, os.path.join(folder, FOLDER))
