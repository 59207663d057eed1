"""What has no general form: graphs, by which the device repeats works without the host, and formats of numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def captured(call: Callable[[], Any], times: int, device: torch.device) -> Callable[[], None]:
    """Return what makes the device repeat a call's works `times` times; RuntimeError where that cannot be."""
    if device.type != "cuda":
        raise RuntimeError(f"{device.type} captures nothing")
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    return graph.replay


def dtypes_of(device: torch.device) -> list[str]:
    """Return the number formats to measure on a device.

    >>> dtypes_of(torch.device("cpu"))
    ['fp32', 'bf16']
    """
    if device.type != "cuda":
        return ["fp32", "bf16"]
    capability = torch.cuda.get_device_capability(device)
    known = ["bf16", "fp32"] + (["tf32"] if capability >= (8, 0) else [])
    return known + (["fp8"] if capability >= (8, 9) else [])
