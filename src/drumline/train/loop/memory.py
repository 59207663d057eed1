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
    """Counts from where it is made; on a host, what the process had before is left out.

    >>> peak = PeakMemory(torch.device("cpu"))
    >>> peak.num_bytes >= 0
    True
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if self._on_device:
            torch.cuda.reset_peak_memory_stats(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")  # the peak is counted anew from here
        self._before = _resident("VmRSS")

    @property
    def _on_device(self) -> bool:
        return self._device.type == "cuda"

    @property
    def num_bytes(self) -> int:
        """The most bytes so far."""
        if self._on_device:
            return int(torch.cuda.max_memory_allocated(self._device))
        return max(0, _resident("VmHWM") - self._before)


def _resident(key: str) -> int:
    """Return a number of bytes that the kernel knows of this process."""
    with suppress(OSError):
        found = re.search(rf"^{key}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
        if found is not None:
            return int(found[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
