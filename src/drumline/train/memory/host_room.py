"""Whether this machine has room for what a dry run measures: it refuses beforehand instead of running out of memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

from drumline.core.errors import UsageError
from drumline.core.units import size_text

_MEMORY = Path("/proc/meminfo")
_TIMES = 2  # what is kept, and what the fullest block needs while it runs
_CGROUP = Path("/sys/fs/cgroup")


def free_bytes(device: torch.device) -> int | None:
    """Return the memory that a process may still take on a device; None where the system does not say.

    >>> free_bytes(torch.device("meta")) is None
    True
    """
    if device.type == "cpu":
        return min(filter(None, (_of_system(), _of_container())), default=None)
    if device.type == "meta":
        return None
    return int(torch.accelerator.get_memory_info(device)[0])


def check_room(held_bytes: int, device: torch.device) -> None:
    """Refuse to measure blocks that keep so many bytes of a microbatch, if they and their gradients need more."""
    needed_bytes, free = _TIMES * held_bytes, free_bytes(device)
    if free is not None and needed_bytes > free:
        raise UsageError(
            f"measuring the model's blocks takes some {size_text(needed_bytes)} of this machine's memory",
            expected=f"at most {size_text(free)}, which are free",
            fix=rooms_fix(device),
        )


def rooms_fix(device: torch.device) -> str:
    """Return what to do where blocks cannot be measured."""
    other = "" if device.type == "cpu" else "pass --device cpu, "
    return f"{other}use smaller microbatches (-m) or shorter rows (--sequence), or let `drumline plan` estimate it"


def _of_system() -> int | None:
    with suppress(OSError, ValueError):
        for line in _MEMORY.read_text().splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    return None


def _of_container() -> int | None:
    with suppress(OSError, ValueError, KeyError):
        now = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        taken = int((_CGROUP / "memory.current").read_text()) - int(now["inactive_file"])
        return int((_CGROUP / "memory.max").read_text()) - taken
    return None
