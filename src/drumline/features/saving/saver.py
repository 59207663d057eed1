"""Saving while training continues: copy the state aside, write it from a thread, let it appear once all have written.

    training thread   agree on step and token ─► copy aside ─► next steps ...
    each process               └─► write files, checksums, fsync ─► process-0000N.json
    process 0                                                        └─► wait for all ─► manifest ─► rename ─► remove

The threads of different processes meet in the folder alone, which all hosts must share. Every wait ends after `timeout`
seconds, and says what it waited for. A checkpoint that fails leaves the earlier ones as they are. The one just written
is never removed: what is removed for it, checkpoint/shelf.py decides.
"""

from __future__ import annotations

import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drumline.checkpoint import folder as folders
from drumline.checkpoint import manifest
from drumline.checkpoint.extra_files import Files, write_files
from drumline.checkpoint.line import Lineage
from drumline.checkpoint.saves import Saving
from drumline.checkpoint.shelf import Shelf
from drumline.checkpoint.staging import StagedFile
from drumline.core.errors import MismatchError, RecordError, RunError, WaitTimeout
from drumline.features.saving.snapshot import Snapshot, joined_groups

_SHORTEST, _LONGEST = 0.002, 0.1  # seconds between looks
_KINDS = ("model", "training")


@dataclass(frozen=True, slots=True)
class _Job:
    """One checkpoint as one process writes it."""

    folder: Path
    step: int
    token: str
    process: int
    num_processes: int
    keep: int | None
    timeout: float
    content: Mapping[str, Any]  # what process 0 adds to the manifest
    plain: Mapping[str, Any]
    beside: Files  # which process 0 adds to the checkpoint
    shelf: Shelf  # of process 0

    @property
    def part(self) -> Path:
        return folders.part_of(self.folder, self.step, self.token)

    @property
    def final(self) -> Path:
        return self.folder / folders.name_of(self.step)


class Saver:
    """Writes the checkpoints of one pipeline, one at a time, and keeps the memory that they are copied to."""

    def __init__(
        self, process: int, num_processes: int, collect: Callable[[str, Any], list[Any]], timeout: float
    ) -> None:
        self._process, self._num_processes = process, num_processes
        self._collect, self._timeout = collect, timeout
        self._files = {kind: StagedFile() for kind in _KINDS}
        self._shelf = Shelf()
        self._pending: Saving | None = None

    def save(
        self,
        folder: str | Path,
        step: int,
        taken: Callable[[], Snapshot],
        content: Mapping[str, Any],
        *,
        keep: int | None,
        beside: Files,
    ) -> Saving:
        """Begin a checkpoint; all processes call it alike, and its `refusal` is the same on all of them."""
        started = time.perf_counter()
        self.finish()
        job, problem = self._agreed(Path(folder), step, keep, content)
        if problem:
            refusal = RecordError(problem, expected="a folder that this user may write to")
            return Saving(job.final, step, refusal=refusal)
        snapshot = taken()
        for kind in _KINDS:
            self._files[kind].take(getattr(snapshot, kind))
        saving = self._pending = Saving(job.final, step, timeout=self._timeout)
        job = replace(job, plain=snapshot.plain, beside=beside)
        thread = threading.Thread(target=self._run, args=(job, saving), name="drumline checkpoint", daemon=True)
        thread.start()
        saving.seconds_blocked = time.perf_counter() - started
        return saving

    def finish(self, most_seconds: float | None = None) -> None:
        """Wait for the checkpoint under way; what it failed of is its own affair.

        With `most_seconds`, leave it after that: what is not whole stays invisible.
        """
        if most_seconds is not None:
            if self._pending is not None:
                self._pending.ends_within(most_seconds)
            return
        if self._pending is not None and not self._pending.ends_within(2 * self._timeout):
            raise WaitTimeout(
                f"the checkpoint {self._pending.path} is still being written after {2 * self._timeout:g} s",
                fix="save less often, or to a faster disk",
            )
        self._pending = None

    def _agreed(self, folder: Path, step: int, keep: int | None, content: Mapping[str, Any]) -> tuple[_Job, str]:
        """Return what all processes are about to write, and why process 0 cannot make the folder, if so."""
        if keep is not None and keep < 1:
            raise RecordError(f"keep is {keep}", expected="1 or more checkpoints, or None for all")
        token, problem = secrets.token_hex(4), ""
        if self._process == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                folders.clear_parts(folder)
                folders.part_of(folder, step, token).mkdir()
            except OSError as error:
                problem = f"{folder} cannot be written: {error.strerror or error}"
        answers = self._collect("save", (step, keep, token, problem))
        for rank, (its_step, its_keep, _, _) in enumerate(answers):
            if (its_step, its_keep) != (step, keep):
                raise MismatchError(
                    f"rank {rank} saves step {its_step} and keeps {its_keep}, this rank step {step} and keeps {keep}",
                    expected="the same call on every rank",
                )
        token, problem = answers[0][2:]
        places = self._process, self._num_processes
        return _Job(folder, step, token, *places, keep, self._timeout, content, {}, {}, self._shelf), problem

    def _run(self, job: _Job, saving: Saving) -> None:
        failure: BaseException | None = None
        try:
            self._write(job)
            if job.process == 0:
                _complete(job)
            else:
                _await(job)
        except BaseException as error:  # told to whoever waits for it
            failure = _refusal(job, error)
            if job.process == 0:
                shutil.rmtree(job.part, ignore_errors=True)
        finally:
            saving.end(failure)

    def _write(self, job: _Job) -> None:
        try:
            report: dict[str, Any] = {"files": {}, "tensors": {}, "plain": job.plain}
            for kind, staged in self._files.items():
                name = folders.file_of(kind, job.process, job.num_processes)
                report["tensors"][name] = staged.write(job.part / name)
                report["files"][name] = staged.num_bytes
            # Written aside and renamed: process 0 must not read half of it.
            manifest.write_json(job.part / f"{_told_by(job.process)}.part", report)
            (job.part / f"{_told_by(job.process)}.part").rename(job.part / _told_by(job.process))
        except OSError:
            _note_failure(job)
            raise


