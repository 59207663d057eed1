"""Tied weights, and microbatches without labels, on two to four processes: against a loop of plain torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from matrices import mainly
from some import some

# PyTorch says so once on processors without bfloat16.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
    pytest.mark.features("mesh"),
]
WORDS, WIDTH, LENGTH, MICROBATCHES, STEPS = 8, 8, 4, 2, 2
# By their number of processes: the mesh, and which microbatches of all lines count no label in each step.
RUNS: dict[int, tuple[dict[str, int], tuple[tuple[int, ...], ...]]] = {
    2: ({"dp": 2}, ((0,), (2, 3))),
    3: ({"dp": 3}, ((0, 1), (5,))),
    4: ({"pp": 2, "dp": 2}, ((0, 1), (3,))),
}


def model(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS, bias=False))
    made[2].weight = made[0].weight
    return made.to(dtype)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def batch(step: int, lines: int, empty: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    """Return the microbatches of all lines."""
    torch.manual_seed(step)
    found = [
        (torch.randint(WORDS, (2, LENGTH)), torch.randint(WORDS, (2, LENGTH))) for _ in range(lines * MICROBATCHES)
    ]
    for at in empty:
        found[at][1].fill_(-100)
    return found


def trained(dtype: torch.dtype, num_ranks: int) -> dict[str, Any]:
    mesh, empty = RUNS[num_ranks]
    losses = []
    with dl.Pipeline(
        model(dtype), loss_fn=loss_fn, mesh=mesh, num_microbatches=MICROBATCHES, device="cpu", balance="even"
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        line, lines = pipe.axes.rows
        for step in range(STEPS):
            own = batch(step, lines, empty[step])[line * MICROBATCHES : (line + 1) * MICROBATCHES]
            x, y = (torch.cat(each) for each in zip(*own, strict=True))
            optimizer.zero_grad()
            made = pipe.step(x, target=y).loss
            assert made is not None
            losses.append((made.dtype, float(made)))
            optimizer.step()
        return {"losses": losses, "state": {name: entry.clone() for name, entry in pipe.state_dict().items()}}


def plain(num_ranks: int, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process, from the same values: microbatch by microbatch, each with its share of the labels."""
    mesh, empty = RUNS[num_ranks]
    made = model(torch.bfloat16).to(dtype)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        every = [pair for pair in batch(step, mesh["dp"], empty[step]) if (pair[1] != -100).any()]
        each = [loss_fn(made(x), y) / len(every) for x, y in every]  # all count as many labels
        torch.autograd.backward(torch.stack(each).sum())
        losses.append(float(torch.stack(each).sum().detach()))
        optimizer.step()
    return losses, made.state_dict()


@mainly("num_ranks", 3, 2, 4)
def test_tied_weights_have_both_names_and_the_values_of_one_process(num_ranks: int) -> None:
    ranks = dl.launch(trained, torch.bfloat16, num_ranks, num_ranks=num_ranks)
    (losses, state), (low, low_state) = (plain(num_ranks, dtype) for dtype in (torch.float64, torch.bfloat16))
    merged = {name: entry for rank in ranks for name, entry in rank["state"].items()}
    assert merged.keys() == state.keys() == model(torch.bfloat16).state_dict().keys()
    assert torch.equal(merged["0.weight"], merged["2.weight"])
    digit = torch.finfo(torch.bfloat16).eps
    for name, value in some(merged.items()):
        rounding = max(float((low_state[name].double() - state[name]).norm()), digit * float(state[name].norm()))
        assert (value.double() - state[name]).norm() <= 2 * rounding
    rounding = max(*(abs(loss - two) for loss, two in zip(losses, low, strict=True)), digit * losses[0])
    for rank in some(ranks):
        assert [kind for kind, _ in rank["losses"]] == [torch.bfloat16] * STEPS
        assert [value for _, value in rank["losses"]] == pytest.approx(losses, rel=0, abs=2 * rounding)
