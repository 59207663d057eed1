"""`benchmarks/adapt_regret.py` in short: what adapting loses where nothing is slow, and gains where a rank is."""

from __future__ import annotations

import numpy as np
import pytest

from adapt_regret import BARS, cells, draw, report
from drumline.adapt.decide import Decider
from drumline.adapt.proposal import Arrangement
from drumline.adapt.settings import Adapt
from drumline.core.costs import Costs
from drumline.core.measured.measured import Measured
from drumline.core.simulate.simulate import simulate
from matrices import mainly
from regret_world import BLOCK, World, kinds, noise
from simulated_runs import records_of
from some import some

pytestmark = pytest.mark.slow
NAMES = ("nothing slow", "x1.5 to the end", "x1.25, period 8", "1% slower a step, to x2")


@mainly("schedule", "1f1b", "zb-v")
def test_the_bars_hold_in_some_cells(schedule: str) -> None:
    which = [kind for kind in kinds() if kind.name in NAMES]
    found = [cell for sigma in (0.0, 0.1) for cell in cells((schedule, 2, sigma, which, 2, 400))[0]]
    assert len(found) == 2 * len(NAMES)
    for bar in some(BARS):
        for cell in found:
            assert not bar.of(cell) or bar.figure(cell) <= bar.most, (bar.name, cell)
    slow = [cell for cell in found if cell.kind.name == "x1.5 to the end"]
    assert all(max(cell.over_nothing) < -0.08 for cell in some(slow)), "what is slow for long is answered"
    assert draw(found).count("<title>") > len(found)
    assert len(list(report(found))) > len(found)


def test_deciders_that_saw_the_same_steps_are_one_until_these_part() -> None:
    """Every kind alone, with a decider of its own, has the figures that it has beside the others."""
    which = [kind for kind in kinds() if kind.name in NAMES]
    together = cells(("1f1b", 2, 0.1, which, 2, 160))[0]
    assert any(sum(cell.moves) for cell in together)
    for kind, cell in zip(which, some(together), strict=True):
        (alone,) = cells(("1f1b", 2, 0.1, [kind], 2, 160))[0]
        assert alone == cell


def test_the_fast_clock_is_the_simulators() -> None:
    """The step of many runs at once, and what a decider sees of it, against single simulations with all records."""
    world = World("zb-v", 2, 4)
    speeds = noise(3, 5, 2, 0.3)
    counts = (10, 6, 7, 9)
    fast = world.seconds(np.array([counts] * 5), speeds)
    stages = world.stage_seconds(np.array([counts] * 5), speeds)
    for step, row in enumerate(some(speeds.tolist())):
        each = [BLOCK * count * row[home] for count, home in zip(counts, world.program.placement.homes, strict=True)]
        simulated = simulate(world.program, Costs(forward=each, backward_input=each, backward_weight=each))
        assert fast[step] == pytest.approx(simulated.makespan)
        real = Measured(world.program, tuple(records_of(simulated, step)))
        seen = world.seen(step, float(fast[step]), stages[step].tolist())
        assert seen.busy == pytest.approx(real.busy)
        assert {key: sum(value) for key, value in seen.action_seconds().items()} == pytest.approx(
            {key: sum(value) for key, value in real.action_seconds().items()}, rel=1e-6
        )


def test_a_decider_decides_alike_from_measured_steps() -> None:
    """The benchmark leaves out records of ranks: with them the same layers move before the same steps."""
    world = World("1f1b", 2, 4)
    speeds = noise(1, 40, 2, 0.02)
    speeds[20:, 1] *= 1.5
    moves: list[list[tuple[int, tuple[int, ...]]]] = []
    for full in (False, True):
        decider = Decider(Adapt(program=False), Arrangement(world.program, world.home), layers=world.layers)
        moves.append([])
        for step in range(40):
            counts = decider.now.counts
            each = world.stage_seconds(np.array([counts]), speeds[step : step + 1])[0].tolist()
            simulated = simulate(world.program, Costs(forward=each, backward=[2 * value for value in each]))
            seen = (
                Measured(world.program, tuple(records_of(simulated, step)))
                if full
                else world.seen(step, simulated.makespan, each)
            )
            proposal = decider.see(seen)  # type: ignore[arg-type]
            if proposal is not None:
                moves[-1].append((step, proposal.after.counts))
                decider.took(proposal, proposal.after, seconds=world.pause, num_bytes=1000)
    assert moves[0] == moves[1]
    assert [step for step, _ in moves[0]] == [22]
