"""The most memory that the ranks of this process have held at once.

On an accelerator it is what PyTorch allocated. On a host, or if PyTorch does not count, it is the memory of the tensors
of the first update, and of later updates with a larger step. A dry run forecasts the same. The process, its libraries
and the allocator's reserve come on top: `resident_bytes` counts them.
"""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch.optim import Optimizer

from drumline.core.measured.measured import Measured
from drumline.pipeline.pipeline import Pipeline
from drumline.train.data.items.batch import Batch
from drumline.train.memory.measured_peak import peak_memory

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Counts from its creation; on a host without the `before` bytes that were resident earlier.

    >>> peak = PeakMemory(torch.device("cpu"), before=resident())
    >>> peak.num_bytes >= 0
    True
    """

    def __init__(self, device: torch.device, *, before: int) -> None:
        self._device, self._before = device, before
        self._tensors: dict[int, int] = {}  # by rank
        self._largest: tuple[float, float] = (-1, -1)  # places of a weighed step, and of a microbatch on average
        self._on_device = _counts(device)
        if self._on_device:
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted again from here

    def wants(self, pipe: Pipeline, batch: Batch) -> bool:
        """Whether the next step will be weighed: if it, or its microbatches, are the largest so far."""
        sizes = batch.num_padded, batch.num_padded / max(batch.num_microbatches, 1)
        if self._on_device or all(size <= most for size, most in zip(sizes, self._largest, strict=True)):
            return False
        self._largest = max(sizes[0], self._largest[0]), max(sizes[1], self._largest[1])
        pipe._engine.weigh_next()
        return True

    def weigh(self, pipe: Pipeline, optimizers: Sequence[Optimizer], step: Measured, *, accumulates: bool) -> None:
        """Weigh what an update took of which a step was weighed. Call it before gradients are forgotten."""
        if step.stash is not None and not self._on_device:
            ranks = [executor.rank for executor in pipe._engine.executors]
            memories = peak_memory(pipe, optimizers, step, accumulates=accumulates)
            for rank, memory in zip(ranks, memories, strict=True):
                self._tensors[rank] = max(self._tensors.get(rank, 0), round(memory.total))

    def by_rank(self, rank: int) -> dict[int, int]:
        """Return the most bytes of every rank of this process, whose first is `rank`."""
        return self._tensors or {rank: self.num_bytes}

    @property
    def num_bytes(self) -> int:
        """The most bytes so far, of all ranks of this process."""
        if self._on_device:
            return int(torch.accelerator.max_memory_allocated(self._device))
        return sum(self._tensors.values()) or self.resident_bytes

    @property
    def resident_bytes(self) -> int:
        """The most bytes of the whole process that were resident at once, beyond those of before."""
        return max(0, resident("VmHWM") - self._before)


def _counts(device: torch.device) -> bool:
    """Count a device's memory again from here; whether it is counted at all."""
    if device.type == "cpu":
        return False
    try:
        torch.accelerator.reset_peak_memory_stats(device)
    except RuntimeError:  # its allocator keeps no counts
        return False
    return True


def resident(key: str = "VmRSS") -> int:
    """Return how many bytes of this process are in memory now, or with VmHWM were at most.

    >>> 0 < resident() <= resident("VmHWM")
    True
    """
    with suppress(OSError):
        match = re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if match is not None:
            return int(match[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
