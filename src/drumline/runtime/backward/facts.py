"""What is known of CUDA and of no other accelerator. It chooses between ways that are both right, anywhere."""

from __future__ import annotations

import torch


def knows_autocast(kind: str) -> bool:
    """Whether we know how autocast treats layer norms on a type of device.

    >>> knows_autocast("cpu"), knows_autocast("xpu")
    (True, False)
    """
    return kind in ("cpu", "cuda")


def widens_norms(device: torch.device) -> bool:
    """Whether autocast is on and computes layer norms in float32 on a device.

    >>> widens_norms(torch.device("cpu"))
    False
    """
    return device.type == "cuda" and torch.is_autocast_enabled("cuda")


def needs_triton(device: torch.device) -> bool:
    """Whether inductor writes its code for a device in Triton.

    >>> needs_triton(torch.device("cpu"))
    False
    """
    return device.type == "cuda"
