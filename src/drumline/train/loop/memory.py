"""The most memory that this process has held at once: the accelerator's, or on a host its resident set."""

from __future__ import annotations

import re
import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")


class PeakMemory:
    """Counts from where it is made; on a host without the `before` bytes that were resident at some time earlier.

    >>> peak = PeakMemory(torch.device("cpu"), before=resident())
    >>> peak.num_bytes >= 0
    True
    """

    def __init__(self, device: torch.device, *, before: int) -> None:
        self._device, self._before = device, before
        if self._on_device:
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew from here

    @property
    def _on_device(self) -> bool:
        return self._device.type == "cuda"

    @property
    def num_bytes(self) -> int:
        """The most bytes so far."""
        if self._on_device:
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, resident("VmHWM") - self._before)


def resident(key: str = "VmRSS") -> int:
    """Return how many bytes of this process are in memory now, or with VmHWM were at most.

    >>> 0 < resident() <= resident("VmHWM")
    True
    """
    with suppress(OSError):
        found = re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
