"""Layers move in every line of a mesh: there and back is as never having moved."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import UsageError
from matrices import long
from mesh.plain import WIDTH, WORDS, loss_fn, words
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix]

DP = {"pp": 2, "dp": 2}
STEPS = 4
CASES: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "float32 copies": {"schedule": "zb-h1", "dtype": torch.bfloat16, "master_weights": True},
}


def model() -> nn.Sequential:
    """Return a chain of six blocks with dropout, whose head is its embedding."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(4)]
    head = nn.Linear(WIDTH, WORDS, bias=False)
    made = nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, head)
    head.weight = made.get_parameter("0.weight")
    return made


def loss(output: Tensor, target: Tensor) -> Tensor:
    return loss_fn(output.float(), target)


def trained(moves: dict[int, list[int]], dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Any]:
    seen, moved = [], 0
    options = {"loss_fn": loss, "num_microbatches": 4, "timeout": 120.0, "balance": [3, 3], "mesh": DP, **options}
    with dl.Pipeline(model().to(dtype), **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        for step in range(STEPS):
            if step in moves:
                moved += pipe.repartition(balance=moves[step]).bytes_moved
            number, count = pipe.axes.rows
            x, y = (word.chunk(count)[number] for word in words(step))
            found = pipe.step(x, target=y).loss
            assert found is not None
            seen += [found.item(), pipe.clip_grad_norm_(0.5).item()]
            optimizer.step()
            optimizer.zero_grad()
        tensors = dict(pipe.named_master_weights())
        tensors |= {
            f"{name}/{key}": item
            for name, each in optimizer.state_dict()["state"].items()
            for key, item in each.items()
        }
        return {"seen": seen, "moved": moved, "tensors": {name: t.detach().clone() for name, t in tensors.items()}}


def compared() -> dict[str, tuple[int, int]]:
    """Train with and without moves; return how much has moved, and how many tensors are equal."""
    found = {}
    for name, options in CASES.items():
        still, moved = (trained(moves, **options) for moves in ({}, {1: [2, 4], 2: [4, 2], 3: [3, 3]}))
        assert moved["seen"] == still["seen"], name
        assert moved["tensors"].keys() == still["tensors"].keys(), name
        assert all(torch.equal(tensor, moved["tensors"][key]) for key, tensor in still["tensors"].items()), name
        found[name] = (moved["moved"], len(still["tensors"]))
    with dl.Pipeline(model(), loss_fn=loss, num_microbatches=4, timeout=120.0, balance=[3, 3], mesh=DP, zero=1) as pipe:
        pipe.optimizer(torch.optim.AdamW)
        with refused(UsageError, "repartition was called, and zero is"):
            pipe.repartition(balance=[2, 4])
    return found


@long
def test_lines_move_their_copies() -> None:
    each = dl.launch(compared, num_ranks=4)
    for found in some(each):
        assert found == {name: (found[name][0], found[name][1]) for name in CASES}
        assert all(moved > 1000 and count >= 20 for moved, count in some(found.values()))
