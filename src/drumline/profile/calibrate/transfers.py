"""Copies between host and device, inside the device, and the allocator's own time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from drumline.plan.calibrated.calibration import MeasuredSize
from drumline.profile.calibrate.watches import HostWatch, TimeWatch

SIZES = (2**12, 2**16, 2**20, 2**24, 2**28)  # bytes


def copies(device: torch.device, watch: TimeWatch, seconds: float) -> Iterator[MeasuredSize]:
    """Measure copies, pinned and not, and allocations.

    >>> entries = list(copies(torch.device("cpu"), HostWatch(), 0.001))
    >>> sorted({entry.kind for entry in entries})
    ['allocation', 'inside']
    """
    sizes = SIZES if device.type != "cpu" else SIZES[:-1]
    for size in sizes:
        here = torch.empty(size, dtype=torch.uint8, device=device)
        there = torch.empty_like(here)
        yield MeasuredSize("inside", size, *watch.timed(partial(_copy, there, here), seconds))
        if device.type != "cpu":
            for pinned in (False, True):
                host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
                ending = "-pinned" if pinned else ""
                yield MeasuredSize(f"to-device{ending}", size, *watch.timed(partial(_copy, here, host), seconds))
                yield MeasuredSize(f"to-host{ending}", size, *watch.timed(partial(_copy, host, here), seconds))
        del here, there
        taken = HostWatch().timed(partial(torch.empty, size, dtype=torch.uint8, device=device), seconds)
        yield MeasuredSize("allocation", size, *taken)


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)
