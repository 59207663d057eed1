"""Where tests compute: on the CPU, unless they say that they are about an accelerator.

A test that says nothing gives the same bits on every machine: it finds no accelerator, whether this machine has one,
hides it or has none. A test marked `accelerator` finds what the machine has.

    collected ──► hide() ──► a test, hidden ──► a test marked `accelerator`: shown ──► a test, hidden ...

Processes that a test starts see no device by their environment. A process that runs tests has counted its devices
before the first one, so PyTorch's own answers are replaced. The process that collects and forks asks the driver's
library instead: CUDA cannot be used by a process that was forked from one that counted by itself.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import pytest

# What hides devices from processes to be started: empty lists of CUDA's and ROCm's devices.
_LISTS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
BY_LIBRARY = "PYTORCH_NVML_BASED_CUDA_CHECK"  # whether PyTorch asks the driver's library how many devices there are
_ANSWERS: dict[tuple[str, str], Any] = {
    ("accelerator", "current_accelerator"): None,
    ("accelerator", "is_available"): False,
    ("accelerator", "device_count"): 0,
    ("cuda", "is_available"): False,
    ("cuda", "device_count"): 0,
}


class Accelerators:
    """The accelerators of this machine, hidden or shown."""

    def __init__(self) -> None:
        self._listed: dict[str, str | None] = {}
        self._asked: dict[tuple[str, str], Any] = {}

    def hide(self) -> None:
        """Let PyTorch find no accelerator from now on, here and in processes that are started."""
        torch = sys.modules.get("torch")
        is_there = torch is not None and torch.accelerator.is_available()
        self._listed = {name: os.environ.get(name) for name in _LISTS}
        os.environ.update(dict.fromkeys(_LISTS, ""))
        if not is_there:
            return
        for (module, name), answer in _ANSWERS.items():
            place = getattr(torch, module)
            self._asked[module, name] = getattr(place, name)
            setattr(place, name, _always(answer))

    def count(self) -> None:
        """Let CUDA count its devices in this process while they are shown, since it never counts again."""
        if self._asked:
            with pytest.MonkeyPatch.context() as patch:
                self.show(patch)
                patch.setenv(BY_LIBRARY, "0")
                sys.modules["torch"].cuda.is_available()

    def show(self, patch: pytest.MonkeyPatch) -> None:
        """Let PyTorch find what there is for as long as the patch lasts."""
        for name, value in self._listed.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        for (module, name), asked in self._asked.items():
            patch.setattr(f"torch.{module}.{name}", asked)
        if self._asked:  # what may have been counted while they were hidden, by a caller with the function at hand
            patch.setattr("torch.cuda._cached_device_count", None, raising=False)


def _always(answer: Any) -> Any:
    return lambda *_, **__: answer
