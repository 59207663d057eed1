"""How many ranks a run has if neither its config nor a flag says: one for each accelerator, or as torchrun started."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

from drumline.channel.devices.choice import AskedDevice, VisibleDevices, default_num_ranks, kind_for
from drumline.channel.devices.visible import visible
from drumline.core.errors import counted
from drumline.train.config.relations import PlacedSettings, related
from drumline.train.config.together import clashing

_KEY = "mesh.pipeline"


def with_default_ranks(judged: PlacedSettings) -> PlacedSettings:
    """Return the settings with the number of ranks for this machine; those that name one, as they are."""
    if judged.source.has(_KEY) or judged.plan is not None:
        return judged
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return for_processes(judged, int(os.environ["WORLD_SIZE"]))
    chosen, text = for_devices(judged, visible())
    if text:
        logging.getLogger("drumline").warning("%s", text)
    return chosen


def for_processes(judged: PlacedSettings, num_processes: int) -> PlacedSettings:
    """Return the settings with a rank for each process that a launcher has started, if they admit that."""
    num_ranks, rest = divmod(num_processes, judged.settings.mesh.num_lines)
    wanted = _with(judged, num_ranks)
    return judged if rest or not num_ranks or not _admits(wanted) else wanted


def for_devices(judged: PlacedSettings, there: VisibleDevices) -> tuple[PlacedSettings, str]:
    """Return the settings with a rank for each accelerator, and what to say if they do not admit that many.

    If they admit fewer, some accelerators stay idle. If they need more than there are, ranks take turns in one process.
    """
    settings = judged.settings
    asked = AskedDevice.read(settings.pipeline.device, there)
    if asked.kind == "cpu" or not there.count:
        return judged, ""
    most = default_num_ranks(there, asked, settings.mesh.num_lines)
    for num_ranks in range(most, 0, -1):
        if _admits(chosen := _with(judged, num_ranks)):
            few = f"this process sees {there}, and the settings admit {counted(num_ranks, 'rank')} of {most}"
            return chosen, f"{few}: the other devices stay idle" if num_ranks < most else ""
    turns = replace(judged, settings=replace(settings, pipeline=replace(settings.pipeline, transport="in-process")))
    if settings.pipeline.transport != "auto" or not _admits(turns):
        return judged, ""
    where = asked if asked.kind else f"{kind_for(1, there)}:0"
    ranks = counted(settings.num_ranks, "rank")
    return turns, f"the settings need {ranks}, and this process sees {there}: they take turns on {where}"


def _with(judged: PlacedSettings, num_ranks: int) -> PlacedSettings:
    """Return the settings with another number of ranks."""
    settings = judged.settings
    return replace(judged, settings=replace(settings, mesh=replace(settings.mesh, pipeline=num_ranks)))


def _admits(judged: PlacedSettings) -> bool:
    """Whether nothing speaks against settings."""
    bad: set[str] = set()
    return not [*related(judged, bad), *clashing(judged, bad)]
