"""What cuts and plans count once: tied weights, what a stage receives, equal plans."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from chains import rank_bytes
from drumline.core.errors import PlanError
from drumline.core.placement import Placement
from drumline.plan.cut.chain import BlockCosts
from drumline.plan.cut.partition import partition
from drumline.plan.cut.peaks import HeldPairs
from drumline.plan.device.blocks import OpTimes, Profile
from drumline.plan.device.combinations import reordered
from drumline.plan.device.planner import _chosen
from names import build
from profiles import layer
from refused import refused


def test_a_tied_weight_counts_once_in_a_stage_and_on_a_rank() -> None:
    tied = BlockCosts(1.0, static_bytes=100, tied=(("table", 90.0),))
    blocks = [tied, BlockCosts(1.0, static_bytes=10), tied]
    one_rank = HeldPairs(stages=(0, 1), moments=np.zeros((1, 2, 3)))
    assert rank_bytes(blocks, [2, 1], [one_rank]) == (210 - 90,)
    alone = [HeldPairs(stages=(stage,), moments=np.zeros((1, 1, 3))) for stage in (0, 1)]
    assert rank_bytes(blocks, [2, 1], alone) == (110, 100)
    assert partition(blocks, 1, held_pairs=[HeldPairs((0,), np.zeros((1, 1, 3)))], max_bytes=120).counts == (3,)
    with refused(PlanError, "within 119 bytes", expected="max_bytes=120 or more"):
        partition(blocks, 1, held_pairs=[HeldPairs((0,), np.zeros((1, 1, 3)))], max_bytes=119)
    # Within 110 bytes only a cut that leaves the table once on either side fits.
    found = partition(blocks, 2, held_pairs=alone, max_bytes=110)
    assert found.rank_bytes in ((110, 100), (100, 110))


def test_what_a_stage_received_is_held_with_every_pair() -> None:
    blocks = [BlockCosts(1.0, activation_bytes=10, start_bytes=start) for start in (0, 7, 3)]
    held = [HeldPairs(stages=(stage,), moments=np.array([[[2.0, 0.0, 0.0]]])) for stage in (0, 1)]
    assert rank_bytes(blocks, [1, 2], held) == (2 * 10, 2 * (20 + 7))
    assert rank_bytes(blocks, [2, 1], held) == (2 * 20, 2 * (10 + 3))


def test_of_equal_largest_stages_the_evenest_cut_is_taken() -> None:
    blocks = [BlockCosts(seconds) for seconds in (6, 1, 1, 1, 1, 1, 1)]
    assert partition(blocks, 3).counts == (1, 3, 3)


def test_of_two_copies_the_one_with_more_microbatches_decides() -> None:
    # Three of four microbatches go down: rank 0 runs most of stage 0, rank 1 most of stage 1.
    held = [
        HeldPairs(stages=(0, 1), moments=np.zeros((1, 2, 3)), shares=(0.75, 0.25)),
        HeldPairs(stages=(0, 1), moments=np.zeros((1, 2, 3)), shares=(0.25, 0.75)),
    ]
    blocks = [BlockCosts(seconds) for seconds in (4, 1, 1, 1, 1)]
    found = partition(blocks, 2, held_pairs=held)
    assert found.is_exact
    best = min(max(0.75 * left + 0.25 * (8 - left), 0.25 * left + 0.75 * (8 - left)) for left in (4.0, 5.0, 6.0, 7.0))
    left, right = found.seconds
    assert max(0.75 * left + 0.25 * right, 0.25 * left + 0.75 * right) == best


def test_a_tied_weight_is_free_only_on_ranks_that_hold_it_already() -> None:
    first, last = (replace(layer(name, 1.0), tied=(("table", 40, 40),)) for name in "ac")
    profile = Profile((first, layer("b", 1.0), last), OpTimes(0.0, 0.0, 0.0, 0.0), "cpu", 1)
    weights = [
        profile.costs((1, 1, 1), placement=place).per_stage("weight_bytes", 3) for place in (Placement.linear(3),)
    ]
    assert weights == [(50, 50, 50)]
    shared = Placement(2, (0, 1, 0))  # stages 0 and 2 are one rank's
    assert profile.costs((1, 1, 1), placement=shared).per_stage("weight_bytes", 3) == (50, 50, 10)
    assert profile.costs((1, 1, 1), placement=shared).per_stage("gradient_bytes", 3) == (50, 50, 10)


def test_ranks_play_the_parts_that_an_order_gives_them() -> None:
    program = build("1f1b", 3, 4)
    order = (1, 2, 0)
    found = reordered(program, order)
    assert all(found.rows[rank] == program.rows[part] for part, rank in enumerate(order))
    assert found.placement.homes == order


def candidate(seconds: float, peak: float, sent: float, *, searched: bool = False) -> Any:
    return SimpleNamespace(step_seconds=seconds, peak=peak, sent_bytes=sent, searched=searched)


def test_of_equal_plans_bytes_come_before_names_and_names_before_seconds() -> None:
    few, named = candidate(1.001, 10, 5, searched=True), candidate(1.0, 10, 6)
    assert _chosen(cast(Any, [few, named])) is few
    slower, found = candidate(1.002, 10, 5), candidate(1.0, 10, 5, searched=True)
    assert _chosen(cast(Any, [found, slower])) is slower
    light, heavy = candidate(1.005, 10, 9), candidate(1.0, 11, 1)
    assert _chosen(cast(Any, [heavy, light])) is light
    assert _chosen(cast(Any, [candidate(1.02, 1, 1), heavy])) is heavy
