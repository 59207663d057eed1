"""The cluster planner: as good as brute force, never over the limit, and its reasons are what was computed."""

from __future__ import annotations

import random
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import pairwise, product

import pytest

from cluster_models import (
    GIB,
    Rough,
    latent_transformer,
    rank_weights,
    small_cluster,
    small_transformer,
    sparse_transformer,
)
from drumline.core.errors import PlanError
from drumline.core.simulate.simulate import simulate
from drumline.plan.cluster.device_memory import peak_bytes
from drumline.plan.cluster.estimate import Estimate, estimate
from drumline.plan.cluster.hardware import Cluster, cluster
from drumline.plan.cluster.hugging_face import transformer_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import model
from drumline.plan.cluster.spent import Ops, Spent
from drumline.plan.cluster.stages import layer_counts, pairs_held, simulated, stages_of
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.launch.launch import AXES, launch, links, place, torchrun
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.explain import brief
from drumline.plan.layouts.pins import Degrees, Pins
from drumline.plan.layouts.planner import ClusterPlan, plan
from drumline.plan.layouts.preference import BAND, band
from drumline.plan.layouts.space import layouts, meshes
from drumline.plan.layouts.survey import Evaluator, Survey, other_cuts
from drumline.plan.layouts.what_if import against_fsdp, changes, margins, pareto, scaling
from drumline.plan.layouts.why import Alternative, why
from drumline.schedules import find, generate
from drumline.schedules.formulas import Pace, Paces
from matrices import examples, long
from refused import refused, saying
from some import some
from train_configs import read_train_config

PLAIN = small_transformer()


def planned(memory: float = 1.2 * GIB, **options: object) -> ClusterPlan:
    return plan(PLAIN, small_cluster(memory=memory), batch=32, **{"surveyed": Rough().surveyed, **options})  # type: ignore[arg-type]


def every_layout(transformer: Transformer, machines: Cluster, batch: int, pins: Pins) -> Iterator[Layout]:
    """Yield every layout, also those that recompute some layers of every stage."""
    for layout in layouts(transformer, machines, batch, pins):
        yield layout
        if layout.recompute == "full" and pins.recompute is None:
            for count in range(1, max(layout.counts)):
                yield replace(layout, recompute=f"full:{count}")


def brute_force(
    transformer: Transformer, machines: Cluster, batch: int, pins: Pins, evaluate: Evaluator, limit: float
) -> list[Choice]:
    """Return the best layout of each mesh, with a look at every single one."""
    best: dict[Degrees, Choice] = {}
    for layout in every_layout(transformer, machines, batch, pins):
        choice = Choice.of(machines, layout, evaluate(transformer, machines, layout))
        if choice.bytes <= limit and (choice.mesh not in best or choice.rank < best[choice.mesh].rank):
            best[choice.mesh] = choice
    return sorted(best.values(), key=lambda option: option.rank)


@long
@pytest.mark.matrix
@pytest.mark.slow
def test_survey_finds_what_brute_force_finds() -> None:
    drawn = random.Random(8)
    found = 0
    for _ in some(range(examples(40))):
        transformer = drawn.choice([PLAIN, sparse_transformer(), small_transformer(sequence=32768)])
        machines = small_cluster(drawn.choice([4, 8, 12, 16]), per_node=4)
        evaluate = Rough(drawn.uniform(0, 0.1), drawn.uniform(0, 4), drawn.uniform(0, 0.5), drawn.uniform(0.2, 2))
        batch = drawn.choice([16, 24, 48])
        pins = drawn.choice(
            [Pins(), Pins(), Pins(zero=1), Pins(recompute="selective"), Pins(schedules=("v-half", "1f1b"))]
        )
        survey = evaluate.surveyed(transformer, machines, batch, pins)
        smallest = survey.smallest()
        assert smallest is not None
        limit = smallest.bytes * drawn.uniform(0.9, 6)
        expected = brute_force(transformer, machines, batch, pins, evaluate, limit)
        top = drawn.choice([1, 3, 10])
        assert [choice.layout for choice in survey.best(limit, top=top)] == [choice.layout for choice in expected[:top]]
        found += bool(expected)
    assert found > examples(40) // 2


