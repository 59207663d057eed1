"""Starting a run: local ranks from one command, or in place where torchrun has started them."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drumline.channel.devices.choice import AskedDevice, kind_for, refusal, too_many_text
from drumline.channel.devices.visible import in_use, visible
from drumline.channel.launch.launch import launch
from drumline.channel.launch.worker import die_with
from drumline.core.errors import DrumlineError, UsageError, counted
from drumline.engine.ranks import transports
from drumline.train.capacity import check_room
from drumline.train.claim import Claim, job_here, take_part
from drumline.train.config.settings import TrainSettings
from drumline.train.config.tables import TableSource
from drumline.train.folder import begin
from drumline.train.preflight import preflight
from drumline.train.replan import fewest_of, planned_for
from drumline.train.restarts import Restarts

Train = Callable[..., Any]


def start(settings: TrainSettings, *, train: Train | None = None, source: TableSource | None = None) -> Any:
    """Run `train(settings)` on every rank and return what rank 0 returned; `train` is `run_training` unless given.

    Under torchrun this process is one rank, and gets its own result. Otherwise local ranks are started, or none where
    one process is enough, and started again as often as failures.restarts says. A folder that holds a run or cannot be
    written, a device that is not there and a wrong number of processes are refused before any rank starts.

    `train` also gets `continues=True` if it resumes a run in its folder. `source` says where the settings
    were given: what `preflight` finds wrong with model and data before any rank starts then has its file and line.
    """
    settings = with_device(settings)
    if is_started():
        planned = for_world(settings)
        in_use(torch.device(planned.pipeline.device))
        return (train or partial(_train_as_rank, is_replanned=planned is not settings))(planned)
    if settings.failures.elastic and not settings.failures.restarts:
        raise UsageError(
            "failures.elastic without restarts", expected="failures.restarts of 1 or more", fix="add --restarts 3"
        )
    if train is None:
        preflight(settings, source)
    is_own, train, begun = train is None, train or _train_in, begin(settings)
    with begun.claimed:
        if begun.is_done:
            return _merged(begun.settings, _nothing_left(begun.settings))
        if settings.failures.elastic:
            _warn_of_room(begun.settings)
        attempt = partial(_attempt, train)
        outcome = Restarts(begun.settings, _check_room).run(attempt, continues=begun.continues)
        return _merged(begun.settings, outcome) if is_own else outcome


def _attempt(train: Train, settings: TrainSettings, continues: bool) -> Any:
    """Train once, in this process where nothing needs another."""
    more = {"continues": True} if continues else {}
    num_ranks = processes_of(settings)
    if num_ranks == 1 and not settings.failures.restarts:
        torch.set_num_threads(threads_of(settings))
        return train(settings, **more)
    return launch(
        train,
        settings,
        num_ranks=num_ranks,
        threads=threads_of(settings),
        backend="gloo" if settings.pipeline.device.startswith("cpu") else None,
        prefix=False,
        stoppable=True,
        kwargs=more,
    )[0]


def _train_in(settings: TrainSettings, *, continues: bool = False) -> Any:
    """Train as a rank in a folder that its starter has taken."""
    from drumline.train.loop.run import run_training

    if is_started():
        take_part(settings.folder)
    return run_training(settings, continues=continues)


def _train_as_rank(settings: TrainSettings, *, is_replanned: bool) -> Any:
    """Train as a rank of torchrun: rank 0 takes the folder and tells the others which it is, and whether it continues.

    torchrun starts all ranks again after a failure, and keeps the job's name. So the ranks find their run again.
    """
    die_with(os.getppid(), signal.SIGKILL)  # SIGTERM would stop the whole run, where its other hosts may continue
    error: tuple[str, bool, bool] | DrumlineError | None = None
    if os.environ["RANK"] == "0":
        error = _outcome(settings, is_replanned=is_replanned)
    if not transports.alone(settings.pipeline.transport):
        pipeline = settings.pipeline
        transports.num_ranks(pipeline.transport, None, timeout=pipeline.timeout, interface=pipeline.interface)
        error = transports.told_by_first("run folder", error, timeout=settings.pipeline.timeout)
    assert error is not None, "a single rank is the first"
    if isinstance(error, DrumlineError):
        raise error
    folder, continues, is_done = error
    settings = replace(settings, run=replace(settings.run, out=folder))
    outcome = _nothing_left(settings) if is_done else _train_in(settings, continues=continues)
    return _merged(settings, outcome) if os.environ["RANK"] == "0" else outcome


def _merged(settings: TrainSettings, outcome: Any) -> Any:
    """Return the outcome of a run, whose adapter is merged into its model where that is asked for and it is done."""
    if not settings.adapter.merge or outcome.stopped is not None:
        return outcome
    from drumline.train.tune.merge import merge_last

    return replace(outcome, merged=str(merge_last(settings)))


def _nothing_left(settings: TrainSettings) -> Any:
    """Return the outcome of a run that had made all its steps before."""
    from drumline.train.loop.training import TrainResult

    return TrainResult(Path(settings.folder), first_step=settings.run.steps)


def _outcome(settings: TrainSettings, *, is_replanned: bool) -> tuple[str, bool, bool] | DrumlineError:
    """Return the folder of a run that is taken by this process, whether it continues one there, and has nothing to do.

    Or return why not.
    """
    try:
        if is_replanned:
            check_room(settings)
        begun = begin(settings, job=job_here())
    except DrumlineError as error:
        return error
    _claims.append(begun.claimed)
    return begun.settings.folder, begun.continues, begun.is_done


_claims: list[Claim] = []  # until this process ends


def _check_room(settings: TrainSettings) -> None:
    """Raise if ranks cannot hold the model; a process of its own finds that, for its memory to be free afterwards."""
    launch(check_room, settings, num_ranks=1, threads=threads_of(settings), backend="gloo", prefix=False)


def _warn_of_room(settings: TrainSettings) -> None:
    """Say before a run starts if the fewest ranks that it may come to cannot hold the model."""
    fewest = fewest_of(settings)
    try:
        _check_room(planned_for(settings, fewest, quiet=True))
    except UsageError as error:
        logging.getLogger("drumline").warning("failures.min_ranks is %d: %s", fewest, error)


def is_started() -> bool:
    """Whether torchrun, or something like it, has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def for_world(settings: TrainSettings) -> TrainSettings:
    """Return the settings for as many ranks as torchrun has started; without failures.elastic only that of the config.

    >>> from unittest.mock import patch
    >>> from drumline.train.config.settings import FailureSettings
    >>> with patch.dict(os.environ, {"WORLD_SIZE": "3"}):
    ...     for_world(TrainSettings(failures=FailureSettings(elastic=True))).num_ranks
    3
    """
    size = int(os.environ["WORLD_SIZE"])
    if settings.failures.elastic:
        return planned_for(settings, size, quiet=os.environ.get("RANK", "0") != "0")
    if size != settings.num_ranks:
        raise UsageError(
            f"torchrun started {counted(size, 'rank')} for a config of {settings.num_ranks}",
            expected=f"{settings.num_ranks}, what the mesh multiplies to",
            fix=f"start torchrun with --nproc-per-node {settings.num_ranks}, change the mesh, or pass --elastic",
        )
    return settings


