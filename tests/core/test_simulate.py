"""The simulator's times, against a slow reference and by hand."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.core.action import Action, Op
from drumline.core.costs import Costs, Edge
from drumline.core.errors import CostsError
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.simulate import makespans, simulate
from drumline.core.timeline.timeline import Timeline
from matrices import examples
from programs import NAMES, build, costs_for, programs
from reference import reference_times
from refused import refused
from some import some


@settings(max_examples=examples(200))
@given(programs(), st.data())
def test_times_are_those_of_the_reference(program: Program, data: st.DataObject) -> None:
    costs = data.draw(costs_for(program))
    expected = reference_times(program, costs)
    timeline = simulate(program, costs)
    found = {part: (span.start, span.end) for span in timeline.spans() for part in span.action.work if part in expected}
    assert found == expected


@settings(max_examples=examples(60))
@given(programs(), st.data())
def test_spelling_communication_out_changes_no_time_where_receives_are_posted_ahead(
    program: Program, data: st.DataObject
) -> None:
    costs = data.draw(costs_for(program))
    ahead = program.num_microbatches * program.num_stages
    plain, spelled = simulate(program, costs), simulate(lower(program, ahead=ahead), costs)
    assert [track.starts for track in spelled.tracks] == [track.starts for track in plain.tracks]


@settings(max_examples=examples(40))
@given(programs(), st.data())
def test_a_late_receive_only_delays(program: Program, data: st.DataObject) -> None:
    costs = data.draw(costs_for(program))
    assert simulate(lower(program, ahead=1), costs).makespan >= simulate(program, costs).makespan


def test_a_receive_posted_late_delays_its_transfer() -> None:
    early = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    late = early.replace("1RECV_F0,1RECV_F1,1F0,1B0,1SEND_B0,1F1", "1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1")
    costs = Costs(bytes_per_second=1, message_bytes=1)
    first, second = (simulate(Program.parse(text), costs).tracks[1].starts[2] for text in (early, late))
    assert (first, second) == (5.0, 6.0)


@pytest.mark.parametrize("name", NAMES)
def test_one_by_one_and_all_at_once_agree(name: str) -> None:
    program = build(name, 4, 6)
    rng = np.random.default_rng(0)
    many = []
    for _ in range(5):
        forward, backward_input, backward_weight, comm = rng.uniform(0.5, 2.0, 4).tolist()
        many.append(Costs(forward, backward_input, backward_weight, comm=comm / 4))
    assert makespans(program, many).tolist() == pytest.approx([simulate(program, costs).makespan for costs in many])


def test_factors_multiply_the_actions_in_row_order() -> None:
    program = Program.parse("0F0,0B0\n1F0,1B0")
    factors = np.array([[1, 1, 1, 1], [3, 1, 1, 1], [1, 1, 1, 5]], dtype=float)
    assert makespans(program, Costs(), factors=factors).tolist() == [6, 8, 14]


def test_factors_reach_both_halves_of_an_overlapped_pair() -> None:
    program = Program.parse("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    factors = np.array([[1, 10, 1, 1], [1, 1, 10, 1]], dtype=float)
    assert makespans(program, Costs(), factors=factors).tolist() == [1 + 12 + 2, 1 + 21 + 2]


def test_links_serialise_their_transfers() -> None:
    costs = Costs(bytes_per_second=1, message_bytes=2)
    timeline = simulate(Program.parse("0F0,0F1\n1F0,1F1"), costs)
    assert [(transfer.start, transfer.end) for transfer in timeline.transfers] == [(1, 3), (3, 5)]
    assert list(timeline.tracks[1].starts) == [3, 5]


def test_latency_occupies_neither_rank_nor_link() -> None:
    timeline = simulate(Program.parse("0F0,0F1\n1F0,1F1"), Costs(comm=10))
    assert [(transfer.start, transfer.end) for transfer in timeline.transfers] == [(1, 11), (2, 12)]


def test_without_overlap_a_transfer_takes_both_ranks_time() -> None:
    costs = Costs(bytes_per_second=1, message_bytes=2, overlap=False)
    timeline = simulate(Program.parse("0F0,0F1\n1F0,1F1"), costs)
    assert list(timeline.tracks[0].starts) == [0, 3]
    assert list(timeline.tracks[1].starts) == [3, 6]
    assert [(span.start, span.end) for span in timeline.occupied[1]] == [(1, 3), (4, 6)]


def test_one_slow_edge_delays_only_what_crosses_it() -> None:
    program = Program.parse("0F0\n1F0\n2F0")
    timeline = simulate(program, Costs(edges={(1, 2): Edge(latency=7)}))
    assert [track.starts[0] for track in timeline.tracks] == [0, 1, 9]


def test_a_fused_pair_costs_its_sum_unless_said_otherwise() -> None:
    program = Program.parse("0F0,(0F1;0B0)OVERLAP_F_B,0B1")
    assert simulate(program).makespan == 1 + 3 + 2
    assert simulate(program, Costs(overlapped=2.5)).makespan == 1 + 2.5 + 2
    longer = Costs(overlapped=2, microbatch_factor=[1, 3])
    assert simulate(program, longer).makespan == 1 + 2 * 2 + 6


def test_recomputation_costs_a_forward_before_each_backward() -> None:
    program = build("gpipe", 4, 8)
    assert simulate(program, Costs(recompute=True)).makespan == (8 + 3) * (1 + 3)
    one_stage = simulate(build("zb-h1", 2, 2), Costs(recompute=[True, False]))
    assert one_stage.busy == (2 * 4, 2 * 3)


def test_an_update_takes_its_time_whatever_the_microbatch() -> None:
    program = build("pipedream", 1, 2)
    assert simulate(program, Costs(update=5, microbatch_factor=[2, 2])).makespan == 2 * (6 + 5)


def test_two_copies_exchange_when_both_are_ready() -> None:
    timeline = simulate(build("chimera", 2, 2), Costs(reduce=10))
    compute_end = max(track.ends[-1] for track in timeline.tracks)
    assert timeline.makespan > compute_end
    by_stage: dict[int, set[tuple[float, float]]] = {}
    for span in timeline.exchanges:
        by_stage.setdefault(span.action.stage, set()).add((span.start, span.end))
    assert all(some(len(times) == 1 for times in by_stage.values()))


BOTH_WAYS = (
    "0F0,1F1,1B1,0B0,0REDUCE_GRAD,1REDUCE_GRAD,0UPDATE1,1UPDATE1\n"
    "0F1,1F0,1B0,0B1,0REDUCE_GRAD,1REDUCE_GRAD,0UPDATE1,1UPDATE1"
)


def test_an_update_waits_for_its_exchange() -> None:
    timeline = simulate(Program.parse(BOTH_WAYS), Costs(reduce=5, update=1))
    assert timeline.makespan == 6 + 5 + 2
    assert [str(span.action) for span in timeline.critical_path][-3:] == ["0REDUCE_GRAD", "0UPDATE1", "1UPDATE1"]
    waiting = [cause for cause in timeline.causes if cause.rank == 0]
    assert [(idle.cause.value, idle.seconds) for idle in waiting] == [("transfer", 5)]


def test_exchanges_with_other_pipelines_go_one_after_the_other() -> None:
    program = Program.parse("0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD")
    spans = simulate(program, Costs(reduce=5)).exchanges
    assert [(span.action.stage, span.start, span.end) for span in spans] == [(1, 4, 9), (0, 9, 14)]
    spans = simulate(program, Costs(reduce=[5, 1])).exchanges
    assert [(span.action.stage, span.start, span.end) for span in spans] == [(1, 4, 5), (0, 6, 11)]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rank_copies_gradients_before_their_exchange_starts(overlap: bool) -> None:
    program = Program.parse("0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD")
    timeline = simulate(program, Costs(reduce=5, pack=[2, 3], overlap=overlap))
    assert timeline.tracks[0].starts == [0, 1, 2, 7]  # 1B0 ends at 4
    assert [(span.action.stage, span.start, span.end) for span in timeline.packing] == [(1, 4, 7), (0, 9, 11)]
    assert [(span.action.stage, span.start, span.end) for span in timeline.exchanges] == [(1, 7, 12), (0, 12, 17)]
    assert [(cause.cause.value, cause.seconds) for cause in timeline.causes][:1] == [("transfer", 3)]
    assert sum(cause.seconds for cause in timeline.causes) == pytest.approx(timeline.makespan - timeline.busy[0])


def test_a_wait_for_an_exchange_follows_the_copying() -> None:
    program = Program.parse("0F0,1F0,1B0,1REDUCE_GRAD,1WAIT_REDUCE_GRAD,0B0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD")
    timeline = simulate(program, Costs(reduce=5, pack=2))
    assert timeline.tracks[0].starts[-1] == 4 + 2 + 5
    assert timeline.makespan == 4 + 2 + 5 + 2 + 2 + 5


def test_every_step_has_an_exchange_of_its_own() -> None:
    program = Program.parse("0F0,0B0,0REDUCE_GRAD,0UPDATE0,0F1,0B1,0REDUCE_GRAD,0UPDATE1")
    assert simulate(program, Costs(reduce=5, update=1)).makespan == 2 * (3 + 5 + 1)


def test_the_critical_path_ends_with_the_exchange_where_that_ends_last() -> None:
    timeline = simulate(build("chimera", 4, 4), Costs(reduce=5))
    assert timeline.critical_path[-1].action.op is Op.REDUCE_GRAD
    assert timeline.critical_path[-1].end == timeline.end
    assert all(some("REDUCE_GRAD" in str(cause.waits_for) for cause in timeline.causes if cause.cause.value == "drain"))


def test_queue_depth_counts_from_the_making_on_whatever_the_link_does() -> None:
    slow = simulate(build("gpipe", 2, 4), Costs(message_bytes=10, bytes_per_second=1))
    assert slow.queue_depths[0, 1] == [(1, 1), (2, 2), (3, 3), (4, 4), (11, 3), (21, 2), (31, 1), (41, 0)]


def test_queue_depth_counts_messages_made_and_not_taken_up() -> None:
    timeline = simulate(Program.parse("0F0,0F1,0F2\n1F0,1F1,1F2"), Costs(forward=[1, 2]))
    assert timeline.queue_depths == {(0, 1): [(1, 0), (2, 1), (3, 1), (5, 0)]}


def test_the_queue_of_1f1b_is_bounded_by_the_ranks_behind_it() -> None:
    timeline = simulate(build("1f1b", 6, 24), Costs(forward=[1, 3, 1, 1, 1, 1]))
    deepest = {edge: max(depth for _, depth in curve) for edge, curve in timeline.queue_depths.items()}
    assert deepest.keys() == {pair for rank in range(5) for pair in ((rank, rank + 1), (rank + 1, rank))}
    assert deepest[0, 1] > 1
    assert all(deepest[rank, rank + 1] <= 6 - rank for rank in range(5))


@settings(max_examples=examples(100))
@given(programs(), st.data())
def test_the_critical_path_is_a_chain_as_long_as_the_makespan(program: Program, data: st.DataObject) -> None:
    costs = data.draw(costs_for(program, links=False))
    timeline = simulate(program, costs)
    path = timeline.critical_path
    assert path[0].start == timeline.start
    assert path[-1].end == max(track.ends[-1] for track in timeline.tracks)
    hops = [
        costs.edge(before.rank, after.rank).latency if before.rank != after.rank else 0.0
        for before, after in pairwise(path)
    ]
    assert [after.start - before.end for before, after in pairwise(path)] == hops
    assert sum(span.end - span.start for span in path) + sum(hops) == pytest.approx(path[-1].end - timeline.start)


def test_an_illegal_program_is_refused_with_every_violation() -> None:
    with pytest.raises(InvalidProgram) as caught:
        simulate(Program.parse("0B0,0F0\n1F0"))
    assert len(caught.value.violations) == 2
    with refused(InvalidProgram, "wait for each other"):
        simulate(Program.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))
    with pytest.raises(InvalidProgram):
        makespans(Program.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"), [Costs()])


def test_costs_that_do_not_fit_are_refused() -> None:
    program = build("1f1b", 2, 3)
    with refused(CostsError, "forward has 3 values"):
        simulate(program, Costs(forward=[1, 2, 3]))
    with refused(CostsError, "microbatch_factor has 2 values", expected="each of the 3 microbatches"):
        simulate(program, Costs(microbatch_factor=[1, 2]))
    with refused(CostsError, "edges has a link 9->0"):
        simulate(program, Costs(edges={(9, 0): Edge(1.0)}))
    with refused(CostsError, "factors has the shape"):
        makespans(program, Costs(), factors=np.ones((2, 3)))
    with refused(CostsError, "finite links"):
        makespans(program, [Costs(), Costs(bytes_per_second=1.0)])


def test_factors_give_every_action_seconds_of_its_own() -> None:
    program = Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")
    seconds = np.array([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    timeline = simulate(program, Costs(backward=1), factors=seconds)
    lengths = [end - start for track in timeline.tracks for start, end in zip(track.starts, track.ends, strict=True)]
    assert lengths == seconds.tolist()
    assert timeline.makespan == makespans(program, Costs(backward=1), factors=seconds[None])[0]
    assert timeline.balanced is not None  # unequal factors are an imbalance that the costs alone do not show
    assert timeline.balanced.busy == (18.0, 18.0)
    with refused(CostsError, "factors has the shape"):
        simulate(program, factors=np.ones(3))


def test_what_takes_no_time_does_not_begin_a_span() -> None:
    program = build("zb-v", 4, 8)
    gathers = [[Action(s, Op.UNSHARD) for s in program.placement.stages_of(rank)] for rank in range(4)]
    gathered = Program.of([[*first, *row] for first, row in zip(gathers, program.rows, strict=True)])
    plain, timeline = simulate(program), simulate(gathered)
    assert (timeline.span, timeline.span_bubble) == (plain.span, plain.span_bubble)
    assert [(gap.cause, gap.seconds) for gap in timeline.causes] == [(gap.cause, gap.seconds) for gap in plain.causes]


def test_messages_in_two_orders_are_refused_whatever_the_links() -> None:
    text = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F1,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1B1,1SEND_B1"
    for costs in (Costs(), Costs(bytes_per_second=1.0), Costs(bytes_per_second=1.0, overlap=False)):
        with refused(InvalidProgram, "the orders differ"):
            simulate(Program.parse(text), costs)


@settings(max_examples=examples(80))
@given(programs(), st.data())
def test_what_is_computed_on_arrays_is_what_a_plain_timeline_says(program: Program, data: st.DataObject) -> None:
    timeline = simulate(program, data.draw(costs_for(program)))
    plain = Timeline.__dict__
    for computed, expected in zip(timeline.latest_inputs, plain["latest_inputs"].func(timeline), strict=True):
        assert ends(timeline, computed) == ends(timeline, expected)
    assert timeline.columns.code.tolist() == plain["columns"].func(timeline).code.tolist()
    assert timeline.busy == plain["busy"].func(timeline)
    assert timeline.span == plain["span"].func(timeline)


def ends(timeline: Timeline, inputs: Sequence[tuple[int, int]]) -> list[float | None]:
    return [None if rank < 0 else timeline.tracks[rank].ends[index] for rank, index in inputs]


def test_an_exchange_with_other_pipelines_does_not_wait_for_one_between_copies() -> None:
    """Both ways over five ranks: all stages but the middle one have a copy, and the middle one has its own link."""
    program = Program.parse(
        "0F0,4F1,4B1,0B0,4REDUCE_GRAD,0REDUCE_GRAD\n"
        "1F0,3F1,3B1,1B0,3REDUCE_GRAD,1REDUCE_GRAD\n"
        "2F0,2F1,2B0,2B1,2REDUCE_GRAD\n"
        "1F1,3F0,3B0,1B1,3REDUCE_GRAD,1REDUCE_GRAD\n"
        "0F1,4F0,4B0,0B1,4REDUCE_GRAD,0REDUCE_GRAD"
    )
    timeline = simulate(program, Costs(reduce=3.0))
    (middle,) = (exchange for exchange in timeline.exchanges if exchange.rank == 2)
    done = max(timeline.tracks[2].ends)
    assert (middle.start, middle.end) == (done, done + 3.0)