def test_survey_looks_at_few_layouts_for_one_answer() -> None:
    survey = Rough().surveyed(PLAIN, small_cluster(16), 64, Pins())
    found = survey.best(GIB)
    assert survey.num_evaluated < survey.num_layouts / 6
    assert found == brute_force(PLAIN, small_cluster(16), 64, Pins(), Rough(), GIB)[:1]


def test_smallest_layout_is_the_smallest_of_all() -> None:
    survey = Rough().surveyed(PLAIN, small_cluster(), 16, Pins())
    smallest = survey.smallest()
    assert smallest is not None
    every = (Rough()(PLAIN, small_cluster(), layout) for layout in layouts(PLAIN, small_cluster(), 16, Pins()))
    assert smallest.bytes == min(item.bytes.total for item in every)


@pytest.mark.parametrize("memory", [0.5, 0.6, 0.8, 1.5, 3.0])
def test_no_plan_is_over_the_limit(memory: float) -> None:
    found = planned(memory * GIB, headroom=0.2)
    assert found.limit_bytes == pytest.approx(0.8 * memory * GIB)
    assert all(some(choice.bytes <= found.limit_bytes for choice in found.best))


def test_what_only_the_exact_estimate_refuses_is_not_returned() -> None:
    def fuller(transformer: Transformer, machines: Cluster, layout: Layout) -> Estimate:
        item = Rough()(transformer, machines, layout)
        if layout.pipeline == 1:
            return item
        return replace(item, bytes=replace(item.bytes, buffers=100 * GIB))

    found = planned(surveyed=partial(Rough().surveyed, refine=fuller))
    assert {choice.layout.pipeline for choice in found.best} == {1}


def test_the_exact_estimate_decides() -> None:
    def slower(transformer: Transformer, machines: Cluster, layout: Layout) -> Estimate:
        item = Rough()(transformer, machines, layout)
        return replace(item, seconds=replace(item.seconds, bubble=item.seconds.bubble + 1.0 * (layout.tensor > 1)))

    rough, exact = planned(), planned(surveyed=partial(Rough().surveyed, refine=slower))
    assert rough.chosen.layout.tensor > 1
    assert exact.chosen.layout.tensor == 1
    assert all(some(choice.is_exact for choice in exact.best))


def exactly(transformer: Transformer, machines: Cluster, batch: int, limit: float, pins: Pins) -> list[Choice]:
    """Return every layout with every cut that the planner knows, simulated, as far as it is within the limit."""
    found = []
    for layout in every_layout(transformer, machines, batch, pins):
        cuts = [layout.counts]
        if layout.schedule == "interleaved-1f1b":
            cuts += other_cuts(transformer.num_layers, layout.num_stages)
        for counts in dict.fromkeys(cuts):
            cut = replace(layout, counts=counts)
            found.append(Choice.of(machines, cut, estimate(transformer, machines, cut, exact=True)))
    return [choice for choice in found if choice.bytes <= limit]


@pytest.mark.slow
def test_the_projections_of_latents_are_recomputed_where_that_is_enough() -> None:
    transformer = latent_transformer(num_layers=8, vocabulary=2000)
    machines, pins = small_cluster(2), Pins(microbatch=4)
    survey = Survey(transformer, machines, 16, pins)
    every = [
        Choice(layout, estimate(transformer, machines, layout))
        for layout in every_layout(transformer, machines, 16, pins)
    ]
    least, most = (pick(choice.bytes for choice in every) for pick in (min, max))
    chosen = set()
    for share in some(range(40)):
        limit = least + (most - least) * (share / 60) ** 2
        best = min((choice for choice in every if choice.bytes <= limit), key=lambda choice: choice.rank)
        assert survey.best(limit)[0].layout == best.layout
        chosen.add(best.layout.recompute)
    assert {"none", "selective", "norms+activation+projections", "full"} <= chosen
    assert Pins().recomputations(PLAIN) == ("none", "norms", "activation", "selective", "full")


