"""The planner for a profiled model: within memory, near brute force, and with reasons."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import cuts
from drumline.core.costs import Costs, Edge
from drumline.core.errors import PlanError, ScheduleError
from drumline.core.placement import Placement
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.cut.cuts import every_cut
from drumline.plan.device.candidate import Candidate
from drumline.plan.device.combinations import reordered
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.overheads import MessageTime, Overheads
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import plan
from drumline.plan.device.ranks import Ranks
from drumline.plan.device.stages import Stages, split_share
from matrices import examples, long
from names import build
from profiles import NONE, SOME, model_profile
from refused import refused, saying
from some import some

MIB = 2**20
FAST: dict[str, Any] = {"seconds": 0.0}


def stages_for(
    profile: ModelProfile, name: str, microbatches: int, rows: int, *, again: tuple[bool, ...] = (), **ranks: Any
) -> Stages:
    program = build(name, ranks.pop("num_ranks", 2), microbatches)
    known = Ranks.of(program.num_ranks, **ranks)
    return Stages(profile.at(rows), program, known, profile.overheads, again or (False,) * program.num_stages)


def with_handling(stages: Stages, counts: tuple[int, ...]) -> dict[str, list[float]]:
    """Return the seconds of each op of the stages of a cut, handling included, stage by stage."""
    plain = stages.profile.costs(counts, split=split_share(stages.program))
    homes, own, last = stages.program.placement.homes, stages.overheads, len(counts) - 1
    found: dict[str, list[float]] = {name: [] for name in ("forward", "backward", "backward_input", "backward_weight")}
    sizes = plain.per_stage("message_bytes", len(counts))
    for stage, again in enumerate(stages.recompute):
        behind = stage < last and homes[stage] != homes[stage + 1]
        before = stage > 0 and homes[stage] != homes[stage - 1]
        ahead = (own.send.at(sizes[stage]) if behind else 0.0) + (own.take.at(sizes[stage - 1]) if before else 0.0)
        back = (own.take.at(sizes[stage]) if behind else 0.0) + (own.send.at(sizes[stage - 1]) if before else 0.0)
        extra = (ahead, *[back - ahead * again - own.action * again] * 2, 0.0)
        for (name, each), more in zip(found.items(), extra, strict=True):
            seconds = plain.per_stage(name, len(counts))[stage] / stages.ranks.speeds[homes[stage]]
            each.append(seconds + own.action + more)
    return found


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "zb-v", "interleaved-1f1b", "dualpipe-v", "hanayo"])
@pytest.mark.parametrize("frozen", [0, 3])
@pytest.mark.parametrize("speeds", [(1.0, 1.0), (1.0, 0.5)])
def test_cuts_timed_at_once_take_what_the_simulator_says(name: str, frozen: int, speeds: tuple[float, float]) -> None:
    handled = replace(SOME, send=MessageTime(1e-5, 1e-3), take=MessageTime(2e-5, 2e-3))
    outputs = [400, 70, 900, 30, 550]
    sizes: dict[str, Any] = {"held": 1000, "weights": 300, "output": outputs}
    profile = model_profile([1, 4, 4, 4, 6], overheads=handled, frozen=frozen, tape=0.2, **sizes)
    stages = stages_for(profile, name, 4, 2, rank_speeds=speeds)
    stages = replace(stages, recompute=tuple(stage % 2 == 0 for stage in range(stages.program.num_stages)))
    found = stages.cuts.timed(every_cut(5, stages.program.num_stages))
    for cut in found:
        program, costs = stages.cuts.pruned(cut.counts), stages.costs(cut.counts)
        for op, seconds in some(with_handling(stages, cut.counts).items()):
            assert costs.per_stage(op, program.num_stages) == pytest.approx(seconds)
        simulated = simulate(program, costs)
        assert cut.seconds == pytest.approx(simulated.makespan + stages.around(costs, program))
        assert cut.rank_bytes == pytest.approx(simulated.peak_bytes)
        candidate = Candidate(stages, cut, 2, 8)
        assert candidate.seconds.total == pytest.approx(cut.seconds)
        assert [each.total for each in candidate.rank_bytes] == pytest.approx(list(cut.rank_bytes))
    assert len({cut.seconds for cut in found}) > 1


@pytest.mark.parametrize("again", [(False, False, False), (True, True, True)])
def test_a_message_is_priced_at_the_boundary_that_it_crosses(again: tuple[bool, ...]) -> None:
    # Blocks hand on 1000, 20, 300, 4 and 0 bytes: of a cut into 1, 2 and 2 blocks, 1000 and 300 cross.
    by_size = Overheads(send=MessageTime(0.0, 1.0), take=MessageTime(0.0, 10.0))
    profile = model_profile([1, 1, 1, 1, 1], rows=(1,), output=[1000, 20, 300, 4, 0], overheads=by_size)
    stages = stages_for(profile, "1f1b", 4, 1, num_ranks=3, again=again)
    costs = stages.costs((1, 2, 2))
    seconds = (1.0, 2.0, 2.0)
    sent, taken = (1000.0, 300.0, 0.0), (0.0, 10_000.0, 3_000.0)
    assert costs.per_stage("forward", 3) == tuple(map(sum, zip(seconds, sent, taken, strict=True)))
    # Backwards, a stage takes over the boundary behind it and sends over the one before; one that is computed again
    # sends nothing for that: the forward that the simulator adds has its messages in it.
    backwards = tuple(2 * duration for duration in seconds)
    extra = [(10_000.0, 0.0), (3_000.0, 1000.0), (0.0, 300.0)]
    handled = [own + take + send for own, (take, send) in zip(backwards, extra, strict=True)]
    less = [(a + b) * twice for a, b, twice in zip(sent, taken, again, strict=True)]
    wanted = [max(value - gone, 0.0) for value, gone in zip(handled, less, strict=True)]
    assert costs.per_stage("backward", 3) == pytest.approx(wanted)
    assert costs.per_stage("checkpoint_bytes", 3) == ((0.0, 1000.0, 300.0) if any(again) else (0.0, 0.0, 0.0))
    (cut,) = stages.cuts.timed([(1, 2, 2)])
    assert Candidate(stages, cut, 1, 4).sent_bytes == 2 * 4 * (1000 + 300)
    plain = stages.profile.costs((1, 2, 2))
    assert plain.per_stage("message_bytes", 3) == (1000.0, 300.0, 0.0)


def brute_force(
    profile: ModelProfile, names: tuple[str, ...], batch: int, memory: float, headroom: float
) -> list[tuple[float, tuple[float, ...]]]:
    """Return the step and every rank's peak of all that fits: each schedule, size, choice of stages and cut."""
    found = []
    for name, rows in product(names, (1, 2)):
        try:
            program = build(name, 2, batch // rows)
        except ScheduleError:
            continue
        if program.num_stages > len(profile.layers):
            continue
        for again in product((False, True), repeat=program.num_stages):
            stages = stages_for(profile, name, batch // rows, rows, again=again)
            for counts in cuts(len(profile.layers), program.num_stages):
                costs = stages.costs(counts)
                timeline = simulate(program, costs)
                assert timeline.peak_bytes is not None
                if max(timeline.peak_bytes) <= memory * (1 - headroom):
                    found.append((timeline.makespan + stages.around(costs, program), timeline.peak_bytes))
    return found


@long
@pytest.mark.slow
@settings(deadline=None, max_examples=examples(25))
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=5),
    st.integers(0, 200),
    st.integers(1, 100),
    st.integers(100, 3000),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_a_plan_fits_and_nothing_that_fits_is_much_faster(
    seconds: list[int], held: int, weights: int, memory: int, headroom: float
) -> None:
    profile = model_profile(seconds, rows=(1, 2), held=held, weights=weights, output=5, overheads=NONE)
    names = ("1f1b", "gpipe", "zb-h1", "zb-v")
    every = brute_force(profile, names, 4, memory, headroom)
    asked: dict[str, Any] = {"num_ranks": 2, "batch": 4, "memory_bytes": memory, "headroom": headroom}
    whole = [pair for pair in every if pair[0] < math.inf]
    if not whole:
        with refused(PlanError, "nothing fits"):
            plan(profile, schedules=names, **asked, **FAST)
        return
    found = plan(profile, schedules=names, **asked, **FAST)
    best = found.best
    costs = found.chosen.costs
    peaks = simulate(best.program, costs).peak_bytes
    assert peaks is not None
    assert max(peaks) <= memory * (1 - headroom)
    assert [rank_bytes.total for rank_bytes in best.rank_bytes] == pytest.approx(list(peaks))
    assert all(some(candidate.fits for candidate in found.candidates))
    assert not any(candidate.fits for candidate in found.rejected)
    assert not validate(best.program)
    assert sum(best.counts) == len(seconds)
    assert best.step_seconds <= min(step for step, _ in whole) * 1.011


def test_a_slow_rank_gets_fewer_blocks_and_small_memory_less() -> None:
    profile = model_profile([1.0] * 12, held=10, weights=10)
    even = plan(profile, num_ranks=2, batch=4, schedules=["1f1b"], **FAST).best
    assert even.counts == (6, 6)
    slow = plan(profile, num_ranks=2, batch=32, schedules=["1f1b"], rank_speeds=[1, 0.5], **FAST)
    by_rank = {rank: slow.best.counts[stages[0]] for rank, stages in enumerate(slow.best.summary()["placement"])}
    assert by_rank == {0: 8, 1: 4}
    asked: dict[str, Any] = {"headroom": 0.0, "optimizer": "sgd", "checkpoint": ["none"]}
    small = plan(profile, num_ranks=2, batch=4, schedules=["1f1b"], rank_memory=[1000, 120], **asked, **FAST)
    sizes = [rank_bytes.total for rank_bytes in small.best.rank_bytes]
    assert sizes[1] <= 120 < sizes[0] <= 1000


def test_ranks_that_differ_may_change_places() -> None:
    """The first rank of 1f1b holds the most microbatches, so it is played by the one with the memory."""
    profile = model_profile([1.0] * 6, held=100, weights=1)
    asked: dict[str, Any] = {"headroom": 0.0, "checkpoint": ["none"], "schedules": ["1f1b"]}
    found = plan(profile, num_ranks=2, batch=4, rank_memory=[400, 10_000], **asked, **FAST).best
    assert found.program.placement.homes == (1, 0)
    assert reordered(build("1f1b", 2, 4), (0, 1)).placement.homes == (0, 1)


def test_a_slow_link_is_crossed_less() -> None:
    profile = model_profile([1.0] * 8, output=1000)
    names = ["1f1b", "interleaved-1f1b"]
    near = plan(profile, num_ranks=2, batch=8, schedules=names, **FAST).best
    far = {(0, 1): Edge(5.0, 1000.0), (1, 0): Edge(5.0, 1000.0)}
    slow = plan(profile, num_ranks=2, batch=8, schedules=names, links=far, **FAST).best
    assert near.schedule == "interleaved-1f1b"
    assert slow.schedule == "1f1b"
    assert slow.seconds.communication > near.seconds.communication == 0


def test_headroom_is_kept_free() -> None:
    profile = model_profile([1.0] * 4, held=100, weights=10)
    asked: dict[str, Any] = {"num_ranks": 2, "batch": 4, "schedules": ["gpipe", "1f1b"], **FAST}
    free = plan(profile, headroom=0.0, memory_bytes=1000, **asked).best
    tight = plan(profile, headroom=0.6, memory_bytes=1000, **asked).best
    assert tight.limits == (400.0, 400.0)
    assert max(rank_bytes.total for rank_bytes in tight.rank_bytes) <= 400
    assert tight.step_seconds >= free.step_seconds


def test_what_is_as_fast_within_a_percent_is_chosen_by_memory() -> None:
    profile = model_profile([1.0] * 4, held=100)
    found = plan(profile, num_ranks=2, batch=8, schedules=["gpipe", "1f1b"], **FAST)
    assert found.best.schedule == "1f1b"  # gpipe takes as long
    rival = next(
        item for item in found.candidates if item.program.name == "gpipe" and item.rows == found.best.microbatch_size
    )
    assert "<1% faster, but holds" in rival.why_not(found.chosen).sentence


def test_a_program_is_searched_where_that_is_better() -> None:
    profile = model_profile([1.0, 1.0, 1.0, 2.6])
    found = plan(profile, num_ranks=4, batch=8, schedules=["1f1b"], seconds=3.0)
    assert found.best.searched
    plain = next(candidate for candidate in found.candidates if not candidate.searched)
    assert found.best.step_seconds < plain.step_seconds
    assert "bubble" in plain.why_not(found.chosen).sentence
    assert not validate(found.best.program)


def test_a_forward_that_keeps_a_tape_takes_longer() -> None:
    plain, taped = (model_profile([1.0] * 4, tape=tape) for tape in (0.0, 0.5))
    for name, longer in (("1f1b", False), ("zb-h1", True)):
        steps = [plan(p, num_ranks=2, batch=8, schedules=[name], **FAST).best.step_seconds for p in (plain, taped)]
        assert (steps[1] > steps[0]) is longer
    costs = stages_for(taped, "1f1b", 4, 2).costs_for_search((2, 2))
    assert costs.per_stage("forward", 2) == (4.0, 4.0)
    assert costs.per_stage("backward_input", 2) == (6.0, 6.0)  # whoever splits pays for the tape


def test_why_nothing_fits_and_what_would_do() -> None:
    profile = model_profile([1.0] * 8, held=100, weights=10)
    asked: dict[str, Any] = {"num_ranks": 2, "batch": 4, "headroom": 0.0, "schedules": ["1f1b"], **FAST}
    nothing = r"nothing fits: the smallest of 3 combinations \(1f1b, 4 microbatches of 1\)"
    mend = "full checkpointing on rank 0.* 3 ranks"
    with refused(PlanError, nothing, expected="less activation memory", fix=mend) as caught:
        plan(profile, memory_bytes=700, checkpoint=["none"], **asked)
    smallest = caught.value.smallest_bytes
    assert smallest is not None
    assert plan(profile, memory_bytes=smallest, checkpoint=["none"], **asked).best.schedule == "1f1b"
    with pytest.raises(PlanError):
        plan(profile, memory_bytes=smallest - 1, checkpoint=["none"], **asked)
    again = plan(profile, memory_bytes=700, **asked).best
    assert any(again.checkpoint)
    with refused(PlanError, "nothing fits", expected="optimizer state alone"):
        plan(profile, memory_bytes=30, **asked)


@pytest.mark.slow
def test_smaller_microbatches_are_named_where_none_was_measured() -> None:
    profile = model_profile([1.0] * 4, rows=(2, 4), held=100, weights=1)
    with refused(PlanError, "nothing fits", fix="smaller microbatches"):
        plan(profile, num_ranks=2, batch=4, memory_bytes=100, **FAST)


def test_a_search_takes_ranks_with_less_memory_as_partly_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search knows one limit: what a rank has less than the roomiest counts as held from the beginning."""
    asked = []

    def seen(costs: Costs, placement: Placement, *, limit: Limit | None, **rest: Any) -> None:
        asked.append((list(costs.per_stage("weight_bytes", placement.num_stages)), limit))
        raise PlanError("nothing fits")

    monkeypatch.setattr("drumline.plan.device.planner.search", seen)
    profile = model_profile([1.0, 2.0, 3.0, 2.0])
    for memory in ([9_000, 10_000], [10_000, 10_000], None):
        plan(profile, num_ranks=2, batch=4, schedules=["1f1b"], rank_memory=memory, headroom=0.0, seconds=1.0)
    (small, small_limit), (even, even_limit), (_, no_limit) = (asked[at] for at in (0, len(asked) // 3, -1))
    assert no_limit is None
    assert small_limit == even_limit == Limit(max_bytes=10_000)
    assert [more - less for more, less in zip(small, even, strict=True)] == [1000, 0]


def test_a_plan_and_its_file_are_the_same() -> None:
    found = plan(model_profile([1.0, 2.0, 3.0], overheads=SOME), num_ranks=2, batch=4, memory_bytes=10_000, **FAST).best
    assert Plan.from_json(found.to_json()) == found
    assert found.cuts == tuple(str(sum(found.counts[: stage + 1])) for stage in range(len(found.counts) - 1))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_ranks": 0}, saying("num_ranks is 0", expected="a whole number of 1 or more")),
        ({"num_ranks": 5}, saying("the model has 3 blocks for 5 ranks")),
        ({"batch": 0}, saying("the batch has 0 rows")),
        (
            {"batch": 7, "profile": model_profile([1.0] * 3, rows=(2, 4))},
            saying("no measured microbatch size divides it"),
        ),
        ({"batch": 1, "profile": model_profile([1.0] * 3, rows=(2, 4))}, saying("any microbatch is larger")),
        ({"headroom": 1.0}, saying("headroom is 1")),
        ({"optimizer": "adan"}, saying("unknown optimizer 'adan'", fix="did you mean adam")),
        ({"schedules": ["1f1v"]}, saying("unknown schedule '1f1v'", fix="did you mean 1f1b")),
        ({"schedules": ["chimera"]}, saying("chimera cannot be planned from a profile")),
        ({"checkpoint": ["some"]}, saying("unknown checkpointing 'some'")),
        ({"rank_speeds": [1.0]}, saying("1 speeds", expected="one for each of 2 ranks")),
        ({"rank_memory": [1.0, -1.0]}, saying(r"\[1.0, -1.0\]", expected="more than 0")),
        ({"links": {(0, 2): Edge()}}, saying("a link is 0-2")),
    ],
)
def test_what_makes_no_sense_is_refused(settings: dict[str, Any], reason: dict[str, str]) -> None:
    asked: dict[str, Any] = {"profile": model_profile([1.0] * 3), "num_ranks": 2, "batch": 4, **FAST, **settings}
    with refused((PlanError, ScheduleError), **reason):
        plan(asked.pop("profile"), **asked)


def test_many_blocks_are_cut_by_the_exact_cuts_and_their_neighbours() -> None:
    profile = model_profile([1.0 + at % 5 for at in range(40)], overheads=SOME)
    found = plan(profile, num_ranks=4, batch=8, schedules=["1f1b"], **FAST).best
    stages = stages_for(profile, "1f1b", found.num_microbatches, found.microbatch_size, num_ranks=4)
    largest = max(sum(1.0 + at % 5 for at in range(i, j)) for i, j in _runs(found.counts))
    assert largest <= 1.2 * 120 / 4
    assert found.step_seconds <= stages.cuts.timed([(10, 10, 10, 10)])[0].seconds


def _runs(counts: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(sum(counts[:at]), sum(counts[: at + 1])) for at in range(len(counts))]
