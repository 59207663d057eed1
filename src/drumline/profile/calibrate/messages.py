"""Collectives and messages between the devices of this host, each of which gets a process."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from drumline.plan.calibrated.calibration import MeasuredSize
from drumline.profile.calibrate.watches import Timed, summed_up

SIZES = (2**14, 2**18, 2**22, 2**26)  # bytes that a device gives


def messages(kind: str, num_devices: int, seconds: float) -> list[MeasuredSize]:
    """Return the times of collectives, and of a message there and back, by bytes."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            processes.spawn(_rank, (kind, num_devices, folder, seconds), nprocs=num_devices)  # type: ignore[no-untyped-call, attr-defined]
        except Exception as error:  # what a rank raised, of a kind of its own
            raise RuntimeError(str(error).strip().splitlines()[-1]) from error
        rows = json.loads(Path(folder, "times.json").read_text(encoding="utf-8"))
    return [MeasuredSize(**row) for row in rows]


def _rank(rank: int, kind: str, num_devices: int, folder: str, seconds: float) -> None:
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    if kind != "cpu":
        torch.accelerator.set_device_index(rank)
    backend = dist.get_default_backend_for_device(device)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=num_devices)
    try:
        entries = [
            MeasuredSize(name, size, *_timed(call, device, seconds))
            for size in SIZES
            for name, call in _calls(size, rank, num_devices, device).items()
        ]
        if rank == 0:
            text = json.dumps([asdict(entry) for entry in entries])
            Path(folder, "times.json").write_text(text, encoding="utf-8")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _calls(size: int, rank: int, num_devices: int, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return the calls that all ranks make together."""
    count = size // 4 // num_devices * num_devices
    sent, share = torch.zeros(count, device=device), torch.zeros(count // num_devices, device=device)
    received = torch.empty_like(sent)
    gather: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name since torch 2.13
    calls: dict[str, Callable[[], Any]] = {
        "all-reduce": lambda: dist.all_reduce(sent),
        "all-gather": lambda: gather(received, share),
        "message": lambda: _there_and_back(sent, received, rank),
    }
    if device.type != "cpu":
        calls["reduce-scatter"] = lambda: dist.reduce_scatter_tensor(share, sent)
        calls["all-to-all"] = lambda: dist.all_to_all_single(received, sent)
    return calls


def _there_and_back(sent: torch.Tensor, received: torch.Tensor, rank: int) -> None:
    """Send from rank 0 to 1, and back; others wait for nothing."""
    if rank == 0:
        dist.send(sent, 1)
        dist.recv(received, 1)
    elif rank == 1:
        dist.recv(received, 0)
        dist.send(sent, 0)


def _timed(call: Callable[[], Any], device: torch.device, seconds: float) -> Timed:
    """Return the time of a call until it has ended on the device; every rank makes as many."""
    dist.barrier()
    taken = []
    for number in range(max(5, min(int(seconds * 100), 20)) + 1):
        begun = time.perf_counter()
        call()
        if device.type != "cpu":
            torch.accelerator.synchronize(device)
        if number:
            taken.append(time.perf_counter() - begun)
    return summed_up(taken)
