"""Capture calls, so that the device repeats their works without the host."""

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