@pytest.mark.slow
@pytest.mark.parametrize(("layers", "gpus", "batch", "memory"), [(4, 4, 8, 1.0), (6, 4, 6, 3.0), (4, 8, 8, 0.8)])
def test_the_answer_is_that_of_brute_force_however_many_are_shown(
    layers: int, gpus: int, batch: int, memory: float
) -> None:
    transformer = small_transformer(num_layers=layers, hidden=512, vocabulary=8000)
    machines = replace(cluster("a100-40", gpus), devices_per_node=4)
    machines = replace(machines, device=replace(machines.device, memory_bytes=memory * GIB))
    pins = Pins(sequence_parallel=False)
    plans = [plan(transformer, machines, batch=batch, pins=pins, top=top) for top in (1, 2, 5, 30)]
    assert len({cluster_plan.chosen.layout for cluster_plan in plans}) == 1
    every = exactly(transformer, machines, batch, plans[0].limit_bytes, pins)
    least = min(choice.seconds for choice in every)
    assert plans[0].chosen.seconds <= least * (1 + BAND)
    assert plans[0].chosen.layout == band(every, plans[0].limit_bytes)[0].layout


_heavy = partial(Transformer, gated=False, tied=False, biased=False, dropout=False, vocabulary=256_000)


# Heads as heavy as several layers, and few microbatches: v-half may be faster than zb-v, and work is far from even.
@long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("transformer", "gpus", "batch", "pins"),
    [
        (_heavy("wide", 16, 1280, 20, sequence=4096, feedforward=11008), 12, 6, Pins(pipeline=2, microbatch=1)),
        (_heavy("few", 16, 2560, 20, sequence=8192, feedforward=6784), 4, 48, Pins(schedules=("1f1b", "dualpipe"))),
    ],
    ids=lambda transformer: transformer.name if isinstance(transformer, Transformer) else "",
)
def test_a_heavy_head_hides_no_layout(transformer: Transformer, gpus: int, batch: int, pins: Pins) -> None:
    machines = replace(cluster("b200", gpus), devices_per_node=4)
    machines = replace(machines, device=replace(machines.device, memory_bytes=240 * GIB))
    plans = [plan(transformer, machines, batch=batch, pins=pins, top=top) for top in (1, 30)]
    assert len({cluster_plan.chosen.layout for cluster_plan in plans}) == 1
    every = exactly(transformer, machines, batch, plans[0].limit_bytes, pins)
    assert plans[0].chosen.seconds <= min(choice.seconds for choice in every) * (1 + BAND)


def test_best_are_of_different_meshes_and_in_order() -> None:
    found = planned()
    assert len({choice.mesh for choice in found.best}) == len(found.best) > 5
    assert [choice.seconds for choice in found.best[1:]] == sorted(choice.seconds for choice in found.best[1:])
    assert found.chosen.seconds <= found.best[1].seconds * (1 + BAND)
    assert len(planned(top=3).best) == 3


@pytest.mark.parametrize(
    ("pins", "name", "value"),
    [
        (Pins(tensor=4), "tensor", 4),
        (Pins(pipeline=4), "pipeline", 4),
        (Pins(data=4), "data", 4),
        (Pins(microbatch=4), "microbatch", 4),
        (Pins(zero=0), "zero", 0),
        (Pins(recompute="full"), "recompute", "full"),
        (Pins(schedules=("zb-h1",)), "schedule", "zb-h1"),
        (Pins(pipeline=2, stages_per_rank=3), "stages_per_rank", 3),
        (Pins(tensor=4, sequence_parallel=False), "sequence_parallel", False),
    ],
)
def test_pins_hold(pins: Pins, name: str, value: object) -> None:
    found = planned(4 * GIB, pins=pins)
    assert {getattr(choice.layout, name) for choice in found.best} == {value}


