"""What equal costs do not show: unequal links, factors, copies, steps and moments."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from drumline.core.costs import Costs, Edge
from drumline.core.measured.account import account
from drumline.core.measured.metrics import step_metrics
from drumline.core.measured.record import Record
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, makespans, simulate
from drumline.core.timeline.idle import Cause
from names import build
from records import PROGRAM, two_ranks
from some import some


def test_many_costs_keep_their_own_exchanges() -> None:
    program = build("chimera", 2, 2)
    many = [*(Costs(reduce=seconds) for seconds in (0, 5, 1)), *(Costs(pack=seconds) for seconds in (2, 0, 3))]
    assert makespans(program, many).tolist() == [simulate(program, costs).makespan for costs in many]


def test_a_link_given_for_one_direction_is_that_one_alone() -> None:
    program = Program.parse("0F0,0B0\n1F0,1B0")
    assert simulate(program, Costs(edges={(0, 1): Edge(latency=7)})).makespan == 6 + 7
    assert simulate(program, Costs(edges={(0, 1): Edge(latency=7), (1, 0): Edge(latency=2)})).makespan == 6 + 7 + 2


def test_gradients_cross_the_boundary_before_their_stage() -> None:
    costs = Costs(message_bytes=[3, 5, 100], bytes_per_second=1)
    timeline = simulate(Program.parse("0F0,0B0\n1F0,1B0\n2F0,2B0"), costs)
    assert {str(transfer.action): transfer.num_bytes for transfer in timeline.transfers} == {
        "0SEND_F0": 3,
        "1SEND_F0": 5,
        "2SEND_B0": 5,
        "1SEND_B0": 3,
    }
    assert timeline.makespan == 3 * 3 + 2 * (3 + 5)


def test_a_step_with_measured_factors_is_balanced_by_those() -> None:
    program = build("1f1b", 2, 2)
    factors = np.ones(len(list(program.work())))
    assert simulate(program, factors=factors).balanced is None
    factors[0] = 5.0
    timeline = simulate(program, factors=factors)
    assert timeline.balanced is not None
    assert timeline.balanced.busy == pytest.approx((8, 8))  # F takes 2 on average
    assert Cause.IMBALANCE in {cause.cause for cause in timeline.causes}


@pytest.mark.parametrize("heavy", [(1.0, 4.0), (4.0, 1.0), (1.0, 2.0)])
@pytest.mark.parametrize("size", [0.25, 1.0, 2.0])
def test_a_gap_is_charged_no_more_imbalance_than_it_exceeds_an_equal_one(
    heavy: tuple[float, float], size: float
) -> None:
    costs = Costs(forward=heavy, message_bytes=size, bytes_per_second=1, overlap=False)
    timeline = simulate(build("1f1b", 2, 6), costs)
    for rank, gap, twin, imbalance in some(gaps(timeline)):
        assert imbalance <= max(gap - twin, 0.0) + 1e-9, f"rank {rank}"


def gaps(timeline: Simulation) -> list[tuple[int, float, float, float]]:
    """Return each gap before an action, that of the balanced twin, and what of it is called imbalance."""
    found = []
    twin = timeline.balanced
    assert twin is not None
    for rank, track in enumerate(timeline.tracks):
        for index in range(1, len(track.starts)):
            gap, equal = (i.tracks[rank].starts[index] - i.tracks[rank].ends[index - 1] for i in (timeline, twin))
            low, high = track.ends[index - 1], track.starts[index]
            inside = [idle for idle in timeline.causes if idle.rank == rank and low <= idle.start and idle.end <= high]
            found.append((rank, gap, equal, sum(idle.seconds for idle in inside if idle.cause is Cause.IMBALANCE)))
    return found


@pytest.mark.parametrize("forward", [(1.0, 4.0), (4.0, 1.0)])
def test_two_copies_exchange_once_both_have_their_gradients(forward: tuple[float, float]) -> None:
    timeline = simulate(build("chimera", 2, 3), Costs(forward=forward, reduce=2))
    last = {
        stage: max(
            end
            for track in timeline.tracks
            for action, end in zip(track.actions, track.ends, strict=True)
            if action.stage == stage
        )
        for stage in (0, 1)
    }
    assert len(timeline.exchanges) == 4
    assert all(span.start >= last[span.action.stage] for span in timeline.exchanges)


def test_a_recomputed_stage_holds_all_from_its_input_half_on() -> None:
    program = Program.parse("0F0,0F1,0I0,0W0,0I1,0W1")
    costs = Costs(activation_bytes=100, checkpoint_bytes=10, recompute=True)
    held = simulate(program, costs).memory[0].bytes
    assert held == [(10, 10), (20, 20), (110, 110), (110, 10), (100, 100), (100, 0)]
    freed = replace(costs, held_until_weight_bytes=40)
    assert simulate(program, freed).memory[0].bytes == [(10, 10), (20, 20), (110, 50), (50, 10), (100, 40), (40, 0)]


def test_a_gradient_buffer_is_one_from_the_first_gradient_to_the_update() -> None:
    program = Program.parse("0F0,0F1,0B0,0B1,0UPDATE1,0F2,0F3,0B2,0B3,0UPDATE3")
    assert simulate(program, Costs(gradient_bytes=8)).peak_bytes == (8,)


def test_a_device_waits_for_a_message_no_earlier_than_it_is_free() -> None:
    moved = [1, 1, 0, 1, 0, 60, 62, 70, 70, 71, 64]  # needed by the second action, made at 60 on rank 0
    record = Record(1, begin_ns=0, end_ns=100, on_device=1, starts=[20, 80], ends=[50, 95], messages=moved)
    told = [(piece.start, piece.end, str(piece.doing)) for piece in account(record, lambda rank, moment: moment)]
    assert told == [
        (0, 20, "nothing"),
        (20, 50, "compute"),
        (50, 60, "stream wait"),
        (60, 70, "stream flight"),
        (70, 71, "take"),
        (71, 80, "stream flight"),
        (80, 95, "compute"),
        (95, 100, "nothing"),
    ]


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_for_data_is_that_of_the_rank_that_waited_longest(rank: int) -> None:
    records = list(two_ranks())
    for at, waited in ((rank, 300), (1 - rank, 100)):
        begin = records[at].begin_ns
        records[at] = replace(records[at], since_ns=begin - 400, between=[5, begin - 400, begin - 400 + waited])
    assert step_metrics(PROGRAM, records)["time_metrics/data_loading(s)"] == pytest.approx(300e-9)


@pytest.mark.parametrize("pair", ["(0F1;1B0)OVERLAP_F_B", "(1B0;0F1)OVERLAP_F_B"])
def test_a_fused_pair_of_two_stages_costs_what_the_forwards_says(pair: str) -> None:
    program = Program.parse(f"0F0,1F0,{pair},0B0,1F1,1B1,0B1")
    assert simulate(program, Costs(overlapped=[5, 50])).makespan == 1 + 1 + 5 + 2 + 1 + 2 + 2
    factors = Costs(overlapped=[5, 50], microbatch_factor=[1, 3])
    assert simulate(program, factors).makespan == 1 + 1 + 5 * 2 + 2 + 3 + 6 + 6
