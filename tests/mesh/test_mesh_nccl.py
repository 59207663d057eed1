"""Meshes over NCCL: four ranks that share one GPU, each of which NCCL takes for a host of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import drumline as dl
from mesh import small
from mesh.cells import What
from mesh.plain import STEPS, chain, furthest, loss_fn, trained, words
from nccl_ranks import NEEDS_NCCL, told_by_ranks

pytestmark = [pytest.mark.torch, *NEEDS_NCCL, pytest.mark.features("mesh")]

MESHES: list[dict[str, Any]] = [
    {"mesh": {"pp": 2, "dp": 2}, "schedule": "1f1b"},
    {"mesh": {"pp": 2, "dp": 2}, "schedule": "zb-v", "zero": 1},
    {"mesh": {"pp": 2, "dp": 2}, "schedule": "zb-v", "zero": 3},
    {"mesh": {"dp": 4}, "schedule": "1f1b", "zero": 3},
]


# Axes that divide a decoder of attention, experts and feed-forward layers.
DIVIDED: list[dict[str, Any]] = [
    {"mesh": {"pp": 2, "tp": 2}, "schedule": "zb-v", "tensor_parallel": small.PLAN},
    {"mesh": {"pp": 2, "tp": 2}, "tensor_parallel": small.PLAN, "sequence_parallel": True},
    {"mesh": {"pp": 2, "cp": 2}, "schedule": "interleaved-zb"},
    {"mesh": {"pp": 2, "ep": 2}, "schedule": "1f1b"},
    {"mesh": {"pp": 2, "ep": 2}, "schedule": "dualpipe-v"},
]


def train_all() -> None:
    """Train on every mesh on this rank, and compare with one process."""
    device = torch.device("cuda", 0)
    torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl", device_id=device)
    train_chain(device)
    for options in DIVIDED:
        train_decoder(device, options)
    dist.destroy_process_group()


def train_decoder(device: torch.device, options: dict[str, Any]) -> None:
    """Train the decoder on a mesh, and compare losses and parameters with one process."""
    mesh = options["mesh"]
    wanted = small.alone(What(), mesh.get("ep", 1), steps=STEPS)
    example = small.example(mesh).to(device)
    given: dict[str, Any] = {
        "loss_fn": small.loss_fn,
        "num_microbatches": small.MICROBATCHES,
        "balance": "even",
        "timeout": 60.0,
    }
    with dl.Pipeline(small.decoder().to(device), example=example, **given, **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        number, lines = pipe.axes.rows
        for step in range(STEPS):
            x, y, _ = zip(*small.batch("rows", step, lines)[number], strict=True)
            loss = pipe.step(torch.cat(x).to(device), target=torch.cat(y).to(device)).loss
            assert loss is not None
            assert loss.item() == pytest.approx(wanted["losses"][step], rel=1e-5), (options, step)
            optimizer.step()
            optimizer.zero_grad()
        for name, entry in pipe.state_dict().items():
            torch.testing.assert_close(entry.cpu(), wanted["state"][name], rtol=1e-4, atol=1e-5)
    print(f"rank {dist.get_rank()}: {options} is the same", flush=True)


def train_chain(device: torch.device) -> None:
    """Train a chain of blocks on every mesh that leaves layers whole, and compare with one process."""
    plain = trained(chain())
    for options in MESHES:
        seen = []
        with dl.Pipeline(chain().to(device), loss_fn=loss_fn, num_microbatches=4, timeout=60.0, **options) as pipe:
            optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
            for step in range(STEPS):
                number, count = pipe.axes.rows
                x, y = (word.chunk(count)[number].to(device) for word in words(step))
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


def test_meshes_over_nccl_train_as_one_process() -> None:
    told = told_by_ranks(__file__, 4, timeout=300)
    assert [name.count("is the same") for name in told] == [len(MESHES) + len(DIVIDED)] * 4


if __name__ == "__main__":
    train_all()