@pytest.mark.parametrize(
    ("pins", "words"),
    [
        (
            Pins(tensor=2, pipeline=2, data=4),
            saying("TP 2 x PP 2 x DP 4 needs 16 devices, but the cluster has 8", fix="use DP 2"),
        ),
        (Pins(tensor=2, pipeline=3), saying("TP 2 x PP 3 = 6 does not divide 8 devices", fix="use PP 2 or 4")),
        (
            Pins(pipeline=3),
            saying("^PP 3 does not divide 8 devices", expected="divides the number", fix="use PP 2 or 4"),
        ),
        (Pins(tensor=2, pipeline=1, data=2), saying("uses 4 devices, but the cluster has 8", fix="use DP 4")),
        (Pins(pipeline=3, data=3), saying("PP 3 x DP 3 needs 9 devices, but the cluster has 8")),
        (Pins(tensor=16), saying("TP 16 does not divide the number of attention heads of small, 8", fix="use TP 8")),
        (Pins(data=8, pipeline=1, tensor=1, context=3), saying("CP 3 cannot share sequences of 1024")),
        (Pins(expert=2), saying("EP is 2, but small has no experts")),
        (
            Pins(recompute="norms+projections"),
            saying(r"'norms\+projections', but small has no latent attention", fix="use norms"),
        ),
    ],
)
def test_contradictory_pins_are_refused(pins: Pins, words: dict[str, str]) -> None:
    with refused(PlanError, **words):
        planned(pins=pins)


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with refused(PlanError, "DP 4 does not divide a batch of 30 sequences", fix="use a batch of 32"):
        plan(PLAIN, small_cluster(), batch=30, surveyed=Rough().surveyed, pins=Pins(data=4))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"name": "zero", "value": 4}, saying("zero is pinned to 4", expected="0, 1, 2 or 3")),
        ({"name": "recompute", "value": "ful"}, saying("recompute is pinned to 'ful'", fix=r"did you mean full\?")),
    ],
)
def test_pins_without_meaning_are_refused(values: dict[str, object], words: dict[str, str]) -> None:
    with refused(PlanError, **words):
        Pins(**{str(values["name"]): values["value"]})  # type: ignore[arg-type]
    with refused(PlanError, "pinned to 'zbh1'", fix="did you mean zb-h1"):
        Pins(schedules=("zbh1",))


def test_headroom_and_nodes_must_make_sense() -> None:
    with refused(PlanError, "headroom is 1"):
        planned(headroom=1.0)
    with refused(PlanError, "10 devices do not fill nodes of 4", fix="use 12 or 8"):
        plan(PLAIN, small_cluster(10), batch=32, surveyed=Rough().surveyed)


def test_nothing_fits_says_how_much_less_and_which_pin_would_do() -> None:
    smallest = "small does not fit on 8 x toy: the smallest layout, TP1 PP1 DP8 with ZeRO 3 and no recomputation"
    mend = r"full recomputation[\w ,]* would fit"
    with refused(PlanError, smallest, expected="less activation memory", fix=mend):
        planned(0.5 * GIB, pins=Pins(recompute="none", tensor=1, pipeline=1))
    freed = planned(0.5 * GIB, pins=Pins(recompute="full", tensor=1, pipeline=1))
    assert freed.chosen.layout.recompute == "full"


