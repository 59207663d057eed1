"""Causes of idle time: they fill every gap of a rank, and each names what the rank waits for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.attribute import attribute
from drumline.core.timeline.idle import Cause, Idle, Limit
from drumline.report.summary import idle_by_cause
from matrices import examples
from programs import build, costs_for, programs


def seconds_by_cause(intervals: Sequence[Idle]) -> dict[str, float]:
    total: dict[str, float] = {}
    for idle in intervals:
        total[idle.cause.value] = total.get(idle.cause.value, 0.0) + idle.seconds
    return total


@settings(max_examples=examples(200))
@given(programs(), st.data())
def test_causes_sum_to_the_idle_time_of_every_rank(program: Program, data: st.DataObject) -> None:
    timeline = simulate(program, data.draw(costs_for(program)))
    limit = data.draw(st.none() | st.builds(Limit, st.integers(1, 6)))
    intervals = attribute(timeline, limit)
    for rank in range(program.num_ranks):
        idle = math.fsum(interval.seconds for interval in intervals if interval.rank == rank)
        assert idle == pytest.approx(timeline.idle[rank], abs=1e-9)


@settings(max_examples=examples(80))
@given(programs(), st.data(), st.integers(0, 2**32 - 1), st.booleans())
def test_arrays_find_the_intervals_that_are_found_action_by_action(
    program: Program, data: st.DataObject, seed: int, jitter: bool
) -> None:
    factors = np.random.default_rng(seed).lognormal(0.0, 0.3, len(program.timed_columns.code))
    timeline = simulate(program, data.draw(costs_for(program)), factors=factors if jitter else None)
    expected = attribute(timeline)
    assert tuple(timeline.causes) == expected
    assert timeline.causes[1:3] == expected[1:3]
    by_cause: dict[str, list[float]] = {}
    for idle in expected:
        by_cause.setdefault(idle.cause.value, [0.0] * program.num_ranks)[idle.rank] += idle.seconds
    assert idle_by_cause(timeline) == by_cause


@settings(max_examples=examples(60))
@given(programs(names=("dualpipe", "dualpipe-v")), st.data(), st.integers(0, 2**32 - 1))
def test_an_overlapped_pair_waits_for_its_latest_input(program: Program, data: st.DataObject, seed: int) -> None:
    factors = np.random.default_rng(seed).lognormal(0.0, 0.3, len(program.timed_columns.code))
    timeline = simulate(program, data.draw(costs_for(program)), factors=factors)
    assert tuple(timeline.causes) == attribute(timeline)


@settings(max_examples=examples(100))
@given(programs(), st.data())
def test_intervals_fill_exactly_the_gaps(program: Program, data: st.DataObject) -> None:
    timeline = simulate(program, data.draw(costs_for(program)))
    for rank, track in enumerate(timeline.tracks):
        edges = [(s, e) for s, e in zip(track.starts, track.ends, strict=True) if e > s]
        edges += [(cause.start, cause.end) for cause in timeline.causes if cause.rank == rank]
        edges.sort()
        assert edges[0][0] == timeline.start
        assert edges[-1][1] == timeline.end
        assert all(before[1] == pytest.approx(after[0]) for before, after in pairwise(edges))


def test_equal_costs_and_free_messages_leave_fill_wait_and_drain() -> None:
    timeline = simulate(build("1f1b", 4, 8))
    assert set(seconds_by_cause(timeline.causes)) == {"fill", "wait", "drain"}
    assert [cause.seconds for cause in timeline.causes if cause.cause is Cause.FILL] == [1, 2, 3]
    assert [cause.seconds for cause in timeline.causes if cause.cause is Cause.DRAIN] == [2, 4, 6]


def test_a_wait_names_the_action_and_the_rank_it_waits_for() -> None:
    first = simulate(build("1f1b", 4, 8)).causes[0]
    assert (first.rank, str(first.before), str(first.waits_for), first.on_rank) == (0, "0B0", "1B0", 1)
    assert str(first) == "rank 0 idle 6 from 4: 0B0 waits for 1B0 of rank 1"


def test_latency_is_transfer_and_no_more_than_it_adds() -> None:
    still = simulate(Program.parse("0F0,0B0\n1F0,1B0"), Costs(comm=2))
    waits = [(cause.cause, cause.seconds) for cause in still.causes if cause.rank == 0]
    assert waits == [(Cause.WAIT, 5), (Cause.TRANSFER, 2)]


def test_blocking_transfers_are_transfer_on_both_ranks() -> None:
    costs = Costs(bytes_per_second=1, message_bytes=2, overlap=False)
    timeline = simulate(Program.parse("0F0,0F1\n1F0,1F1"), costs)
    by_rank = [[(idle.cause.value, idle.seconds) for idle in timeline.causes if idle.rank == rank] for rank in (0, 1)]
    assert by_rank == [
        [("transfer", 2), ("transfer", 2), ("drain", 1)],
        [("fill", 1), ("transfer", 2), ("transfer", 2)],
    ]


def test_a_heavy_stage_shows_as_imbalance_on_the_others() -> None:
    heavy = simulate(
        build("1f1b", 4, 8), Costs(forward=[2, 1, 1, 1], backward_input=[2, 1, 1, 1], backward_weight=[2, 1, 1, 1])
    )
    imbalance = [0.0] * 4
    for cause in heavy.causes:
        if cause.cause is Cause.IMBALANCE:
            imbalance[cause.rank] += cause.seconds
    assert imbalance[0] == 0
    assert min(imbalance[1:]) > 10


def test_a_long_microbatch_shows_as_imbalance() -> None:
    timeline = simulate(build("1f1b", 2, 4), Costs(microbatch_factor=[1, 1, 4, 1]))
    assert seconds_by_cause(timeline.causes)["imbalance"] > 0


def test_a_memory_limit_is_blamed_where_a_forward_was_ready_and_forbidden() -> None:
    timeline = simulate(build("1f1b", 4, 8))
    limited = [idle for idle in attribute(timeline, Limit(max_activations=4)) if idle.cause is Cause.MEMORY]
    assert [(idle.rank, idle.start, idle.end) for idle in limited if idle.start < 20] == [(0, 4, 10)]
    assert not [idle for idle in attribute(timeline, Limit(max_activations=99)) if idle.cause is Cause.MEMORY]


def test_a_byte_limit_is_blamed_likewise() -> None:
    timeline = simulate(build("1f1b", 4, 8), Costs(activation_bytes=10))
    limited = [idle for idle in attribute(timeline, Limit(max_bytes=45)) if idle.cause is Cause.MEMORY]
    assert [(idle.rank, idle.start, idle.end) for idle in limited if idle.start < 20] == [(0, 4, 10)]


def test_a_gradient_exchange_at_the_end_is_transfer() -> None:
    timeline = simulate(Program.parse("0F0,0B0,0REDUCE_GRAD"), Costs(reduce=4))
    assert [(cause.cause, cause.seconds) for cause in timeline.causes] == [(Cause.TRANSFER, 4)]


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_has_its_words(cause: Cause) -> None:
    assert "rank 2" in str(Idle(2, 0.0, 1.0, cause))


def test_a_rank_that_moves_messages_itself_names_them() -> None:
    costs = Costs(bytes_per_second=2, message_bytes=1, overlap=False)
    timeline = simulate(build("1f1b", 2, 2), costs)
    assert str(timeline.causes[0]) == "rank 0 idle 0.5 from 1: the rank itself is busy with 0SEND_F0"
