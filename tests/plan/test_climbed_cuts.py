"""Cuts that are climbed to, against the best of all cuts, tried one by one."""

from __future__ import annotations

import numpy as np
import pytest

from chains import cuts
from drumline.adapt.rebalance import Layers
from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import makespans
from drumline.plan.cut.cuts import neighbours
from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock
from names import build

SECONDS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
CASES = [("zb-v", 4, 16), ("interleaved-1f1b", 4, 16), ("1f1b", 4, 32)]


def layers_on(program: Program, num_blocks: int, slowness: list[float], max_bytes: float | None = None) -> Layers:
    """Return equal layers on ranks that are so many times as slow."""
    each = [ProfiledBlock(str(at), OpTimes(1.0, 2.0, 1.0, 1.0), 0, 0, 0, 8, 8, 0) for at in range(num_blocks)]
    profile = Profile(tuple(each), OpTimes(0, 0, 0, 0), "cpu", 1)
    return Layers(profile, program, speeds=tuple(1.0 / value for value in slowness), max_bytes=max_bytes)


def least(program: Program, num_blocks: int, slowness: list[float]) -> float:
    """Return the shortest step of all cuts."""
    actions = [(part.stage, SECONDS[part.op]) for part in program.work()]
    stages = [stage for stage, _ in actions]
    each = np.array([seconds * slowness[program.placement.homes[stage]] for stage, seconds in actions])
    every = np.array(list(cuts(num_blocks, program.num_stages)))
    assert len(every) > 4000, "so few would all be tried"
    return min(
        float(makespans(program, Costs(backward=1.0), factors=part[:, stages] * each).min())
        for part in np.array_split(every, 8)
    )


@pytest.mark.parametrize(("name", "num_ranks", "num_blocks"), CASES)
@pytest.mark.parametrize("slow", [1.5, 1.25, 2.0, 3.0])
def test_no_cut_is_better_than_the_one_that_is_climbed_to(
    name: str, num_ranks: int, num_blocks: int, slow: float
) -> None:
    program = build(name, num_ranks, 8)
    slowness = [slow if rank == num_ranks // 2 else 1.0 for rank in range(num_ranks)]
    layers, best = layers_on(program, num_blocks, slowness), least(program, num_blocks, slowness)
    assert layers.best().seconds == pytest.approx(best, rel=1e-9)


def test_a_climb_stays_within_the_memory() -> None:
    """A layer is 8 bytes of weights, as many of gradients, and two states: 9 of them fit a rank."""
    program = build("1f1b", 4, 8)
    slowness = [1.0, 1.0, 3.0, 1.0]
    free, bound = (layers_on(program, 32, slowness, most).best() for most in (None, 32.0 * 9))
    assert max(free.counts) > 9
    assert (max(bound.counts), bound.excess) == (9, 0.0)
    assert bound.seconds > free.seconds


def test_a_block_moves_between_any_two_stages() -> None:
    assert set(neighbours((2, 2, 2, 2))) >= {(1, 2, 2, 3), (3, 2, 2, 1), (1, 2, 3, 2), (2, 3, 2, 1)}
    assert all(sum(counts) == 8 and min(counts) > 0 for counts in neighbours((2, 2, 2, 2)))
    assert (1, 2, 2, 3) not in neighbours((2, 2, 2, 2), alone=True)