def _told_by(process: int) -> str:
    return f"process-{process + 1:05d}.json"


def _note_failure(job: _Job) -> None:
    """Tell the other processes by an empty file, for which a full disk has room."""
    with suppress(OSError):  # the others stop waiting by themselves
        (job.part / f"failed-{job.process + 1:05d}").touch()


def _refusal(job: _Job, error: BaseException) -> BaseException:
    if isinstance(error, OSError):
        return RunError(
            f"the checkpoint {job.final} could not be written: {error.strerror or error}",
            expected="room on the disk, and a folder that this user may write to",
            fix="earlier checkpoints are whole: free some space, and continue",
        )
    return error


def _complete(job: _Job) -> None:
    """As process 0: wait for all others' files, and let the checkpoint appear."""
    reports = [json.loads(_awaited(job, at).read_text()) for at in range(job.num_processes)]
    shares = [report["plain"]["optimizers"] for report in reports]
    content = {
        **job.content,
        "token": job.token,
        "num_processes": job.num_processes,
        "files": {name: size for report in reports for name, size in report["files"].items()},
        "tensors": {file: crcs for report in reports for file, crcs in report["tensors"].items()},
        "optimizers": [joined_groups(each) for each in zip(*shares, strict=True)],
        "generators": [report["plain"]["generators"] for report in reports],
        "due": [due for report in reports for due in report["plain"]["due"]],
    }
    weights = {name: file for file, crcs in content["tensors"].items() if file.startswith("model-") for name in crcs}
    size = sum(size for name, size in content["files"].items() if name.startswith("model-"))
    index = {"metadata": {"total_size": size}, "weight_map": weights}
    content["files"][folders.INDEX] = manifest.write_json(job.part / folders.INDEX, index)
    write_files(job.part, job.beside)
    for at in range(job.num_processes):
        (job.part / _told_by(at)).unlink()
    manifest.write_manifest(job.part, content)
    line = Lineage.of(content)
    job.shelf.announce(job.folder, line)
    final = folders.publish(job.part, job.folder, job.step, job.token)
    if job.keep is not None:
        _rotate(job, final, line, job.keep)


def _rotate(job: _Job, final: Path, line: Lineage, keep: int) -> None:
    """Remove older checkpoints; where that fails, the new one is whole all the same, and the next one tries again."""
    try:
        for path in job.shelf.surplus(job.folder, final, line, keep):
            folders.remove(path)
    except OSError as error:
        reason = error.strerror or error
        logging.getLogger("drumline").warning("old checkpoints in %s cannot be removed: %s", job.folder, reason)


def _awaited(job: _Job, process: int) -> Path:
    """Return what a process told of its files, once it has."""
    path = job.part / _told_by(process)

    def look() -> bool:
        failed = sorted(job.part.glob("failed-*"))
        if failed:
            number = int(failed[0].name.rpartition("-")[2]) - 1
            raise RunError(
                f"the checkpoint {job.final} is not written: process {number} could not write its files",
                expected="room on every process's disk",
                fix="earlier checkpoints are whole: free some space, and continue",
            )
        return path.exists()

    what = f"process {process} to write its files of the checkpoint {job.final}"
    _wait(look, job.timeout, what, fix="every host must see the same folder: use a shared file system")
    return path


def _await(job: _Job) -> None:
    """As another process: wait until process 0 has published the checkpoint, or given up."""
    _wait(lambda: not job.part.exists(), job.timeout, f"process 0 to publish the checkpoint {job.final}")
    try:
        published = manifest.read_content(job.final)["token"] == job.token
    except RecordError:
        published = False
    if not published:
        raise RunError(
            f"the checkpoint {job.final} was not published: another process failed to write its part",
            fix="see process 0's error; earlier checkpoints are whole",
        )


def _wait(look: Callable[[], bool], timeout: float, what: str, fix: str = "") -> None:
    deadline, pause = time.monotonic() + timeout, _SHORTEST
    while not look():
        if time.monotonic() > deadline:
            raise WaitTimeout(f"waited {timeout:g} s for {what}", fix=fix)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST)
