"""Our orders against those that PyTorch's own generators give, compared live."""

from __future__ import annotations

import pytest

import torch_peer as peer
from drumline.core.costs import Costs
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from matrices import ALL
from names import build
from some import some

pytestmark = pytest.mark.torch

COSTS = [
    Costs(),
    Costs(forward=2, backward_input=2.5, backward_weight=1.5),
    Costs(forward=10, backward_input=10, backward_weight=6, comm=1),
]
PER_RANK = {
    "looped-bfs": (2, 3),
    "interleaved-1f1b": (2, 3),
    "zb-v": (2,),
    "dualpipe-v": (2,),
    "gpipe": (1,),
    "1f1b": (1,),
}


@pytest.mark.parametrize("name", list(PER_RANK))
def test_no_slower_and_no_larger_than_torch_wherever_torch_accepts(name: str) -> None:
    compared = 0
    for per_rank in PER_RANK[name]:
        for ranks in range(1, 9) if ALL else (1, 2, 3, 4, 6, 8):
            for microbatches in range(1, 17):
                theirs = peer.order(name, ranks, microbatches, per_rank)
                if theirs is None:
                    continue
                assert validate(theirs) == []
                ours = build(name, ranks, microbatches, per_rank)
                compared += 1
                for costs in COSTS:
                    mine, other = simulate(ours, costs), simulate(theirs, costs)
                    assert mine.makespan <= other.makespan * (1 + 1e-12), (ranks, microbatches, per_rank)
                    assert all(
                        some(a <= b for a, b in zip(mine.peak_activations, other.peak_activations, strict=True))
                    ), (
                        ranks,
                        microbatches,
                        per_rank,
                    )
    assert compared > 50


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-v", "dualpipe-v", "interleaved-1f1b"])
def test_the_order_is_exactly_torchs(name: str) -> None:
    for ranks, microbatches in ((2, 4), (4, 8), (4, 12)):
        assert build(name, ranks, microbatches) == peer.order(name, ranks, microbatches)


def test_breadth_first_differs_only_in_the_order_of_its_backwards() -> None:
    ours, theirs = build("looped-bfs", 4, 6), peer.order("looped-bfs", 4, 6)
    assert theirs is not None
    assert ours != theirs
    assert [sorted(row) for row in ours.rows] == [sorted(row) for row in theirs.rows]


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "dualpipe-v"])
def test_counts_that_torch_refuses_are_legal_here(name: str) -> None:
    refused = [
        (ranks, microbatches)
        for ranks in range(2, 7)
        for microbatches in range(1, 13)
        if peer.order(name, ranks, microbatches) is None
    ]
    assert refused
    assert all(validate(build(name, *counts)) == [] for counts in refused)
