"""Meshes over NCCL: four ranks that share one GPU, each of which NCCL takes for a host of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import drumline as dl
from mesh.plain import STEPS, chain, furthest, loss_fn, trained, words
from nccl_ranks import NEEDS_NCCL, told_by_ranks

pytestmark = [pytest.mark.torch, NEEDS_NCCL]

MESHES: list[dict[str, Any]] = [
    {"mesh": {"pp": 2, "dp": 2}, "schedule": "1f1b"},
    {"mesh": {"pp": 2, "dp": 2}, "schedule": "zb-v", "zero": 1},
    {"mesh": {"pp": 2, "dp": 2}, "schedule": "zb-v", "zero": 3},
    {"mesh": {"dp": 4}, "schedule": "1f1b", "zero": 3},
]


def train_all() -> None:
    """Train on every mesh on this rank, and compare with one process."""
    device = torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", device_id=device)
    plain = trained(chain())
    for options in MESHES:
        seen = []
        with dl.Pipeline(chain().to(device), loss_fn=loss_fn, num_microbatches=4, timeout=60.0, **options) as pipe:
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
            for step in range(STEPS):
                number, count = pipe.axes.rows
                x, y = (one.chunk(count)[number].to(device) for one in words(step))
                loss = pipe.step(x, target=y).loss
                norm = pipe.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                assert loss is not None
                seen.append((loss.item(), norm.item()))
        losses, norms = furthest(seen, plain)
        assert losses < 1e-5, (options, losses)
        assert norms < 1e-3, (options, norms)
        print(f"rank {dist.get_rank()}: {options} is the same", flush=True)
    dist.destroy_process_group()


def test_meshes_over_nccl_train_as_one_process() -> None:
    told = told_by_ranks(__file__, 4, timeout=300)
    assert [one.count("is the same") for one in told] == [len(MESHES)] * 4


if __name__ == "__main__":
    train_all()
