"""Slices of sequences in plans of clusters: priced by slice, as good as brute force, and left out where M is large."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from drumline.cli.main import main
from drumline.core.action import Action, Op
from drumline.core.errors import PlanError
from drumline.core.program import Program
from drumline.plan.cluster.device_memory import device_bytes, stage_activations
from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.hardware import Cluster, cluster
from drumline.plan.cluster.kernels import operation_times, slice_ops
from drumline.plan.cluster.layers import layers_of
from drumline.plan.cluster.layout import Layout, StageLayers
from drumline.plan.cluster.models import model
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.stages import alike, layer_counts
from drumline.plan.cluster.transformer import Details, LatentAttention, Transformer
from drumline.plan.launch.launch import launch
from drumline.plan.layouts.explain import brief, explain
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import plan
from drumline.plan.layouts.software import software
from drumline.plan.layouts.what_if import changes
from drumline.plan.slices.layout_bounds import Line, LineBounds, SliceSchedule
from drumline.plan.slices.layout_estimate import SlicedLayout
from drumline.plan.slices.layout_times import AGAIN, BY_INPUT, BY_WEIGHT, FORWARD, slice_seconds
from drumline.report.plan.page import plan_page
from drumline.report.plan.text import plan_text
from drumline.schedules import generate
from refused import refused
from train_configs import read_train_config

LONG = Transformer(
    "long",
    8,
    2048,
    16,
    vocabulary=32000,
    sequence=16384,
    num_key_value_heads=4,
    feedforward=5632,
    gated=True,
    tied=False,
    learned_positions=False,
    biased=False,
    dropout=False,
)
GIB = 2**30
ONE_LINE = Pins(tensor=1, context=1)


def machines(num_devices: int = 4, memory: float = 80 * GIB) -> Cluster:
    known = cluster("h100", num_devices)
    return replace(known, device=replace(known.device, memory_bytes=memory))


# ---- a reference: prices operation by operation, and a walk along the rows of a program ------------------------------


def hand_priced(transformer: Transformer, machine: Cluster, layout: Layout, number: int) -> list[float]:
    """Return F, again, I and W of a layer for a slice, from its operations and the pairs that its queries see."""
    length = transformer.sequence // layout.slices
    start, end = number * length, (number + 1) * length
    unit, share, sums = replace(transformer, sequence=length), replace(layout, slices=1).share, [0.0, 0.0, 0.0]
    for operation in layers_of(unit, share)[0].operations:
        if operation.name == "attention":
            pairs = (end * end - start * start) / (length * length)
            operation = operation._replace(flops=(pairs * operation.flops[0], pairs * operation.flops[1]))
        times = operation_times(machine, share, operation)
        sums = [
            total + more for total, more in zip(sums, (times.forward, times.by_input, times.by_weight), strict=True)
        ]
    reach = machine.device.reach
    rate, launches = machine.device.memory_bytes_per_second * reach.memory, 2 * reach.launch_seconds
    keys = 2 * layout.microbatch * 2 * transformer.head_width * transformer.num_key_value_heads  # bytes of a token
    if number:  # keys and values of all slices up to its own are read and written; so are its own gradients
        joined = 2 * keys * end / rate + launches
        sums[0] += joined
        sums[1] += joined + 2 * keys * length / rate + launches
    if number < layout.slices - 1:  # what later slices owe is added
        sums[1] += 3 * keys * end / rate + launches
    forward, by_input, by_weight = (max(seconds, layout.practice.host_seconds) for seconds in sums)
    return [forward, forward if layout.recompute == "full" else 0.0, by_input, by_weight]


def priced(transformer: Transformer, machine: Cluster, layout: Layout) -> list[list[list[float]]]:
    """Return F, again, I and W by stage and slice."""
    unit = replace(transformer, sequence=transformer.sequence // layout.slices)
    layers = [hand_priced(transformer, machine, layout, number) for number in range(layout.slices)]
    last, stages = len(layout.counts) - 1, []
    for stage, count in enumerate(layout.counts):
        ends = slice_ops(unit, machine, layout.share, StageLayers(0, 0, stage == 0, stage == last))
        stages.append([[count * own + end.total for own, end in zip(each, ends, strict=True)] for each in layers])
    return stages


PASSES = {
    Op.FORWARD: (FORWARD,),
    Op.BACKWARD: (AGAIN, BY_INPUT, BY_WEIGHT),
    Op.BACKWARD_INPUT: (AGAIN, BY_INPUT),
    Op.BACKWARD_WEIGHT: (BY_WEIGHT,),
}


def needs(action: Action, last: int) -> list[tuple[int, Op, int]]:
    """Return the actions that one waits for, by stage, op and unit."""
    stage, op, unit = action.stage, action.op, int(action.microbatch or 0)
    if op is Op.FORWARD:
        return [(stage - 1, op, unit)] if stage else []
    if op is Op.BACKWARD_WEIGHT:
        return [(stage, Op.BACKWARD_INPUT, unit)]
    return [(stage, Op.FORWARD, unit), *([(stage + 1, op, unit)] if stage < last else [])]


def walked(program: Program, seconds: list[list[list[float]]], hop: float) -> float:
    """Return when the last action ends."""
    home = {action.stage: rank for rank, row in enumerate(program.rows) for action in row}
    ended, free, waiting = (
        dict[tuple[int, Op, int], float](),
        [0.0] * len(program.rows),
        [list(r) for r in program.rows],
    )
    while any(waiting):
        before = len(ended)
        for rank, row in enumerate(waiting):
            while row and all(need in ended for need in needs(row[0], program.num_stages - 1)):
                action = row.pop(0)
                arrived = [
                    ended[need] + (hop if home[need[0]] != rank else 0.0)
                    for need in needs(action, program.num_stages - 1)
                ]
                unit = int(action.microbatch or 0)
                each = seconds[action.stage][unit % program.num_slices]
                free[rank] = max([free[rank], *arrived]) + sum(each[at] for at in PASSES[action.op])
                ended[action.stage, action.op, unit] = free[rank]
        assert len(ended) > before, "ranks wait for each other"
    return max(ended.values())


def most_held(row: Any, slices: int, kept: list[float], keys: list[float]) -> float:
    """Return the most bytes of slices and of gradients of keys and values that a row holds."""
    released = Op.BACKWARD_WEIGHT if any(action.op is Op.BACKWARD_WEIGHT for action in row) else Op.BACKWARD
    held = most = 0.0
    for action in row:
        number, stage = int(action.microbatch or 0) % slices, action.stage
        if action.op is Op.FORWARD:
            held += kept[stage] / slices
        elif action.op is not Op.BACKWARD_WEIGHT and number == slices - 1:
            held += keys[stage]
        most = max(most, held)
        if action.op is released:
            held -= kept[stage] / slices
        if action.op in (Op.BACKWARD, Op.BACKWARD_INPUT) and number == 0:
            held -= keys[stage]
    return most


LINES = [
    ("1f1b", 1, 4, "none", 1),
    ("zb-h1", 1, 8, "none", 2),
    ("interleaved-1f1b", 2, 4, "full", 1),
    ("1f1b", 1, 16, "full", 2),
]


def line(schedule: str, stages: int, slices: int, recompute: str, microbatches: int, ranks: int = 4) -> Layout:
    counts = layer_counts(LONG, ranks, schedule, stages)
    return Layout(
        batch=microbatches, pipeline=ranks, schedule=schedule, stages_per_rank=stages, recompute=recompute,
        counts=counts, slices=slices,
    )  # fmt: skip


@pytest.mark.parametrize("given", LINES, ids=str)
def test_a_step_takes_what_a_walk_along_its_rows_takes(given: tuple[str, int, int, str, int]) -> None:
    layout, machine = line(*given), machines()
    program = generate(
        layout.schedule, num_ranks=4, num_microbatches=layout.num_microbatches, slices=layout.slices,
        stages_per_rank=layout.stages_per_rank,
    )  # fmt: skip
    hop = machine.intra_node.seconds(2 * LONG.sequence / layout.slices * LONG.hidden)
    wanted = walked(program, priced(LONG, machine, layout), hop)
    known = SlicedLayout(LONG, machine, layout)
    assert known.timeline.makespan == pytest.approx(wanted, rel=1e-9)
    found = known.estimate()
    assert found.seconds.total == pytest.approx(wanted + found.seconds.optimizer, rel=1e-9)
    assert known.least + known.after <= found.seconds.total * (1 + 1e-12)
    plain = estimate(LONG, machine, replace(layout, slices=1), exact=True)
    assert found.seconds.optimizer == plain.seconds.optimizer
    assert (found.flops_per_device, found.volumes) == (plain.flops_per_device, plain.volumes)


@pytest.mark.parametrize("given", LINES, ids=str)
def test_a_device_holds_slices_and_what_they_owe(
    given: tuple[str, int, int, str, int],
) -> None:
    layout, machine = line(*given), machines()
    known, whole = SlicedLayout(LONG, machine, layout), replace(layout, slices=1)
    row_keys = 2 * 2 * LONG.head_width * LONG.num_key_value_heads * LONG.sequence  # bytes of a layer
    keys = [float(row_keys * count) for count in layout.counts]
    kept = [stage_activations(LONG, whole, StageLayers(count, 0)) for count in layout.counts]
    if layout.recompute == "full":
        kept = [size + more for size, more in zip(kept, keys, strict=True)]
    unit = replace(LONG, sequence=LONG.sequence // layout.slices)
    short = replace(whole, batch=layout.batch * layout.slices)
    totals = []
    kinds = alike(LONG, layout.counts, layout.schedule, 4, layout.stages_per_rank)
    for rank, row in enumerate(known.timeline.program.rows):
        kind = next(each for each in kinds if rank in each.ranks)
        state, buffers = device_bytes(LONG, whole, kind), device_bytes(unit, short, kind).buffers
        held = most_held(row, layout.slices, kept, keys)
        totals.append(state.total - state.activations - state.buffers + buffers + 2 * row_keys + held)
    assert known.bytes.total == pytest.approx(max(totals), rel=1e-9)


def test_one_slice_is_the_whole_sequence() -> None:
    layout, machine = line("1f1b", 1, 1, "none", 8), machines()
    known, plain = SlicedLayout(LONG, machine, layout), estimate(LONG, machine, layout, exact=True)
    found = known.estimate()
    assert found.seconds.total == pytest.approx(plain.seconds.total, rel=1e-12)
    assert found.seconds.compute == pytest.approx(plain.seconds.compute, rel=1e-12)
    assert found.bytes.activations == pytest.approx(plain.bytes.activations, rel=1e-12)


def test_slices_exchange_gradients_as_microbatches_do() -> None:
    """The same pipelines beside each other: what they exchange after the last slice, nothing hides but that slice."""
    single, double = line("1f1b", 1, 4, "none", 2, ranks=2), line("1f1b", 1, 4, "none", 4, ranks=2)
    alone = SlicedLayout(LONG, machines(2), single).estimate()
    beside = SlicedLayout(LONG, machines(4), replace(double, data=2, zero=1)).estimate()
    assert alone.seconds.data_exposed == 0 < beside.seconds.data_exposed
    unit = replace(LONG, sequence=LONG.sequence // 4)
    shorter = estimate(unit, machines(4), replace(double, data=2, zero=1, batch=16, slices=1), exact=True)
    assert beside.seconds.data_exposed == pytest.approx(shorter.seconds.data_exposed, rel=1e-12)
    assert beside.bytes.optimizer == pytest.approx(alone.bytes.optimizer / 2)


def test_slices_of_ideal_kernels_take_as_long_as_their_sequence() -> None:
    """Kernels that lose nothing by being small: only copies of keys and values are left."""
    known = machines()
    reach = replace(known.device.reach, depth=0.0, launch_seconds=0.0)
    device = replace(known.device, reach=reach, num_processors=1, memory_bytes_per_second=1e18)
    ideal, share = replace(known, device=device), Layout(batch=1, practice=Practice(host_seconds=0.0)).share
    whole = slice_seconds(LONG, ideal, share, 1, experts=False, recomputed=()).sum()
    for slices in (2, 8, 32):
        each = slice_seconds(LONG, ideal, share, slices, experts=False, recomputed=())
        assert each.sum() == pytest.approx(whole, rel=1e-2)  # the last wave of tiles is half empty
    real = [slice_seconds(LONG, known, share, slices, experts=False, recomputed=()).sum() for slices in (1, 4, 16, 64)]
    assert real == sorted(real)
    assert real[-1] > 1.2 * real[0], "short slices cost"


def test_prices_are_near_what_slices_took_on_a_gpu() -> None:
    """The model, the step and the ratios of `benchmarks/slices.py gpu` on one H200."""
    shape = replace(LONG, num_layers=4, hidden=1024, num_heads=8, num_key_value_heads=2, feedforward=2688)
    shape = replace(shape, vocabulary=2048, head_width=128, sequence=131072)
    practice = software("drumline@0").practice
    whole = Layout(batch=4, pipeline=4, counts=(1, 1, 1, 1), practice=practice)
    work, in_pieces = (SlicedLayout(shape, cluster("h200", 4), layout) for layout in (whole, replace(whole, slices=8)))
    taken, of_ranks = sum(work.seconds_of_ranks), sum(in_pieces.seconds_of_ranks)
    assert taken == pytest.approx(4.059, rel=0.1)
    assert of_ranks / taken == pytest.approx(1.034, rel=0.03)
    stashes = []
    for each in (work, in_pieces):
        peaks = zip(each.timeline.memory, each.standing, strict=True)
        stashes.append(sum((holding.peak_bytes or 0.0) - standing.total for holding, standing in peaks))
    assert stashes[1] / stashes[0] == pytest.approx(22.59 / 45.11, rel=0.05)


# ---- plans ---------------------------------------------------------------------------------------------------------


def every_slicing(machine: Cluster, batch: int) -> Iterator[Layout]:
    """Yield every layout in slices of single lines of a mesh, without any rule that leaves some out."""
    devices = machine.num_devices
    for ranks, size, slices in product((2, 4), (1, 2, 4), (2, 4, 8, 16, 32, 64)):
        data = devices // ranks
        if batch % (data * size) or batch // (data * size) >= 4 * ranks:
            continue
        times = batch // (data * size)
        stages = [("1f1b", 1), ("zb-h1", 1), *(("interleaved-1f1b", each) for each in (2, 3, 4, 5))]
        for (name, each), how in product(stages, ("none", "full")):
            few = ranks * each in (*range(LONG.num_layers + 1), LONG.num_layers + 2)  # or the ends are stages too
            if (each > 1 and times * slices % ranks) or not few:
                continue
            counts = layer_counts(LONG, ranks, name, each)
            zero = 1 if data > 1 else 0
            yield Layout(
                batch, size, 1, ranks, data, 1, 1, each, name, zero, recompute=how, counts=counts, slices=slices
            )


@pytest.mark.parametrize(("batch", "memory"), [(2, 80 * GIB), (2, 5.4 * GIB), (1, 80 * GIB)])
def test_the_plan_in_slices_is_that_of_brute_force(batch: int, memory: float) -> None:
    machine = machines(memory=memory)
    found = plan(LONG, machine, batch=batch, pins=ONE_LINE)
    try:
        best_whole = min(
            choice.seconds for choice in plan(LONG, machine, batch=batch, pins=replace(ONE_LINE, slices=1)).band
        )
    except PlanError:
        best_whole = float("inf")
    every = [SlicedLayout(LONG, machine, layout) for layout in every_slicing(machine, batch)]
    fits = {each.layout: each.seconds for each in every if each.bytes.total <= found.limit_bytes}
    near = 1.02 * min(best_whole, *fits.values())
    sliced = {choice.layout: choice.seconds for choice in found.band if choice.layout.slices > 1}
    wanted = {layout: seconds for layout, seconds in fits.items() if seconds <= near}
    # More recomputation of what fits with less is not looked at.
    least = {layout for layout in wanted if layout.recompute == "none" or replace(layout, recompute="none") not in fits}
    assert sliced.keys() == least
    assert sliced == pytest.approx({layout: wanted[layout] for layout in least}, rel=1e-12)
    assert min(choice.seconds for choice in found.band) == pytest.approx(min(best_whole, *fits.values()), rel=1e-12)
    assert found.chosen.layout.slices > 1, "few long sequences fill a pipeline by slices"


@pytest.mark.parametrize("batch", [1, 8])
def test_no_layout_takes_or_holds_less_than_its_bounds(batch: int) -> None:
    machine = machines()
    bounds = LineBounds(LONG, machine.nodes, Practice())
    layouts = list(every_slicing(machine, batch))
    assert len(layouts) > 30
    for layout in layouts:
        known = SlicedLayout(LONG, machine, layout)
        line = Line(layout.pipeline, layout.data, layout.zero, layout.microbatch, layout.num_microbatches)
        schedule = SliceSchedule(layout.schedule, layout.stages_per_rank, layout.slices)
        taken = (1 + 1e-9) * known.timeline.makespan
        assert bounds.even_seconds(line, layout.slices, layout.recompute) <= taken
        assert bounds.seconds(line, schedule, layout.recompute) <= taken
        assert known.least <= taken
        assert bounds.even_bytes(line, layout.recompute) <= known.bytes.total
        assert bounds.bytes(line, schedule, layout.recompute) <= known.bytes.total


def test_long_sequences_are_planned_in_slices_where_whole_ones_do_not_fit() -> None:
    long = replace(model("llama-3-8b"), sequence=131072)
    with refused(PlanError, "llama-3-8b does not fit on 8 x H200"):
        plan(long, cluster("h200", 8), batch=8, pins=replace(ONE_LINE, slices=1))
    found = plan(long, cluster("h200", 8), batch=8, pins=ONE_LINE)
    assert found.chosen.layout.slices > 1
    assert found.chosen.is_exact
    again = SlicedLayout(long, cluster("h200", 8), found.chosen.layout)
    assert found.chosen.seconds == pytest.approx(again.timeline.makespan + again.after, rel=1e-12)


@pytest.mark.parametrize(
    ("pins", "batch"),
    [
        (Pins(tensor=1, context=1, pipeline=2, data=2), 64),  # 32 microbatches for 2 ranks, or 16 of 2
        (Pins(tensor=2), 4),
        (Pins(framework="megatron", tensor=1), 4),
        (Pins(framework="torchtitan", tensor=1), 4),
        (Pins(software="nemo@25.09", tensor=1), 4),
        (Pins(precision="fp8", tensor=1), 4),
        (Pins(schedules=("zb-v",), tensor=1), 4),
        (Pins(pipeline=1), 4),
    ],
    ids=str,
)
def test_a_plan_that_can_have_no_slices_is_as_without(pins: Pins, batch: int) -> None:
    pins = replace(pins, microbatch=1)
    found, without = (plan(LONG, machines(), batch=batch, pins=each) for each in (pins, replace(pins, slices=1)))
    told = []
    for each in (found, without):
        text = {**brief(each).to_json(), "plan_seconds": 0}
        told.append(json.dumps(text))
    assert told[0] == told[1]
    assert "slices" not in told[0]


def test_a_pin_says_how_many_slices() -> None:
    found = plan(LONG, machines(), batch=8, pins=replace(ONE_LINE, slices=4))
    assert {choice.layout.slices for choice in (*found.best, *found.band)} == {4}
    many = plan(LONG, machines(), batch=64, pins=replace(ONE_LINE, slices=2, pipeline=2, microbatch=1))
    assert many.chosen.layout.num_microbatches == 32  # also where microbatches are many
    assert many.chosen.layout.slices == 2


@pytest.mark.parametrize(
    ("transformer", "pins", "error", "expected", "fix"),
    [
        (LONG, Pins(slices=3), "sequences have 16384 tokens", "a multiple of the number", "use 2"),
        (LONG, Pins(slices=8, tensor=2), "TP is 2", "TP 1: lines of a mesh see parts", "leave one of the two out"),
        (LONG, Pins(slices=8, context=2), "CP is 2", "CP 1: lines of a mesh see parts", "leave one of the two out"),
        (LONG, Pins(slices=8, pipeline=1), "PP is 1", "a pipeline of 2 ranks or more", "leave one of the two out"),
        (LONG, Pins(slices=8, schedules=("zb-v",)), "the schedule is zb-v", "1f1b, interleaved-1f1b or zb-h1", ""),
        (LONG, Pins(slices=8, zero=3), "ZeRO is 3", "ZeRO 0 or 1", ""),
        (LONG, Pins(slices=8, recompute="selective"), "recompute is selective", "none or full", ""),
        (LONG, Pins(slices=8, framework="megatron"), "megatron is to run the plan", "drumline, which", "leave one"),
        (LONG, Pins(slices=8, software="megatron@0.14"), "software is megatron@0.14", "drumline, which", "leave one"),
        (LONG, Pins(slices=8, precision="fp8"), "products are in FP8", "bf16: drumline", "plan in bf16"),
        (
            replace(LONG, details=Details(others=("sliding_window 4096",))), Pins(slices=8),
            "long has sliding_window 4096", "causal attention to all tokens before", "plan without slices",
        ),
        (replace(LONG, latent=LatentAttention(256, 128, 64, 32, 64)), Pins(slices=8), "long has values", "fused", ""),
        (replace(LONG, details=Details(alibi=True)), Pins(slices=8), "long has ALiBi", "causal", "plan without"),
    ],
)  # fmt: skip
def test_what_slices_do_not_go_with_is_refused(
    transformer: Transformer, pins: Pins, error: str, expected: str, fix: Any
) -> None:
    with refused(PlanError, f"slices is pinned to {pins.slices}, but {error}", expected=expected, fix=fix):
        plan(transformer, machines(), batch=8, pins=pins)
    if pins.slices == 8:  # who does not ask for slices gets a plan without
        found = plan(transformer, machines(), batch=8, pins=replace(pins, slices=None))
        assert found.chosen.layout.slices == 1


def test_slices_that_fit_nowhere_are_refused() -> None:
    with refused(
        PlanError, "long does not fit in 4 slices of every sequence", expected="at most 0.9 GiB", fix="use another"
    ):
        plan(LONG, machines(memory=GIB), batch=8, pins=Pins(slices=4))
    with refused(
        PlanError, "no layout on 1 device allows 4 slices", expected="a pipeline of 2 ranks", fix="leave the number"
    ):
        plan(LONG, machines(1), batch=8, pins=Pins(slices=4))


# ---- what is told of a plan -----------------------------------------------------------------------------------------


def test_drumline_is_told_the_slices_and_others_say_that_they_run_none() -> None:
    layout = line("1f1b", 1, 8, "none", 2)
    configs = launch(LONG, machines(), layout)
    own = configs.of("drumline")
    assert read_train_config(own.text) == layout
    assert own.starts
    for name in ("megatron", "torchtitan"):
        other = configs.of(name)
        assert not other.starts
        assert "runs no slices of sequences, and the plan has 8" in other.missing[0]
        assert other.missing[0] in other.text


def test_an_explanation_says_what_slices_save() -> None:
    found = plan(LONG, machines(), batch=2, pins=ONE_LINE)
    told = explain(found)
    number = found.chosen.layout.slices
    assert told.to_json()["chosen"]["layout"]["slices"] == number
    assert f"{number} slices of every sequence" in found.chosen.settings.values()
    whole = told.to_json()["slices"]["whole"]
    assert "slices" not in whole["layout"]
    assert whole["step_seconds"] > found.chosen.seconds
    assert "slower: it waits" in whole["why"]
    assert f"{number} slices of {LONG.sequence // number} tokens" in plan_text(told)
    assert told.software.others == {}, "no other software runs slices"
    assert told.reasons is not None
    assert f"{number} slices of every sequence" in plan_page(told, told.reasons)
    assert told.reasons.drawing is not None
    assert told.reasons.drawing.timeline.program.num_slices == number
    edits = {edit.kind: edit.choice for edit in changes(found)}
    assert edits["whole sequences"].layout == replace(found.chosen.layout, slices=1)
    assert edits["whole sequences"].seconds > found.chosen.seconds
    assert {f"{number // 2} slices", "full recomputation"} <= edits.keys()


def test_the_command_plans_slices(capsys: pytest.CaptureFixture[str]) -> None:
    words = "plan llama-3-8b --hardware h100 --gpus 8 --batch 8 --sequence 32768 --tensor 1 --context 1 --brief --top 1"
    assert main(words.split()) == 0
    assert "slices of every sequence" in capsys.readouterr().out
    assert main([*words.split(), "--slices", "1"]) == 0
    assert "slices" not in capsys.readouterr().out
    assert main([*words.split(), "--slices", "0"]) == 2
    assert "--slices is 0" in capsys.readouterr().err
