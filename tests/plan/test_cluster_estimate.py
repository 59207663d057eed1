"""Estimates for a cluster: more hardware never hurts, memory adds up, and bad layouts are refused."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cluster_models import activation_bytes, num_parameters
from drumline.core.errors import DrumlineError, PlanError
from drumline.plan.cluster.device_memory import fixed_bytes, peak_bytes
from drumline.plan.cluster.estimate import Estimate, estimate, least_seconds, recomputed_seconds
from drumline.plan.cluster.hardware import MACHINES, Cluster, Device, DeviceLink, cluster
from drumline.plan.cluster.kernels import CONTENTION, product_seconds
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.loads import data_exchange, exchanging
from drumline.plan.cluster.models import model
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.stages import even_counts
from drumline.plan.cluster.transformer import ExpertShape, Transformer
from drumline.plan.layouts.pins import Pins, tried_schedules
from drumline.plan.layouts.space import layouts
from drumline.schedules import find
from matrices import examples
from published_runs import MEGATRON_2022
from refused import refused, saying
from some import some

DENSE = Transformer("dense", 32, 4096, 32, 32000, 2048, 8, 11008, gated=True, tied=False, dropout=False)
SPARSE = replace(DENSE, name="sparse", experts=ExpertShape(16, 2, 4096, 1), num_dense_layers=2)
POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def cases(draw: st.DrawFn) -> tuple[Transformer, Cluster, Layout]:
    """Return a model, a cluster and a layout that fits it."""
    transformer = draw(st.sampled_from([DENSE, SPARSE]))
    schedule, virtual = draw(
        st.sampled_from([("1f1b", 1), ("gpipe", 1), ("interleaved-1f1b", 2), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2)])
    )
    layout = Layout(
        batch=draw(st.sampled_from([64, 128])),
        microbatch=draw(st.sampled_from([1, 2])),
        tensor=draw(POWERS),
        pipeline=draw(st.sampled_from([1, 2, 4])),
        data=draw(POWERS),
        context=draw(st.sampled_from([1, 2])),
        stages_per_rank=virtual,
        schedule=schedule,
        zero=draw(st.integers(0, 3)),
        sequence_parallel=draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        practice=draw(
            st.builds(
                Practice,
                flash_attention=st.booleans(),
                overlap_tensor=st.booleans(),
                overlap_pipeline=st.booleans(),
                overlap_data=st.booleans(),
                scatter_gather=st.booleans(),
            )
        ),
    )
    if transformer is SPARSE:
        layout = replace(layout, expert=draw(st.sampled_from([1, layout.data * layout.context])))
    name = draw(st.sampled_from(["a100-80", "h100", "b200"]))
    return transformer, cluster(name, layout.num_devices), layout


def numbers(found: Estimate) -> list[float]:
    return [
        *asdict(found.seconds).values(),
        *asdict(found.bytes).values(),
        *asdict(found.volumes).values(),
        found.flops_per_device,
        found.bubble,
    ]


@settings(deadline=None, max_examples=examples(50))
@given(cases())
def test_everything_is_finite_and_nothing_is_negative(case: tuple[Transformer, Cluster, Layout]) -> None:
    found = estimate(*case)
    assert all(some(math.isfinite(value) and value >= 0 for value in numbers(found)))
    assert 0 <= found.bubble < 1
    assert 0 < found.flops_per_second < case[1].device.flops_per_second
    assert found.seconds.total == pytest.approx(sum(asdict(found.seconds).values()))


@settings(deadline=None, max_examples=examples(30))
@given(cases(), st.sampled_from(["intra_node", "inter_node"]), st.floats(1.0, 8.0))
def test_more_bandwidth_is_never_slower(case: tuple[Transformer, Cluster, Layout], which: str, factor: float) -> None:
    transformer, machines, layout = case
    link = getattr(machines, which)
    faster = replace(link, bytes_per_second=link.bytes_per_second * factor)
    slow, fast = estimate(*case), estimate(transformer, replace(machines, **{which: faster}), layout)
    # Less waiting for tensors hides less of ZeRO 2 and 3: where that moves from I to W, a bubble can grow a little.
    assert fast.seconds.total <= slow.seconds.total * (1.02 if layout.zero >= 2 else 1 + 1e-9)
    assert fast.bytes == slow.bytes


@settings(deadline=None, max_examples=examples(30))
@given(cases(), st.sampled_from(["flops_per_second", "memory_bytes_per_second"]), st.floats(1.0, 8.0))
def test_a_faster_device_is_never_slower(case: tuple[Transformer, Cluster, Layout], which: str, factor: float) -> None:
    transformer, machines, layout = case
    assume(not layout.practice.overlap_data and not layout.practice.overlap_tensor)  # it hides less
    faster = replace(machines.device, **{which: getattr(machines.device, which) * factor})
    found = estimate(transformer, replace(machines, device=faster), layout).seconds.total
    assert found <= estimate(*case).seconds.total * (1 + 1e-9)


@settings(deadline=None, max_examples=examples(30))
@given(cases())
def test_what_saves_memory_never_takes_more_of_it(case: tuple[Transformer, Cluster, Layout]) -> None:
    transformer, machines, layout = case

    def held(**change: Any) -> Any:
        return estimate(transformer, machines, replace(layout, **change)).bytes

    by_zero = [held(zero=zero).total for zero in range(3)]
    assert by_zero == sorted(by_zero, reverse=True)
    assert held(zero=3).weights <= held(zero=2).weights
    by_recompute = [held(recompute=kind).activations for kind in ("none", "selective", "full")]
    assert by_recompute == sorted(by_recompute, reverse=True)
    assert held(sequence_parallel=True).activations <= held(sequence_parallel=False).activations


@settings(deadline=None, max_examples=examples(30))
@given(cases())
def test_overlapping_and_fusing_never_cost_time(case: tuple[Transformer, Cluster, Layout]) -> None:
    item, machines, layout = case

    def seconds(**change: Any) -> float:
        return estimate(item, machines, replace(layout, practice=replace(layout.practice, **change))).seconds.total

    for name in ("overlap_tensor", "overlap_data", "duplex"):
        assert seconds(**{name: True}) <= seconds(**{name: False}) * (1.02 if layout.zero >= 2 else 1 + 1e-9)
    if not layout.practice.overlap_data:  # a longer W would hide more of the gradients' exchange
        assert seconds(accumulation_bytes=0) <= seconds(accumulation_bytes=10) * 1.001


@settings(deadline=None, max_examples=examples(12))
@given(cases())
def test_the_formula_is_near_the_simulator(case: tuple[Transformer, Cluster, Layout]) -> None:
    assume(case[2].num_microbatches >= 2 * case[2].pipeline and case[2].zero < 2)
    assert estimate(*case).seconds.total == pytest.approx(estimate(*case, exact=True).seconds.total, rel=0.05)


def test_all_devices_together_hold_the_model_once() -> None:
    layout = Layout(batch=64, tensor=4, pipeline=4, data=2, zero=3)
    weights = estimate(DENSE, cluster("a100-80", 32), layout).bytes.weights
    assert num_parameters(DENSE) * 2 / 32 <= weights <= 1.2 * num_parameters(DENSE) * 2 / 32


@pytest.mark.parametrize(
    ("schedule", "virtual", "microbatches"),
    [("1f1b", 1, 8), ("interleaved-1f1b", 2, 11 / 2), ("zb-h1", 1, 8), ("zb-v", 2, 8), ("gpipe", 1, 16)],
)
def test_activations_are_those_of_the_pairs_that_the_schedule_holds(
    schedule: str, virtual: int, microbatches: float
) -> None:
    ranks = 4 if virtual == 2 and schedule == "interleaved-1f1b" else 8
    layout = Layout(batch=16, pipeline=ranks, stages_per_rank=virtual, schedule=schedule)
    found = estimate(DENSE, cluster("a100-80", ranks), layout).bytes.activations
    assert found == pytest.approx(microbatches * DENSE.num_layers / ranks * activation_bytes(DENSE, layout))


def test_a_22b_model_without_flash_attention_holds_59_gib_of_activations_in_its_layers() -> None:
    gpt = Transformer("22B", num_layers=48, hidden=6144, num_heads=64, vocabulary=51200, sequence=2048)
    plain = Layout(batch=4, microbatch=4, tensor=8, practice=Practice(flash_attention=False))
    assert 48 * activation_bytes(gpt, plain) / 2**30 == pytest.approx(59.25)


def test_two_copies_of_every_stage_hold_twice_the_weights() -> None:
    plain, twice = (
        estimate(DENSE, cluster("h100", 4), Layout(batch=16, pipeline=4, schedule=name, counts=(8, 8, 8, 8)))
        for name in ("1f1b", "dualpipe")
    )
    assert twice.bytes.weights == pytest.approx(2 * plain.bytes.weights, rel=0.15)


def test_larger_products_reach_more_of_the_peak() -> None:
    device = MACHINES["a100-80"].device
    rates = [2 * n**3 / product_seconds(device, n, n, n) for n in (64, 256, 1024, 4096, 16384)]
    assert rates == sorted(rates)
    assert rates[0] < 0.01 * device.flops_per_second
    assert 0.75 * device.flops_per_second < rates[-1] < device.reach.product * device.flops_per_second


def test_a_thin_product_is_limited_by_memory() -> None:
    device = MACHINES["h100"].device
    seconds = product_seconds(device, 1, 8192, 8192)
    assert seconds >= 2 * 8192**2 / device.memory_bytes_per_second


def test_scattering_a_message_pays_between_nodes() -> None:
    layout = Layout(batch=64, tensor=8, pipeline=8, practice=MEGATRON_2022)
    whole = replace(layout, practice=replace(MEGATRON_2022, scatter_gather=False))
    parts, all_of_it = (estimate(model("gpt-175b"), cluster("a100-80", 64), plan) for plan in (layout, whole))
    assert parts.seconds.pipeline < 0.5 * all_of_it.seconds.pipeline
    assert parts.volumes.pipeline == all_of_it.volumes.pipeline / 8


def test_the_exchange_of_gradients_is_a_ring() -> None:
    link = DeviceLink(0.0, 1e9)
    machines = Cluster(Device("any", 1e15, 8e10, 2e12), 4, 1, link, link)
    layout = Layout(batch=4, data=4, practice=Practice(overlap_data=False))
    found = data_exchange(exchanging(machines, layout), (1e9, 0.0), 0.0, 0.0)
    assert found.once == pytest.approx(2 * 3 / 4 * 4)
    assert found.bytes == pytest.approx(2 * 3 / 4 * 4e9)
    sharded = data_exchange(exchanging(machines, replace(layout, zero=1)), (1e9, 0.0), 0.0, 0.0)
    assert sharded.once == pytest.approx(3 / 4 * (4 + 2))
    hidden = data_exchange(exchanging(machines, replace(layout, practice=Practice())), (1e9, 0.0), 1.0, 100.0)
    assert (hidden.forward, hidden.backward, hidden.once) == pytest.approx((0.0, 0.0, CONTENTION * 6))


def test_sharded_weights_are_gathered_for_every_microbatch() -> None:
    link = DeviceLink(0.0, 1e9)
    machines = Cluster(Device("any", 1e15, 8e10, 2e12), 4, 1, link, link)
    layout = Layout(batch=8, data=4, zero=3, practice=Practice(overlap_data=False))
    found = data_exchange(exchanging(machines, layout), (1e9, 0.0), 0.0, 0.0)
    assert (found.forward, found.backward, found.once) == pytest.approx((1.5, 1.5 + 3, 0))
    assert found.bytes == pytest.approx(2 * (1.5e9 + 1.5e9 + 3e9))


def test_a_pipeline_sends_less_than_sharded_weights_where_the_model_is_large() -> None:
    def ratio(name: str, *counts: int) -> float:
        large, machines = model(name), cluster("h100", 8)
        sharded, pipeline = Layout(batch=128, microbatch=16, data=8, zero=3), Layout(batch=128, pipeline=8)
        whole = estimate(large, machines, sharded).volumes.data
        return whole / estimate(large, machines, replace(pipeline, counts=counts)).volumes.pipeline

    assert ratio("llama-3-405b") > 40
    assert ratio("llama-3-8b", 4, 4, 4, 5, 5, 4, 4, 2) < ratio("llama-3-405b") / 10


def test_ends_get_fewer_layers_where_they_do_not_divide() -> None:
    assert even_counts(8, 4) == (2, 2, 2, 2)
    assert even_counts(7, 4) == (2, 2, 2, 1)
    assert even_counts(6, 4) == (1, 2, 2, 1)
    assert all(sum(even_counts(layers, 8)) == layers for layers in range(8, 40))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"data": 4},
            saying("tensor 2 x pipeline 2 x data 4 x context 1 need 16 devices", expected="8,", fix="use data 2"),
        ),
        (
            {"tensor": 16, "data": 1},
            saying("need 32 devices", expected="8,", fix="32 does not divide 8"),
        ),
        (
            {"batch": 15},
            saying("a batch of 15 does not split into data 2 x microbatch 1", expected="a multiple of 2", fix="use 14"),
        ),
        (
            {"microbatch": 16},
            saying(
                "a batch of 16 does not split into data 2 x microbatch 16", expected="a multiple of 32", fix="use 32"
            ),
        ),
        ({"pipeline": 0}, saying("pipeline is 0", expected="a whole number of 1 or more")),
        ({"tensor": 2.0}, saying("tensor is 2.0", expected="a whole number of 1 or more")),
        ({"zero": 4}, saying("zero is 4", expected="0, 1, 2 or 3")),
        ({"recompute": "ful"}, saying("recompute is 'ful'", fix=r"did you mean full\?")),
        ({"schedule": "1f1v"}, saying("unknown schedule '1f1v'", fix=r"did you mean 1f1b\?")),
        ({"schedule": "zb-v"}, saying("zb-v cannot use 1 stage per rank", expected="exactly 2 per rank")),
        ({"expert": 2}, saying("2 expert-parallel ranks cannot share the 0 experts of dense", expected="expert=1")),
        ({"expert": 3}, saying("3 expert-parallel ranks do not divide data 2 x context 1")),
        (
            {"counts": (16, 15)},
            saying(r"counts \(16, 15\) place 31 layers in 2 stages", expected="32 layers in 2 stages"),
        ),
        ({"counts": (32,)}, saying("32 layers in 1 stages", expected="32 layers in 2 stages")),
        (
            {"stages_per_rank": 17, "schedule": "interleaved-1f1b"},
            saying("dense has 32 layers for 34 stages", expected="at least one layer per stage"),
        ),
    ],
)
def test_a_contradictory_layout_is_refused(change: dict[str, object], message: dict[str, str]) -> None:
    layout = replace(Layout(batch=16, tensor=2, pipeline=2, data=2), **change)  # type: ignore[arg-type]
    with refused(DrumlineError, **message):
        estimate(DENSE, cluster("a100-80", 8), layout)


def test_heads_and_sequences_must_divide() -> None:
    odd = replace(DENSE, num_heads=30, num_key_value_heads=30, head_width=128)
    with refused(PlanError, "the number of heads of dense, 30, is not divisible by 4 tensor-parallel ranks"):
        estimate(odd, cluster("a100-80", 4), Layout(batch=4, tensor=4))
    with refused(PlanError, "2 ranks cannot share sequences of 2047 tokens"):
        estimate(replace(DENSE, sequence=2047), cluster("a100-80", 2), Layout(batch=4, context=2))


@pytest.mark.slow
def test_no_step_is_shorter_than_its_bound() -> None:
    ratios = []
    for name, stages in some(tried_schedules().items()):
        for ranks in (2, 3, 4):
            for count in (1, 2, 4, 12):
                layout = Layout(batch=count, pipeline=ranks, schedule=name, stages_per_rank=stages[0])
                suits = find(name).suits
                if suits is None or suits(ranks, count, stages[0]):
                    transformer, machines = replace(DENSE, num_layers=9), cluster("a100-80", ranks)
                    found = estimate(transformer, machines, layout, exact=True).seconds
                    bound = least_seconds(transformer, machines, layout)
                    assert bound.even <= found.total - found.bubble
                    ratios.append(bound.total / found.total)
    assert max(ratios) <= 1 + 1e-9
    assert min(ratios) > 0.6
    assert sum(ratios) / len(ratios) > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize("name", ["gpt-1.7b", "mixtral-8x7b"])
def test_quick_bounds_of_more_recomputation_and_more_sharding_hold(name: str, is_fp8: bool) -> None:
    transformer, machines = replace(model(name), num_layers=6), cluster("h100", 8)
    pins = Pins(precision="fp8" if is_fp8 else "bf16")
    compared = dict.fromkeys(("again", "zero", "fixed"), 0)
    for layout in some([*layouts(transformer, machines, 8, pins)][::7]):
        least = least_seconds(transformer, machines, layout)
        if layout.recompute != "none":
            plain = least_seconds(transformer, machines, replace(layout, recompute="none"))
            more = recomputed_seconds(transformer, machines, layout)
            assert plain.working + more <= least.total * (1 + 1e-9)
            compared["again"] += more > 0
        if layout.zero >= 2:
            assert least_seconds(transformer, machines, replace(layout, zero=1)).alone <= least.total * (1 + 1e-9)
            compared["zero"] += 1
        held = fixed_bytes(transformer, layout)
        assert all(held <= peak_bytes(transformer, replace(layout, recompute=how)) for how in ("none", "norms", "full"))
        compared["fixed"] += 1
    assert min(compared.values()) > 10


def test_even_work_is_no_more_than_any_schedule_does() -> None:
    heavy = replace(DENSE, num_layers=9, vocabulary=20 * DENSE.vocabulary)
    machines = cluster("a100-80", 2)
    even = least_seconds(heavy, machines, Layout(batch=8, pipeline=2)).even
    for name, stages in some(tried_schedules().items()):
        layout = Layout(batch=8, pipeline=2, schedule=name, stages_per_rank=stages[0])
        assert even <= estimate(heavy, machines, layout, exact=True).seconds.total
