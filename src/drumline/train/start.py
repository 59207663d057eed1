"""Starting a run: local ranks from one command, or in place where torchrun has started them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from drumline.core.errors import UsageError, counted
from drumline.core.measured.run import CONFIG
from drumline.pipeline.launch.launch import launch
from drumline.pipeline.options import device_named
from drumline.train.config.settings import TrainSettings
from drumline.train.loop.checkpoints import found_in

Train = Callable[[TrainSettings], Any]


def start(settings: TrainSettings, *, train: Train | None = None) -> Any:
    """Run `train(settings)` on every rank and return what rank 0 returned; `train` is `run_training` unless given.

    Under torchrun this process is one rank, and gets its own result. Otherwise local ranks are started, or none where
    one process is enough. A folder that holds a run, a device that is not there and a wrong number of processes are
    refused before any rank starts.
    """
    settings = with_device(settings)
    if settings.checkpoint.resume:
        found_in(settings.checkpoint.resume)
    train = train or _run_training
    if is_started():
        check_world(settings)
        _use_device(settings)
        _check_folder(settings)
        return train(settings)
    _check_folder(settings)
    if settings.num_ranks == 1 or settings.pipeline.transport == "in-process":
        torch.set_num_threads(threads_of(settings))
        return train(settings)
    return launch(
        train,
        settings,
        num_ranks=settings.num_ranks,
        threads=threads_of(settings),
        backend="gloo" if settings.pipeline.device.startswith("cpu") else _backend(settings.num_ranks),
        prefix=False,
        stoppable=True,
    )[0]


def _run_training(settings: TrainSettings) -> Any:
    from drumline.train.loop.run import run_training

    return run_training(settings)


def is_started() -> bool:
    """Whether torchrun, or something like it, has started this process as one of several ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def check_world(settings: TrainSettings) -> None:
    """Refuse another number of processes than the settings have ranks."""
    size = int(os.environ["WORLD_SIZE"])
    if size != settings.num_ranks:
        raise UsageError(
            f"torchrun started {counted(size, 'rank')} for a config of {settings.num_ranks}",
            expected=f"{settings.num_ranks}, as mesh.pipeline says",
            fix=f"start torchrun with --nproc-per-node {settings.num_ranks}, or set mesh.pipeline = {size}",
        )


def with_device(settings: TrainSettings) -> TrainSettings:
    """Return the settings with the device that will be used: an accelerator for each rank, else the host.

    >>> from drumline.train.config.settings import PipelineSettings
    >>> with_device(TrainSettings(pipeline=PipelineSettings(device="cpu"))).pipeline.device
    'cpu'
    """
    name = settings.pipeline.device
    if name:
        device_named(name)
        return settings
    found = torch.accelerator.current_accelerator(check_available=True)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", settings.num_ranks))
    name = "cpu" if found is None or torch.accelerator.device_count() < local else found.type
    return replace(settings, pipeline=replace(settings.pipeline, device=name))


def _use_device(settings: TrainSettings) -> None:
    """Let this rank compute on the accelerator of its own number on this host."""
    device = torch.device(settings.pipeline.device)
    if device.type != "cpu" and device.index is None and "LOCAL_RANK" in os.environ:
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]) % torch.accelerator.device_count())


def _backend(num_ranks: int) -> str:
    """Return what ranks with accelerators talk by: where several share one, the host."""
    found = torch.accelerator.current_accelerator(check_available=True)
    enough = found is not None and found.type == "cuda" and torch.accelerator.device_count() >= num_ranks
    return "nccl" if enough else "gloo"


def threads_of(settings: TrainSettings) -> int:
    """Return how many threads each rank computes with: cores / local ranks unless set."""
    if settings.run.threads is not None:
        return settings.run.threads
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // settings.num_ranks)


def _check_folder(settings: TrainSettings) -> None:
    folder = settings.folder
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise UsageError(f"run.out: {folder} is a file", expected="a folder without a run, or none yet")
    if os.path.exists(os.path.join(folder, CONFIG)):
        raise UsageError(
            f"run.out: {folder} holds a run already",
            expected="a folder without a run, or none yet",
            fix="name another folder: --out FOLDER",
        )
