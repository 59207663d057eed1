"""Find the device to calibrate, and how many of its kind there are."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from drumline.core.errors import UsageError
from drumline.plan.calibrated.calibration import Calibration
from drumline.profile.calibrate.calibrate import SECONDS, calibrate


def calibrated(
    name: str | None = None,
    *,
    seconds: float = SECONDS,
    dtypes: Sequence[str] | None = None,
    num_devices: int | None = None,
    num_threads: int | None = None,
    say: Callable[[str], None] = lambda text: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure a device by its name; without one, this machine's accelerator or its CPU.

    >>> calibrated("warp")
    Traceback (most recent call last):
    drumline.core.errors.UsageError: there is no device 'warp'; expected cpu, or an accelerator of this machine
    """
    device = _device(name)
    there = 1 if device.type == "cpu" else torch.accelerator.device_count()
    if device.type != "cpu" and num_devices is not None and num_devices > there:
        raise UsageError(f"--devices is {num_devices}", expected=f"at most {there}, as this machine has")
    before = torch.get_num_threads()
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    try:
        return calibrate(device, seconds=seconds, dtypes=dtypes, num_devices=num_devices or there, say=say, clock=clock)
    finally:
        torch.set_num_threads(before)


def _device(name: str | None) -> torch.device:
    present = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name is None:
        return torch.device("cpu") if present is None else torch.device(present.type, 0)
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", present.type if present else "cpu"):
        raise UsageError(f"there is no device {name[:40]!r}", expected="cpu, or an accelerator of this machine")
    return device if device.type == "cpu" else torch.device(device.type, device.index or 0)
