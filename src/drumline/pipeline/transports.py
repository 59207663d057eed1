"""Which channel the ranks of a pipeline use, and how it is made."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from drumline.core.errors import UsageError, nearest
from drumline.runtime.channel import Channel

TRANSPORTS = ("auto", "in-process", "shared-memory", "gloo", "nccl")


def started_by_launcher() -> bool:
    """Whether this process is one of several ranks, by torchrun's variables or an existing process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


def check(transport: str) -> None:
    """Refuse a transport that does not exist."""
    if transport not in TRANSPORTS:
        raise UsageError(f"transport is {transport!r}", fix=nearest(transport, TRANSPORTS))


def open_channel(transport: str, device: torch.device, *, timeout: float, num_slots: int, scope: str) -> Channel:
    """Return this rank's end of a new channel between all ranks of the process group."""
    from drumline.runtime.rendezvous import one_host
    from drumline.runtime.shared_memory import SharedMemoryChannel

    if not dist.is_initialized():
        dist.init_process_group("gloo" if device.type == "cpu" else None)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store = PrefixStore(scope, dist.distributed_c10d._get_default_store())
    if transport == "auto":
        together = one_host(store, rank, num_ranks)
        staged = device.type == "cpu" or torch.accelerator.device_count() < num_ranks
        transport = "shared-memory" if together and staged else "gloo" if device.type == "cpu" else "nccl"
    if transport == "shared-memory":
        return SharedMemoryChannel(rank, num_ranks, store=store, device=device, timeout=timeout, num_slots=num_slots)
    from drumline.runtime.distributed import DistributedChannel

    return DistributedChannel(rank, num_ranks, store=store, backend=transport, device=device, timeout=timeout)