def test_nothing_fits_names_a_cluster_and_a_memory_that_do() -> None:
    with pytest.raises(PlanError) as caught:
        planned(0.06 * GIB)
    devices = int(caught.value.fix.split(" on ")[-1].split(" devices")[0])
    assert plan(PLAIN, small_cluster(devices, memory=0.06 * GIB), batch=32, surveyed=Rough().surveyed)
    with pytest.raises(PlanError):
        plan(PLAIN, small_cluster(devices // 2, memory=0.06 * GIB), batch=32, surveyed=Rough().surveyed)
    assert caught.value.smallest_bytes is not None
    assert planned(caught.value.smallest_bytes / 0.9 + 8)


@pytest.mark.parametrize(
    ("pipeline", "per_rank", "schedule"), [(4, 1, "1f1b"), (3, 2, "interleaved-1f1b"), (3, 2, "zb-v")]
)
def test_no_cut_has_a_smaller_largest_rank(pipeline: int, per_rank: int, schedule: str) -> None:
    transformer = small_transformer(num_layers=10)
    counts = layer_counts(transformer, pipeline, schedule, per_rank)
    assert sum(counts) == 10
    assert min(counts) >= 1
    others = (entry for entry in product(range(1, 8), repeat=pipeline * per_rank) if sum(entry) == 10)
    least = min(max(rank_weights(transformer, other, pipeline, schedule)) for other in others)
    assert max(rank_weights(transformer, counts, pipeline, schedule)) == pytest.approx(least)


def test_folded_schedules_lie_where_their_programs_put_them() -> None:
    for name in ("zb-v", "v-half", "v-min", "hanayo", "dualpipe-v", "interleaved-1f1b"):
        placement = generate(name, num_ranks=4, num_microbatches=8, stages_per_rank=2).placement
        for rank in range(4):
            assert [stage for stage, _ in stages_of(name, rank, 4, 2)] == list(placement.stages_of(rank))


def test_meshes_use_all_devices_and_stay_inside_a_node() -> None:
    for mesh in meshes(PLAIN, small_cluster(24), 48, Pins()):
        assert mesh.tensor * mesh.pipeline * mesh.data * mesh.context == 24
        assert mesh.tensor <= 4
        assert 48 % mesh.data == 0
        assert mesh.pipeline <= PLAIN.num_layers


def test_long_sequences_may_be_shared_and_experts_spread() -> None:
    long = {mesh.context for mesh in meshes(small_transformer(sequence=32768), small_cluster(), 8, Pins())}
    assert long == {1, 2, 4, 8}
    assert {mesh.context for mesh in meshes(PLAIN, small_cluster(), 8, Pins())} == {1}
    spread = {mesh.expert for mesh in meshes(sparse_transformer(), small_cluster(), 8, Pins())}
    assert spread == {1, 2, 4, 8}


def group(layout: Layout, rank: int, axis: str) -> list[int]:
    """Return the ranks that a rank talks to along an axis, itself among them."""
    stride = 1
    for name in AXES[: AXES.index(axis)]:
        stride *= getattr(layout, name)
    size = getattr(layout, axis)
    first = rank - rank // stride % size * stride
    return [first + stride * at for at in range(size)]


def test_ranks_fill_nodes_with_tensor_parallelism_first() -> None:
    machines = small_cluster(48)
    layout = Layout(batch=48, tensor=2, context=2, data=3, pipeline=4)
    places = [place(layout, machines, rank) for rank in range(48)]
    assert len(set(places)) == 48
    for rank in range(48):
        for axis in AXES:
            together = group(layout, rank, axis)
            assert rank in together
            assert len(together) == getattr(layout, axis)
            for other in AXES:
                assert len({getattr(places[at], other) for at in together}) == (len(together) if other == axis else 1)
        assert len({places[number].node for number in group(layout, rank, "tensor")}) == 1
    assert links(layout, machines) == {
        "tensor": "inside a node",
        "context": "inside a node",
        "data": "between nodes",
        "pipeline": "between nodes",
    }
    for axis, where in links(layout, machines).items():
        alone = all(len({places[number].node for number in group(layout, rank, axis)}) == 1 for rank in range(48))
        assert alone == (where == "inside a node")


def test_a_reason_names_the_item_that_is_lost() -> None:
    found = planned()
    slow = replace(found.chosen.estimate.seconds, bubble=found.chosen.estimate.seconds.bubble + 0.1)
    other = replace(found.chosen, estimate=replace(found.chosen.estimate, seconds=slow))
    share = 0.1 / found.chosen.seconds
    assert why(found.chosen, other, found.limit_bytes) == f"{share:.1%} slower: it waits 100 ms longer"
    assert why(found.chosen, other, found.chosen.bytes - 2 * GIB) == "does not fit: 2.0 GiB too much"
    assert why(found.chosen, found.chosen, found.limit_bytes) == "just as fast, with the same memory"


def test_a_reason_leaves_out_what_is_nothing_beside_the_step() -> None:
    """Of a step of 1,000 s, 0.3 s more of waiting are nothing; of one of 10 s they are something."""
    found = planned().chosen
    for seconds, words in ((1000.0, "it recomputes 2 s longer"), (10.0, "it recomputes 2 s longer, it waits")):
        plain = replace(found.estimate.seconds, **dict.fromkeys(asdict(found.estimate.seconds), 0.0))
        plain = replace(plain, compute=seconds)
        more = replace(plain, recompute=2.0, bubble=0.3)
        mine, theirs = (replace(found, estimate=replace(found.estimate, seconds=item)) for item in (plain, more))
        told = why(mine, theirs, found.bytes)
        assert words in told
        assert ("waits" in told) == ("waits" in words)


def test_changes_differ_in_one_setting_and_say_so() -> None:
    found = planned(pins=Pins(pipeline=2, schedules=("zb-v",), microbatch=2))
    rows = changes(found)
    assert {"full recomputation", "ZeRO 3", "1f1b", "microbatches of 1"} <= {row.kind for row in rows}
    for row in rows:
        layout, chosen = row.choice.layout, found.chosen.layout
        names = ("microbatch", "schedule", "zero", "recompute", "sequence_parallel", "stages_per_rank")
        differing = {name for name in names if getattr(layout, name) != getattr(chosen, name)}
        assert 1 <= len(differing - {"stages_per_rank"}) <= 1 or differing == {"stages_per_rank"}
        assert ("does not fit" in row.sentence) == (row.choice.bytes > found.limit_bytes)


def test_margins_are_what_planning_again_gives() -> None:
    found = planned()
    by_name = {margin.kind: margin for margin in margins(found)}
    assert not isinstance(by_name["one more GPU"], Alternative)
    larger = plan(PLAIN, small_cluster(12, memory=1.2 * GIB), batch=32, surveyed=Rough().surveyed)
    node = by_name["one more node"]
    assert node.gain == pytest.approx(found.chosen.seconds / larger.chosen.seconds - 1)
    roomier = planned((found.limit_bytes + GIB) / 0.9)
    assert by_name["one more GiB per device"].gain == pytest.approx(found.chosen.seconds / roomier.chosen.seconds - 1)


def test_no_point_of_the_front_beats_another_in_both() -> None:
    found = planned()
    front = pareto(found)
    assert [choice.bytes for choice in front] == sorted(choice.bytes for choice in front)
    assert [choice.seconds for choice in front] == sorted((choice.seconds for choice in front), reverse=True)
    within = [choice for choice in front if choice.bytes <= found.limit_bytes]
    assert within[-1].seconds == found.chosen.seconds


def test_scaling_plans_anew_at_every_size() -> None:
    strong, weak = scaling(planned()).values()
    assert [point.devices for point in strong] == [2, 4, 8, 16, 32]
    assert [point.batch for point in weak] == [8, 16, 32, 64, 128]
    small = plan(PLAIN, small_cluster(4, memory=1.2 * GIB), batch=32, surveyed=Rough().surveyed)
    half = strong[1].best
    assert half is not None
    assert half.layout == small.chosen.layout


def test_fsdp_sends_more_than_a_pipeline() -> None:
    (_, chosen), (name, sharded) = against_fsdp(planned(pins=Pins(pipeline=2)))
    assert (name, sharded.layout.zero, sharded.layout.pipeline) == ("FSDP, no pipeline", 3, 1)
    assert sharded.estimate.volumes.data > chosen.estimate.volumes.data


def test_train_config_reads_back_as_the_layout() -> None:
    layout = planned().chosen.layout
    text = launch(PLAIN, small_cluster(), layout).of("drumline").text
    assert read_train_config(text) == layout
    assert tomllib.loads(text)["model"]["num_layers"] == 12
    with refused(PlanError, "version 2"):
        read_train_config(text.replace("version = 1", "version = 2"))
    with refused(PlanError, "lacks or misspells"):
        read_train_config(text.replace("[mesh]", "[mash]"))


def test_torchtitan_config_says_all_layers_once() -> None:
    layout = planned(pins=Pins(pipeline=2, schedules=("interleaved-1f1b",), zero=3)).chosen.layout
    config = launch(PLAIN, small_cluster(), layout).of("torchtitan")
    read = tomllib.loads(config.text)
    degrees = read["parallelism"]
    assert degrees["tensor_parallel_degree"] == layout.tensor
    assert degrees["data_parallel_shard_degree"] == layout.data
    assert degrees["pipeline_parallel_schedule"] == "Interleaved1F1B"
    assert degrees["fsdp_reshard_after_forward"] == "always"
    assert read["activation_checkpoint"]["mode"] == layout.recompute
    names = [name for part in degrees["module_fqns_per_model_part"] for name in part]
    assert names == ["tok_embeddings", *(f"layers.{at}" for at in range(12)), "norm", "output"]
    local = read["training"]["local_batch_size"]
    assert local // degrees["pipeline_parallel_microbatch_size"] == layout.num_microbatches


def test_megatron_arguments_say_the_mesh_and_the_cut() -> None:
    layout = planned(pins=Pins(pipeline=2, tensor=2, schedules=("1f1b",))).chosen.layout
    config = launch(PLAIN, small_cluster(), layout).of("megatron")
    words = [word for line in config.text.splitlines() if not line.startswith("#") for word in shlex.split(line)]
    read = dict(pairwise(words))
    assert read["--tensor-model-parallel-size"] == "2"
    assert read["--pipeline-model-parallel-layout"] == f"Et*{layout.counts[0]}|t*{layout.counts[1]}L"
    assert read["--micro-batch-size"] == str(layout.microbatch)
    assert "--use-distributed-optimizer" in words


@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "v-half", "dualpipe-v"])
def test_what_a_framework_cannot_say_is_said(schedule: str) -> None:
    layout = planned(4 * GIB, pins=Pins(pipeline=2, data=2, tensor=2, zero=1, schedules=(schedule,))).chosen.layout
    configs = launch(PLAIN, small_cluster(), layout)
    own = configs.of("drumline")
    assert own.starts
    assert [name.partition(":")[0] for name in own.missing] == ["dropout inside attention"]
    assert any(f"the schedule {schedule}" in name for name in configs.of("megatron").missing)
    titan = configs.of("torchtitan")
    by_file = "pipeline_parallel_schedule_csv" in tomllib.loads(titan.text)["parallelism"]
    assert (
        by_file == (schedule in ("zb-h1", "v-half")) == any(f"the schedule {schedule}" in key for key in titan.missing)
    )
    assert any("ZeRO 1" in name for name in titan.missing)
    assert all(some(name in config.text for config in configs.configs for name in config.missing))


