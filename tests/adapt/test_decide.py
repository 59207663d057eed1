"""Decisions on pipelines that run in the simulator: what is proposed, when, and what comes of it."""

from __future__ import annotations

import time

import pytest

from drumline.adapt.proposal import CUT, NUMBER, PROGRAM
from drumline.adapt.repair import Aside
from drumline.adapt.shortfall import Shortfall
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.core.simulate.steps import in_groups
from drumline.core.timeline.idle import Limit
from drumline.schedules import generate
from some import some
from virtual_pipeline import Virtual, one_f_one_b, profile, settings

pytestmark = pytest.mark.slow


def test_nothing_happens_while_nothing_changes() -> None:
    run = Virtual(one_f_one_b(), (8, 8)).run(60)
    assert run.proposals == []


def test_one_noisy_step_moves_nothing() -> None:
    run = Virtual(one_f_one_b(), (8, 8), slowness=lambda step: [1.0, 3.0 if step in (20, 40) else 1.0]).run(60)
    assert run.proposals == []


def test_a_sudden_slow_rank_gives_layers_away_and_gets_them_back() -> None:
    slow = Virtual(one_f_one_b(), (8, 8), slowness=lambda step: [1.0, 1.5 if 50 <= step < 90 else 1.0]).run(140)
    away, back = slow.proposals
    assert (away.kind, away.before.counts, away.after.counts) == (CUT, (8, 8), (10, 6))
    assert 50 < away.step <= 56
    assert (back.kind, back.after.counts) == (CUT, (8, 8))
    assert 90 < back.step <= 100
    assert not back.is_back, "a change of its own: the first one paid"
    assert [result.kept for result in slow.decider.judged] == [True, True]
    for judged in some(slow.decider.judged):
        assert judged.real == pytest.approx(judged.proposal.predicted, rel=0.02)


def test_a_slowing_rank_stays_within_the_bounds_at_every_step() -> None:
    run = Virtual(one_f_one_b(), (12, 12), slowness=lambda step: [1.0, min(1 + 0.01 * max(step - 10, 0), 1.5)]).run(90)
    assert [proposal.kind for proposal in run.proposals] == [CUT] * len(run.proposals)
    assert run.decider.now.counts in ((14, 10), (15, 9)), "at 1.5 times both take 15 blocks' time"
    assert all(result.kept for result in some(run.decider.judged))
    assert max(step.bubble for step in some(run.steps)) < 0.12


def test_half_of_a_slow_stage_goes_to_its_neighbour_and_comes_back_where_that_is_too_much() -> None:
    run = Virtual(
        one_f_one_b(),
        (8, 8),
        slowness=lambda step: [1.0, 1.5 if step >= 20 else 1.0],
        settings=settings(rebalance="half"),
    ).run(60)
    assert run.proposals == [], "12 | 4 takes as long as 8 | 8 where rank 1 takes 1.5 times as long"
    much = Virtual(one_f_one_b(), (8, 8), slowness=lambda step: [1.0, 4.0], settings=settings(rebalance="half")).run(30)
    assert much.proposals[0].after.counts == (12, 4)


def test_layers_that_were_timed_wrongly_are_found_by_moving() -> None:
    """The first layers take twice as long as timed, wherever they are: rank 0 seems to be slow."""
    run = Virtual(one_f_one_b(), (8, 8), truth=profile(16, dict.fromkeys(range(8), 2.0))).run(80)
    layers = profile(16, dict.fromkeys(range(8), 2.0))
    best = min(range(1, 16), key=lambda at: max(sum(layer.times.forward for layer in layers.layers[:at]),
                                                sum(layer.times.forward for layer in layers.layers[at:])))  # fmt: skip
    assert run.decider.now.counts == (best, 16 - best)


def test_a_move_that_does_not_pay_in_time_is_not_made() -> None:
    heavy = profile(16, weight=10**9)
    run = Virtual(
        one_f_one_b(), (8, 8), slowness=lambda step: [1.0, 1.5], timed=heavy, settings=settings(within=10)
    ).run(40)
    assert run.proposals == []


