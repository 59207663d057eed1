"""NCCL between two ranks that share one GPU: it takes them for two hosts, each by its NCCL_HOSTID."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from drumline.pipeline.pipeline import Pipeline
from nccl_ranks import NEEDS_NCCL, told_by_ranks
from some import some
from torch_models import SYNCHRONOUS, TWO_WAYS, Reference, data, mlp, programs

pytestmark = [pytest.mark.torch, *NEEDS_NCCL]


def train_all() -> None:
    """Train by every schedule on this rank, and hold it against one process."""
    device = torch.device("cuda", 0)
    dist.init_process_group("nccl", device_id=device)
    for name in SYNCHRONOUS:
        for program in programs(name, 2, (4,)):
            model = mlp(dropout=0.2).to(device)
            reference = Reference(model, program, functional.mse_loss, device=device)
            settings: dict[str, Any] = {
                "loss_fn": functional.mse_loss,
                "schedule": program,
                "transport": "nccl",
                "timeout": 60.0,
            }
            with Pipeline(model, **settings) as pipe:
                assert pipe.transport == "nccl"
                for step, rows in enumerate((8, 6)):  # shapes may change from step to step
                    batch, target = (tensor.to(device) for tensor in data(rows, seed=step))
                    result = pipe.step(batch, target=target)
                    expected = reference.step(batch, target)
                    assert result.loss is not None
                    torch.testing.assert_close(result.loss.to(device), expected, rtol=1e-6, atol=1e-7)
                    reference.compare(pipe, exact=name not in TWO_WAYS, tolerance=1e-5)
                    pipe.clip_grad_norm_(0.5)
                    pipe.zero_grad()
                    reference.model.zero_grad()
            print(f"rank {dist.get_rank()}: {name} is the same", flush=True)
    dist.destroy_process_group()


def test_gradients_over_nccl_are_those_of_one_process() -> None:
    for told in some(told_by_ranks(__file__, 2, timeout=400)):
        assert told.count("is the same") >= len(SYNCHRONOUS), told[-2000:]


if __name__ == "__main__":
    train_all()