def test_torchrun_starts_every_node() -> None:
    assert torchrun(small_cluster(8)).startswith("torchrun --nnodes 2 --nproc-per-node 4 ")
    assert torchrun(small_cluster(4)) == "torchrun --standalone --nproc-per-node 4"


def test_json_has_the_layout_and_its_items() -> None:
    found = planned()
    figures = brief(found).to_json()
    chosen = figures["chosen"]
    assert sum(chosen["seconds"].values()) == pytest.approx(chosen["step_seconds"])
    assert sum(chosen["bytes"].values()) == pytest.approx(chosen["peak_bytes"])
    assert figures["best"][0]["why"] == ""
    assert all(some(value["why"] for value in figures["best"][1:]))


@long
@pytest.mark.slow
def test_the_real_estimate_keeps_to_what_the_survey_takes_for_true() -> None:
    transformer, machines = model("gpt-1.7b"), cluster("a100-40", 16)
    limit = 0.9 * machines.device.memory_bytes
    survey = Survey(transformer, machines, 32, Pins(microbatch=2))
    expected = brute_force(transformer, machines, 32, Pins(microbatch=2), estimate, limit)
    assert [choice.layout for choice in survey.best(limit, top=4)] == [choice.layout for choice in expected[:4]]


def test_what_is_weighed_is_what_is_estimated() -> None:
    for name in ("gpt-1.7b", "mixtral-8x7b", "deepseek-v3"):
        every = list(layouts(model(name), cluster("a100-40", 16), 16, Pins(microbatch=1)))
        for layout in some(every[::37]):
            held = estimate(model(name), cluster("a100-40", 16), layout).bytes.total
            assert peak_bytes(model(name), layout) == pytest.approx(held)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(1, 4), (2, 4), (4, 8), (5, 20), (8, 16)])