def with_device(settings: TrainSettings) -> TrainSettings:
    """Return the settings with the device that will be used: the accelerators, which ranks may share, else the CPU.

    More ranks than accelerators are warned of.

    >>> from drumline.train.config.settings import PipelineSettings
    >>> with_device(TrainSettings(pipeline=PipelineSettings(device="cpu"))).pipeline.device
    'cpu'
    """
    there = visible()
    asked = AskedDevice.read(settings.pipeline.device, there)
    num_processes = int(os.environ.get("LOCAL_WORLD_SIZE", processes_of(settings)))
    if wrong := refusal(asked, there, num_processes):
        raise wrong
    if not is_started() and (text := too_many_text(num_processes, there, asked)):
        logging.getLogger("drumline").warning("%s", text)
    name = settings.pipeline.device or kind_for(num_processes, there)
    return replace(settings, pipeline=replace(settings.pipeline, device=name))


def processes_of(settings: TrainSettings) -> int:
    """Return in how many processes ranks run.

    >>> processes_of(TrainSettings())
    2
    """
    return 1 if settings.pipeline.transport == "in-process" else settings.num_ranks


def threads_of(settings: TrainSettings) -> int:
    """Return how many threads each rank computes with: cores / local ranks unless set."""
    if settings.run.threads is not None:
        return settings.run.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // settings.num_ranks)