def test_memory_limits_where_layers_go() -> None:
    """Rank 0 has room for 9 of the blocks: weights, gradients, two states, and what it holds of microbatches."""
    run = Virtual(
        one_f_one_b(),
        (8, 8),
        slowness=lambda step: [1.0, 2.0],
        settings=settings(max_bytes=9 * (4 * 4000 + 2 * 1000) + 500),
    ).run(40)
    assert run.decider.now.counts == (9, 7)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_slow_link_is_seen_and_gets_a_proven_program(name: str) -> None:
    run = Virtual(
        one_f_one_b(16, name=name),
        (8, 8),
        latency=lambda step: 0.02 if step >= 20 else 1e-5,
        settings=settings(max_activations=6),
    ).run(40)
    first = run.proposals[0]
    assert (first.kind, first.step <= 25) == (PROGRAM, True)
    assert not validate(first.after.program)
    assert "link" in first.why
    assert max(simulate(first.after.program).peak_activations) <= 6
    assert run.steps[-1].makespan < run.steps[22].makespan * 0.9
    assert run.decider.judged[0].kept


def test_the_number_of_microbatches_follows_what_an_action_costs() -> None:
    """Actions have a fixed cost of 0.01 ms, then of 8 ms: at first many microbatches are best, later few."""

    def made(number: int) -> Program:
        return one_f_one_b(number)

    def costs(step: int) -> float:
        return 1e-5 if step < 40 else 8e-3

    given = settings(microbatches="batch", rebalance="keep", program=False, max_activations=16)
    run = Virtual(one_f_one_b(8), (8, 8), settings=given, build=made, fixed=costs, rows=64).run(80)

    def static(number: int, step: int) -> float:
        """Return what a step takes with a number that never changes."""
        share = 8 / number
        other = Virtual(made(number), (8, 8), slowness=lambda _: [share, share], fixed=lambda _: costs(step))
        return other.run(1).steps[0].makespan

    for step in (39, 79):
        best = min(static(number, step) for number in (1, 2, 4, 8, 16, 32, 64))
        assert run.steps[step].makespan <= 1.05 * best
    assert {proposal.kind for proposal in run.proposals} == {NUMBER}
    assert run.steps[39].program.num_microbatches > 8 > run.steps[79].program.num_microbatches


def test_unknown_rows_of_a_batch_are_no_reason_to_change_anything() -> None:
    """A cut that is 6% uneven stays: that is below the threshold, and nothing else has happened."""
    given = settings(microbatches="batch", program=False)
    run = Virtual(one_f_one_b(32), (33, 31), settings=given, build=one_f_one_b).run(20)
    assert run.proposals == []


def test_layers_do_not_move_because_no_other_number_was_tried() -> None:
    """The cut is 9.5% uneven, below the threshold, and only one number of microbatches has a program."""
    given = settings(microbatches="batch", program=False)
    build = {8: one_f_one_b(8)}.get
    run = Virtual(one_f_one_b(8), (23, 21), settings=given, build=build, rows=64).run(12)
    assert run.proposals == []


def test_a_move_at_the_first_look_leaves_the_trial_of_another_number_to_later() -> None:
    given = settings(microbatches="batch", program=False)
    run = Virtual(one_f_one_b(8), (12, 4), settings=given, build=one_f_one_b, rows=64).run(16)
    assert [proposal.kind for proposal in run.proposals][:2] == [CUT, NUMBER]
    assert run.proposals[0].why.startswith("rank 0 computes")
    assert run.proposals[1].why == "no other number was tried yet"