def test_v_half_by_formula_is_v_half_by_simulation(num_ranks: int, num_microbatches: int) -> None:
    for forward, middle, weight in ((1.0, 1.0, 1.0), (1.0, 1.2, 0.9), (1.0, 2.1, 0.9)):
        stages = [Ops(Spent(forward), Spent(), Spent(middle), Spent(weight))] * (2 * num_ranks)
        pace = Pace(num_ranks, 2 * forward, 2 * middle, 2 * weight)
        formula = find("v-half").makespan
        assert formula is not None
        found = formula(Paces([pace], num_microbatches, 2))
        assert found == pytest.approx(simulated("v-half", stages, num_ranks, num_microbatches).makespan, rel=0.04)
    program = generate("v-half", num_ranks=num_ranks, num_microbatches=num_microbatches)
    held = max(pairs_held("v-half", rank, num_ranks, num_microbatches, 2) for rank in range(num_ranks))
    assert held == max(simulate(program).peak_activations)


@long
@pytest.mark.slow
def test_the_choice_is_as_good_as_the_exact_best_of_all() -> None:
    transformer, machines, pins = model("gpt-1.7b"), cluster("a100-40", 8), Pins(microbatch=1, zero=1)
    found = plan(transformer, machines, batch=16, pins=pins)

    def exact(transformer: Transformer, machines: Cluster, layout: Layout) -> Estimate:
        return estimate(transformer, machines, layout, exact=True)

    best = brute_force(transformer, machines, 16, pins, exact, found.limit_bytes)[0]
    assert found.chosen.is_exact
    assert found.chosen.seconds <= 1.001 * best.seconds


def test_configs_of_hugging_face_become_transformers() -> None:
    mixtral = transformer_of(
        {
            "model_type": "mixtral",
            "num_hidden_layers": 32,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "intermediate_size": 14336,
            "vocab_size": 32000,
            "max_position_embeddings": 4096,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
        },
        name="mixtral-8x7b",
    )
    assert mixtral == model("mixtral-8x7b")
    small = {"n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}
    gpt = transformer_of({"model_type": "gpt2", **small}, name="gpt2")
    assert (gpt.gated, gpt.tied, gpt.learned_positions, gpt.feedforward) == (False, True, True, 3072)
    with refused(PlanError, "no num_hidden_layers or n_layer"):
        transformer_of({"model_type": "gpt2"}, name="empty")
    with refused(PlanError, "n_layer is '12'"):
        transformer_of({"n_layer": "12"}, name="words")
