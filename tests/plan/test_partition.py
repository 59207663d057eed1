"""`partition`: no cut is better, with and without a memory limit."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chains import FLUSHED, cuts, rank_bytes, stage_seconds
from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.errors import PlanError
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from drumline.plan.cut.chain import BlockCosts
from drumline.plan.cut.partition import Partition, partition
from drumline.plan.cut.peaks import held_by
from matrices import examples, long
from programs import build, programs
from refused import refused

blocks = st.builds(
    BlockCosts,
    seconds=st.integers(0, 20),
    activation_bytes=st.integers(0, 20),
    held_until_weight_bytes=st.none() | st.integers(0, 30),
    start_bytes=st.integers(0, 5),
    static_bytes=st.integers(0, 30),
)
tied_blocks = st.builds(
    lambda block, tied: replace(
        block, static_bytes=block.static_bytes + sum(size for _, size in tied), tied=tuple(sorted(tied))
    ),
    blocks,
    st.frozensets(st.sampled_from([("a", 7), ("b", 11)])),
)


def quality(
    chain: list[BlockCosts], counts: tuple[int, ...], program: Program | None = None
) -> tuple[float, float | int]:
    seconds = stage_seconds(chain, counts)
    evenness = sum(duration**2 for duration in seconds)
    if program is None:
        return max(seconds), evenness
    forwards = [(rank, part.stage) for rank, row in enumerate(program.rows) for action in row for part in action.work
                if part.op is Op.FORWARD]  # fmt: skip
    ranks = [sum(seconds[stage] for rank, stage in forwards if rank == number) for number in range(program.num_ranks)]
    return max(ranks) / program.num_microbatches, evenness


def assert_covers(found: Partition, chain: list[BlockCosts], num_stages: int) -> None:
    assert len(found.counts) == num_stages
    assert sum(found.counts) == len(chain)
    assert min(found.counts) >= 1
    assert found.seconds == stage_seconds(chain, found.counts)


@long
@pytest.mark.slow
@settings(max_examples=examples(500))
@given(st.lists(blocks, min_size=1, max_size=9), st.data())
def test_no_cut_has_a_shorter_largest_stage_or_is_more_even(chain: list[BlockCosts], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(chain)))
    found = partition(chain, num_stages)
    assert_covers(found, chain, num_stages)
    assert found.is_exact
    assert quality(chain, found.counts) == min(quality(chain, cut) for cut in cuts(len(chain), num_stages))


@long
@pytest.mark.slow
@settings(deadline=None, max_examples=examples(100))
@given(programs(FLUSHED, max_ranks=3, max_microbatches=5), st.data())
def test_within_a_limit_no_cut_that_fits_is_better(program: Program, data: st.DataObject) -> None:
    num_stages, held = program.num_stages, held_by(program)
    chain = data.draw(st.lists(blocks | tied_blocks, min_size=num_stages, max_size=num_stages + 3))
    sizes = {cut: max(rank_bytes(chain, cut, held)) for cut in cuts(len(chain), num_stages)}
    limit = data.draw(st.sampled_from(sorted(sizes.values())))
    found = partition(chain, num_stages, held_pairs=held, max_bytes=limit)
    assert_covers(found, chain, num_stages)
    assert found.is_exact
    assert found.rank_bytes == rank_bytes(chain, found.counts, held)
    assert max(found.rank_bytes) <= limit
    best = min(quality(chain, entry, program) for entry, size in sizes.items() if size <= limit)
    assert quality(chain, found.counts, program) == pytest.approx(best)


@settings(deadline=None)
@given(programs(FLUSHED, max_ranks=3, max_microbatches=5), st.data())
def test_no_cut_has_a_shorter_largest_rank(program: Program, data: st.DataObject) -> None:
    num_stages = program.num_stages
    chain = data.draw(st.lists(blocks, min_size=num_stages, max_size=num_stages + 3))
    found = partition(chain, num_stages, held_pairs=held_by(program))
    assert_covers(found, chain, num_stages)
    assert found.is_exact
    best = min(quality(chain, cut, program) for cut in cuts(len(chain), num_stages))
    assert quality(chain, found.counts, program) == pytest.approx(best)


def test_ranks_of_a_v_are_even_where_its_stages_cannot_be() -> None:
    chain = [BlockCosts(1.0)] * 8 + [BlockCosts(4.0)]
    assert partition(chain, 4, held_pairs=held_by(build("zb-v", 2, 4))).counts == (2, 3, 3, 1)


def test_a_stage_in_two_directions_counts_by_its_share_on_each_rank() -> None:
    chain = [BlockCosts(1.0)] * 8 + [BlockCosts(6.0)]
    assert partition(chain, 4, held_pairs=held_by(build("chimera", 4, 4))).counts == (
        1,
        3,
        4,
        1,
    )  # (1 + 6) / 2, (3 + 4) / 2
    assert partition(chain, 4).counts == (2, 3, 3, 1)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(100))
@given(programs(FLUSHED, max_ranks=3, max_microbatches=5), st.data())
def test_a_limit_that_nothing_fits_names_the_smallest_that_would_do(program: Program, data: st.DataObject) -> None:
    num_stages, held = program.num_stages, held_by(program)
    chain = data.draw(st.lists(blocks | tied_blocks, min_size=num_stages, max_size=num_stages + 3))
    smallest = min(max(rank_bytes(chain, cut, held)) for cut in cuts(len(chain), num_stages))
    with refused(PlanError, expected=f"max_bytes={math.ceil(smallest)} or more", fix="use more ranks") as caught:
        partition(chain, num_stages, held_pairs=held, max_bytes=smallest - 1)
    assert caught.value.smallest_bytes == smallest
    assert partition(chain, num_stages, held_pairs=held, max_bytes=smallest).is_exact


@settings(deadline=None)
@given(programs(FLUSHED), st.data())
def test_a_ranks_bytes_are_the_simulators_peak(program: Program, data: st.DataObject) -> None:
    stages = program.num_stages
    per_stage = st.lists(st.integers(0, 9), min_size=stages, max_size=stages)
    full, until, weight = data.draw(per_stage), data.draw(per_stage), data.draw(per_stage)
    chain = [
        BlockCosts(1.0, activation_bytes=a, held_until_weight_bytes=u, static_bytes=w)
        for a, u, w in zip(full, until, weight, strict=True)
    ]
    costs = Costs(activation_bytes=full, held_until_weight_bytes=until, weight_bytes=weight)
    assert rank_bytes(chain, [1] * stages, held_by(program)) == simulate(program, costs).peak_bytes


def test_a_heavy_head_stands_alone() -> None:
    chain = [BlockCosts(1.0)] * 12 + [BlockCosts(10.0)]
    assert partition(chain, 2).counts == (11, 2)
    assert partition(chain, 3).counts == (6, 6, 1)


def test_what_a_stage_receives_counts_where_it_begins() -> None:
    held = held_by(build("gpipe", 2, 3))
    chain = [BlockCosts(1.0), BlockCosts(1.0, start_bytes=100), BlockCosts(1.0, start_bytes=1), BlockCosts(1.0)]
    assert partition(chain, 2, held_pairs=held).counts == (2, 2)
    assert rank_bytes(chain, (1, 3), held) == (0, 300)
    assert rank_bytes(chain, (2, 2), held) == (0, 3)


def test_stages_that_share_a_rank_share_its_memory() -> None:
    held = held_by(build("interleaved-1f1b", 2, 2, 2))
    chain = [BlockCosts(1.0, static_bytes=size) for size in (6, 1, 6, 1, 6, 1)]
    free, tight = (partition(chain, 4, held_pairs=held, max_bytes=limit) for limit in (100, 12))
    assert (free.counts, free.rank_bytes) == ((1, 1, 2, 2), (13, 8))
    assert (tight.counts, tight.rank_bytes) == ((1, 1, 1, 3), (12, 9))


def test_a_tied_weight_counts_once_on_every_rank() -> None:
    chain = [BlockCosts(1.0, static_bytes=size, tied=tied) for size, tied in ((11, (("a", 10.0),)), (1, ()))] * 2
    assert rank_bytes(chain, (2, 2), held_by(build("1f1b", 2, 2))) == (12, 12)
    assert rank_bytes(chain, (3, 1), held_by(build("1f1b", 2, 2))) == (13, 1)
    assert rank_bytes(chain, (1, 1, 1, 1), held_by(build("interleaved-1f1b", 2, 2, 2))) == (12, 2)


def test_a_search_that_is_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_by(build("interleaved-1f1b", 2, 2, 2))
    chain = [BlockCosts(1.0, static_bytes=size) for size in (6, 1, 6, 1, 6, 1)]
    monkeypatch.setattr("drumline.plan.cut.partition._MAX_NODES", 5)
    found = partition(chain, 4, held_pairs=held, max_bytes=12)
    assert not found.is_exact
    assert_covers(found, chain, 4)
    assert max(found.rank_bytes or ()) <= 12
    with refused(PlanError, "no cut was found of 6 blocks into 4 stages"):
        partition(chain, 4, held_pairs=held, max_bytes=5)


def test_two_hundred_blocks_take_no_more_steps_than_they_did() -> None:
    chain = [BlockCosts(1.0 + at % 7, activation_bytes=at % 5, static_bytes=3) for at in range(200)]
    held, lines = held_by(build("1f1b", 16, 32)), 0

    def count(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        nonlocal lines
        lines += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        found = partition(chain, 16, held_pairs=held, max_bytes=10_000)
    finally:
        sys.settrace(before)
    assert 200 < lines < 30_000  # of Python; with a step for every pair of blocks and stage there would be 300,000
    assert_covers(found, chain, 16)


@pytest.mark.parametrize(("num_stages", "mend"), [(0, "^$"), (3, "use fewer ranks or fewer stages")])
def test_counts_that_make_no_sense_are_refused(num_stages: int, mend: str) -> None:
    expected = "at least one block per stage, and at least one stage"
    with refused(PlanError, f"2 blocks cannot fill {num_stages} stages", expected=expected, fix=mend):
        partition([BlockCosts(1.0)] * 2, num_stages)


def test_a_limit_needs_to_know_what_is_held() -> None:
    with refused(PlanError, "max_bytes needs held"):
        partition([BlockCosts(1.0)] * 2, 2, max_bytes=10)
    with refused(PlanError, r"held covers the stages \[0, 1\]"):
        partition([BlockCosts(1.0)] * 3, 3, held_pairs=held_by(build("1f1b", 2, 2)), max_bytes=10)
