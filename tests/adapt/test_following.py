"""A rank that gets slower step by step: the bubble stays near that of the best cut, which is searched by trying all."""

from __future__ import annotations

from itertools import combinations

import pytest

from drumline.core.costs import Costs
from drumline.core.simulate.simulate import makespans
from matrices import mainly
from some import some
from virtual_pipeline import BLOCK, Virtual, one_f_one_b, profile, settings

pytestmark = pytest.mark.slow
EACH, SINCE, STEPS = 16, 10, 60


def all_cuts(num_ranks: int) -> list[tuple[int, ...]]:
    """Return the cuts worth trying: the slow rank has 1 to 16 blocks, the others what is left as evenly as it goes."""
    cuts = []
    for own in range(1, EACH + 1):
        base, more = divmod(EACH * num_ranks - own, num_ranks - 1)
        for longer in combinations(range(num_ranks - 1), more):
            others = [base + (at in longer) for at in range(num_ranks - 1)]
            cuts.append((*others[: num_ranks // 2], own, *others[num_ranks // 2 :]))
    return cuts


def best_bubble(num_ranks: int, slow: float) -> float:
    """Return the bubble of the cut with the shortest step."""
    program, cuts = one_f_one_b(32, num_ranks), all_cuts(num_ranks)
    factors = [slow if rank == num_ranks // 2 else 1.0 for rank in range(num_ranks)]
    each = [[BLOCK * count * factor for count, factor in zip(cut, factors, strict=True)] for cut in cuts]
    costs = [Costs(forward=row, backward=[2 * value for value in row], comm=1e-5) for row in each]
    step, row = min(zip(makespans(program, costs).tolist(), each, strict=True))
    return float(1.0 - 32 * 3 * sum(row) / (num_ranks * step))


@mainly("num_ranks", 4, 2, 8)
def test_the_bubble_stays_within_three_points_of_the_best_cut_at_every_step(num_ranks: int) -> None:
    def slowness(step: int) -> list[float]:
        slow = 1.0 + 0.01 * max(step - SINCE, 0)
        return [slow if rank == num_ranks // 2 else 1.0 for rank in range(num_ranks)]

    cut = (EACH,) * num_ranks
    run = Virtual(
        one_f_one_b(32, num_ranks),
        cut,
        slowness=slowness,
        settings=settings(program=False),
        timed=profile(EACH * num_ranks),
    ).run(STEPS)
    assert run.decider.now.counts != cut
    assert all(result.kept for result in some(run.decider.judged))
    for step, seen in enumerate(some(run.steps)):
        assert seen.bubble <= best_bubble(num_ranks, slowness(step)[num_ranks // 2]) + 0.03
