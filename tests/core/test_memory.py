"""What a rank holds at each moment, in pairs and in bytes."""

from __future__ import annotations

import pytest
from hypothesis import given

from drumline.core.costs import Costs
from drumline.core.memory import holdings, stage_bytes, weighed_holdings
from drumline.core.program import Program
from drumline.core.simulate.simulate import simulate
from programs import build, programs
from some import some


def peaks(program: Program, **costs: float) -> tuple[float, ...]:
    found = simulate(program, Costs(**costs)).peak_bytes  # type: ignore[arg-type]
    assert found is not None
    return found


@given(programs())
def test_nothing_is_held_after_the_last_action(program: Program) -> None:
    for holding in some(holdings(program, Costs(activation_bytes=3, held_until_weight_bytes=2, weight_bytes=5))):
        assert holding.pairs[-1][1] == 0
        assert holding.bytes is not None
        assert holding.bytes[-1][1] == holding.static_bytes


def test_1f1b_holds_min_of_M_and_P_minus_r() -> None:
    for ranks in range(1, 7):
        for microbatches in range(1, 9):
            expected = tuple(min(microbatches, ranks - rank) for rank in range(ranks))
            assert simulate(build("1f1b", ranks, microbatches)).peak_activations == expected


def test_in_an_overlapped_pair_the_forward_counts_before_the_backward() -> None:
    assert simulate(Program.parse("0F0,(0F1;0B0)OVERLAP_F_B,0B1")).peak_activations == (2,)


def test_inference_holds_one_pair_while_it_computes_it() -> None:
    assert simulate(build("forward-only", 3, 5)).peak_activations == (1, 1, 1)


def test_bytes_are_unknown_until_given() -> None:
    assert simulate(build("1f1b", 2, 2)).peak_bytes is None


def test_the_input_half_frees_what_only_it_needs() -> None:
    program = Program.parse("0F0,0I0,0F1,0I1,0W0,0W1")
    assert peaks(program, activation_bytes=10) == (20,)
    assert peaks(program, activation_bytes=10, held_until_weight_bytes=4) == (14,)


def test_longer_microbatches_hold_more() -> None:
    timeline = simulate(Program.parse("0F0,0F1,0B0,0B1"), Costs(activation_bytes=10, microbatch_factor=[1, 3]))
    assert timeline.peak_bytes == (40,)


def test_recomputation_keeps_the_checkpoint_and_pays_at_the_backward() -> None:
    program = build("gpipe", 1, 4)
    timeline = simulate(program, Costs(activation_bytes=100, checkpoint_bytes=10, recompute=True))
    assert timeline.peak_bytes == (4 * 10 + 90,)


def test_chimera_doubles_the_weights_not_the_activations() -> None:
    program, two = build("1f1b", 4, 4), build("chimera", 4, 4)
    assert peaks(two, weight_bytes=7)[0] == 2 * peaks(program, weight_bytes=7)[0]
    assert max(simulate(two).peak_activations) == max(simulate(program).peak_activations)


def test_pipedream_keeps_one_version_per_microbatch_in_flight() -> None:
    versions = [holding.peak_versions for holding in holdings(build("pipedream", 4, 12), Costs())]
    assert versions == [4, 3, 2, 1]
    assert peaks(build("pipedream", 4, 12), weight_bytes=10) == (40, 30, 20, 10)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 2), (4, 4), (4, 8), (3, 7)])
def test_2bw_keeps_two_versions_at_most(ranks: int, microbatches: int) -> None:
    program = build("pipedream-2bw", ranks, microbatches)
    assert max(holding.peak_versions for holding in holdings(program, Costs())) <= 2


def test_2bw_every_step_sees_the_weights_of_the_step_before() -> None:
    """W(t+1) = W(t) - lr * gradient(W(t-1)): forwards of step t stand behind exactly max(0, t-1) updates."""
    program = build("pipedream-2bw", 4, 5)
    for row in program.rows:
        updates = 0
        for action in some(row):
            if action.op.value == "UPDATE":
                updates += 1
            elif action.op.value == "F":
                assert updates == max(0, (action.microbatch or 0) // 5 - 1)


def test_a_second_gradient_buffer_appears_while_two_steps_accumulate() -> None:
    waits = Program.parse("0F0,0B0,0F1,0B1,0UPDATE0,0UPDATE1")
    at_once = Program.parse("0F0,0B0,0UPDATE0,0F1,0B1,0UPDATE1")
    assert peaks(waits, gradient_bytes=8) == (16,)
    assert peaks(at_once, gradient_bytes=8) == (8,)


def test_static_bytes_are_weights_gradients_and_optimizer_of_the_rank_s_stages() -> None:
    timeline = simulate(build("interleaved-1f1b", 2, 2), Costs(weight_bytes=[1, 2, 3, 4], optimizer_bytes=10))
    assert [holding.static_bytes for holding in timeline.memory] == [1 + 3 + 20, 2 + 4 + 20]


def test_stash_and_receive_buffers_are_reported_apart_from_parameters() -> None:
    costs = Costs(forward=[1, 3], activation_bytes=10, weight_bytes=7, message_bytes=3)
    timeline = simulate(build("gpipe", 2, 4), costs)
    assert timeline.peak_bytes == (47, 47)
    assert [holding.peak_stash_bytes for holding in timeline.memory] == [40, 40]
    # Made at 1, 2, 3, 4, taken up at 1, 4, 7, 10: when the last one is made, two wait and one is being taken up.
    assert timeline.peak_receive_bytes == (3, 9)


def test_weight_versions_are_not_stash() -> None:
    timeline = simulate(build("pipedream", 2, 6), Costs(activation_bytes=10, weight_bytes=100))
    assert [holding.peak_stash_bytes for holding in timeline.memory] == [20, 10]
    assert timeline.peak_bytes == (220, 110)


def test_gradients_kept_for_w_may_outweigh_what_i_frees() -> None:
    program = Program.parse("0F0,0I0,0W0")
    (holding,) = holdings(program, Costs(activation_bytes=10, held_until_weight_bytes=14))
    assert holding.bytes == [(10, 10), (14, 14), (14, 0)]


def test_what_only_runs_forwards_holds_neither_gradients_nor_optimizer_state() -> None:
    sizes = Costs(weight_bytes=7, gradient_bytes=5, optimizer_bytes=11, activation_bytes=2)
    timeline = simulate(build("forward-only", 2, 4), sizes)
    assert [holding.static_bytes for holding in timeline.memory] == [7, 7]
    assert timeline.peak_bytes == (9, 9)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
@pytest.mark.parametrize("recompute", [[False, False], [True, True], [True, False]])
def test_sizes_of_stages_are_found_again_in_what_was_held(name: str, recompute: list[bool]) -> None:
    program = build(name, 2, 4)
    costs = Costs(
        activation_bytes=[80, 60],
        held_until_weight_bytes=[30, 20] if name == "zb-h1" else None,
        recompute=recompute,
        checkpoint_bytes=[16, 8],
    )
    held = [[(int(a), int(b)) for a, b in holding.bytes or ()] for holding in holdings(program, costs)]
    found = Costs(**stage_bytes(program, held))
    assert found.recomputes(2) == tuple(recompute)
    assert found.per_stage("activation_bytes", 2) == (80, 60)
    assert [holding.bytes for holding in holdings(program, found)] == [item.bytes for item in holdings(program, costs)]
    assert [item.bytes for item in weighed_holdings(program, held)] == [item.bytes for item in holdings(program, costs)]