def test_at_a_fixed_size_a_step_runs_in_as_few_groups_as_memory_allows() -> None:
    """GPipe holds every microbatch of a group: 16 run as 2 groups of 8 where a rank may hold 8."""

    def build(number: int) -> Program:
        return generate("gpipe", num_ranks=2, num_microbatches=number)

    first = in_groups(build(2), 8)
    given = settings(microbatches="size", rebalance="keep", program=False, max_activations=8)
    run = Virtual(first, (8, 8), settings=given, build=build, rows=64).run(30)
    (change,) = run.proposals
    assert (change.kind, change.after.program) == (NUMBER, in_groups(build(8), 2))
    assert validate(change.after.program) == []
    assert max(simulate(change.after.program).peak_activations) == 8
    static = [
        Virtual(in_groups(build(number), 16 // number), (8, 8)).run(1).steps[0].makespan for number in (1, 2, 4, 8)
    ]
    assert run.steps[-1].makespan == min(static) < run.steps[0].makespan
    assert run.decider.judged[0].kept


def test_a_search_runs_beside_and_ends_with_its_pipeline() -> None:
    program = one_f_one_b(8)
    costs = Costs(forward=0.01, backward_input=0.02, backward_weight=0.0, comm=0.02)
    beside = Aside(costs, program, Limit(max_activations=4), seconds=0.5)
    until = time.monotonic() + 120
    while (found := beside.result()) is None:
        assert time.monotonic() < until
        time.sleep(0.05)
    assert isinstance(found, Program)
    assert not validate(found, limit=Limit(max_activations=4))
    assert simulate(found, costs).makespan < simulate(program, costs).makespan
    stopped = Aside(costs, program, Limit(max_activations=4), seconds=60.0)
    stopped.stop()
    assert stopped._process is not None
    assert stopped._process.poll() is not None


def test_a_gain_that_does_not_come_is_taken_back_and_not_tried_again() -> None:
    """Whatever moves to rank 0 takes five times as long there: no measurement at 8 | 8 can know that."""
    run = Virtual(one_f_one_b(), (8, 8), settings=settings(program=False))
    run.slowness = lambda step: [1.0 if run.now == (8, 8) else 2.0, 1.5 if step >= 20 else 1.0]
    run.run(70)
    away, back = run.proposals
    assert (away.after.counts, back.after.counts) == ((10, 6), (8, 8))
    assert back.is_back
    assert [result.kept for result in run.decider.judged] == [False]


def test_programs_that_fall_short_of_their_forecasts_come_ever_more_rarely() -> None:
    """A link changes all the time, and every search finds a program that is slower than its simulation."""
    program = one_f_one_b(16, name="zb-h1")
    run = Virtual(
        program,
        (8, 8),
        latency=lambda step: 1e-5 if step < 20 else 0.003 * (1 + step // 12 % 5),
        unseen=lambda now: 0.0 if now == program else 0.004,
        settings=settings(max_activations=6, rebalance="keep"),
    )
    run.run(500)
    away = [proposal.step for proposal in run.proposals if not proposal.is_back]
    assert 2 <= len(away) <= 5, "tried again, but not at every change of the link"
    assert not any(result.kept for result in run.decider.judged)
    assert run.decider.now.program == program


def test_a_kept_promise_lets_corrections_begin_anew() -> None:
    shortfall = Shortfall(8)
    for _ in range(3):
        shortfall.note(step=0, share=0.5)
    shortfall.forget()
    shortfall.note(step=0, share=0.5)
    assert [shortfall.factor(step) for step in (31, 32)] == [1.5, 1.0]


def test_a_program_that_keeps_its_promise_comes_soon_after_one_that_did_not() -> None:
    program = one_f_one_b(16, name="zb-h1")
    run = Virtual(
        program,
        (8, 8),
        latency=lambda step: 1e-5 if step < 20 else 0.003 if step < 60 else 0.02,
        settings=settings(max_activations=6, rebalance="keep"),
    )
    run.unseen = lambda now: 0.0 if now == program or len(run.steps) >= 60 else 0.004
    run.run(80)
    assert [result.kept for result in run.decider.judged] == [False, True]
    assert run.decider.judged[1].proposal.step < 66


def test_fewer_microbatches_must_fit_the_memory_of_the_start() -> None:
    """A fixed cost of every action asks for few and large microbatches, and there is room for 2 of 8 rows."""
    given = settings(microbatches="batch", rebalance="keep", program=False)
    run = Virtual(one_f_one_b(8), (8, 8), settings=given, build=one_f_one_b, fixed=lambda step: 0.05, rows=64).run(30)
    assert {step.program.num_microbatches for step in some(run.steps)} <= {8, 16}
    assert run.steps[-1].program.num_microbatches == 8
