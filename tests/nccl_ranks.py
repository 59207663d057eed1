"""Ranks over NCCL that share one GPU: NCCL takes each for a host of its own, by its NCCL_HOSTID."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

# The marks of tests that need NCCL.
NEEDS_NCCL = (
    pytest.mark.accelerator,
    pytest.mark.skipif(
        not (torch.cuda.is_available() and dist.is_nccl_available()), reason="there is no CUDA device with NCCL here"
    ),
)


def told_by_ranks(script: str, num_ranks: int, *, timeout: float) -> list[str]:
    """Run `script` on every rank until all ended well; returns what each printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    tests = Path(__file__).parent
    common = {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src"), os.environ.get("PYTHONPATH", "")]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, script],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": "0", "NCCL_HOSTID": f"host{rank}"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    try:
        told = [rank.communicate(timeout=timeout)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * num_ranks, "\n".join(name[-4000:] for name in told)
    return told
