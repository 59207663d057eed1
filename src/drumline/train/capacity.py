"""Whether ranks can hold a model: what a dry run forecasts, against the memory that there is."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from drumline.core.errors import UsageError, counted
from drumline.core.units import size_text
from drumline.train.config.settings import TrainSettings
from drumline.train.dry.dry_run import dry_run, states
from drumline.train.tune.build_tuned import build_tuned

_LARGEST = 2**31  # bytes of parameters up to which a forecast may build the model beside other processes
_CGROUP = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def host_bytes() -> int:
    """Return the memory of this host, or of this container where that is less.

    >>> host_bytes() > 2**20
    True
    """
    num_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for limit in _CGROUP:
        with suppress(OSError, ValueError):
            num_bytes = min(num_bytes, int(limit.read_text()))
    return num_bytes


def device_bytes(device: torch.device) -> int:
    """Return the memory of one device."""
    return host_bytes() if device.type == "cpu" else int(torch.accelerator.get_memory_info(device)[1])


def check_room(settings: TrainSettings) -> None:
    """Raise if the ranks of a run cannot hold it, by forecast.

    Ranks on a host share its memory, and those on one device share that. Of a model that is too large to be run here,
    only parameters, gradients and optimizer state are counted.
    """
    device = torch.device(settings.pipeline.device or "cpu")
    ranks = sorted(_rank_bytes(settings) * settings.mesh.num_lines, reverse=True)
    local = min(int(os.environ.get("LOCAL_WORLD_SIZE", len(ranks))), len(ranks))
    devices = torch.accelerator.device_count() if device.type != "cpu" and device.index is None else 1
    together = max(1, -(-local // devices))
    needed, there = sum(ranks[:together]), device_bytes(device)
    if needed > there:
        raise UsageError(
            f"{counted(settings.num_ranks, 'rank')} cannot hold the model: {counted(together, 'rank')} of them need"
            f" {size_text(round(needed))} together",
            expected=f"at most {size_text(there)}, the memory of {device.type}",
            fix="recompute activations (--recompute full), use smaller microbatches, or raise failures.min_ranks",
        )


def _rank_bytes(settings: TrainSettings) -> list[float]:
    """Return what each rank of one pipeline needs."""
    if settings.model.kind in ("gpt", "hf"):
        model = build_tuned(settings, device="meta").model
        if sum(param.nbytes for param in model.parameters()) > _LARGEST:
            kept_states = states(settings, model)
            total = sum(2 * param.nbytes + kept_states(name, param) for name, param in model.named_parameters())
            return [total / settings.mesh.pipeline / settings.mesh.tensor] * settings.mesh.pipeline
    return [rank.total for rank in dry_run(settings).forecast.ranks]
