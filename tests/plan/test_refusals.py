"""What planning refuses: each value just outside of what it can be, and none of those just inside."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from cluster_models import Rough, small_cluster, small_transformer
from drumline.core.costs import Costs
from drumline.core.errors import CostsError, DrumlineError, ModelError, PlanError
from drumline.core.placement import Placement
from drumline.plan.cluster.hardware import REACH, Device, DeviceLink
from drumline.plan.cluster.hugging_face import transformer_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.stages import layer_counts
from drumline.plan.cluster.transformer import Details, ExpertShape, LatentAttention
from drumline.plan.device.candidate import Candidate
from drumline.plan.device.plan import Plan, StepSeconds
from drumline.plan.device.planner import plan as plan_profile
from drumline.plan.launch.launch import launch, place
from drumline.plan.launch.titan import described
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import plan
from drumline.plan.layouts.why import why
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.objective import Jitter, Objective
from drumline.plan.search.search import placement_named
from profiles import model_profile
from refused import refused, saying

MIB = 2**20
GPT, MACHINES = small_transformer(), small_cluster()
CONFIG = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 100}
PROFILE = model_profile([1.0, 2.0, 3.0])
INSTANCE = Instance(Costs(), Placement.linear(2), num_microbatches=2)


def device(**given: Any) -> Device:
    return replace(MACHINES.device, **given)


def latent(**given: int) -> LatentAttention:
    widths = {"queries": 0, "keys_values": 1, "head": 1, "rotary_head": 1, "value_head": 1}
    return LatentAttention(**{**widths, **given})


def planned(**given: Any) -> Any:
    return plan(GPT, MACHINES, **{"batch": 8, "surveyed": Rough().surveyed, "headroom": 0.0, "top": 1, **given})


CASES: list[tuple[Callable[[Any], Any], list[Any], list[Any]]] = [
    (lambda value: DeviceLink(value, 1.0), [0.0, 1.0], [-1e-9, math.inf, math.nan]),
    (lambda value: DeviceLink(0.0, 1.0, value), [0.0, 1.0], [-1e-9, math.inf]),
    (lambda value: DeviceLink(0.0, value), [1e-9, math.inf], [0.0, -1.0]),
    (lambda value: replace(REACH, product=value), [1e-9, 1.0], [0.0, 1.1]),
    (lambda value: replace(REACH, depth=value), [0.0, 1.0], [-1e-9, math.inf]),
    (lambda value: replace(REACH, launch_seconds=value), [0.0, 1.0], [-1e-9, math.inf]),
    (lambda value: device(fp8_flops_per_second=value), [0.0, 1.0], [-1.0, math.inf]),
    (lambda value: device(num_processors=value), [1], [0, math.inf]),
    (lambda value: device(memory_bytes=value), [1.0], [0.0, math.inf]),
    (lambda value: latent(queries=value), [0, 1], [-1]),
    (lambda value: latent(value_head=value), [1], [0]),
    (lambda value: latent(keys_values=value), [1], [0]),
    (lambda value: ExpertShape(4, value, 8), [1, 4], [0, 5]),
    (lambda value: ExpertShape(4, 1, value), [1], [0]),
    (lambda value: ExpertShape(4, 1, 8, value), [0, 1], [-1]),
    (lambda value: layer_counts(GPT, value), [1, 12, 14], [0, 13, 15]),
    (lambda value: transformer_of(value, name="it"), [CONFIG], [[], None, {**CONFIG, "rope_theta": "x"}]),
    (lambda value: Pins(tensor=value), [1, None], [0, -1]),
    (lambda value: Pins(stages_per_rank=value), [1, None], [0]),
    (lambda value: Pins(overlaps=value), [(), ("forward",)], [("nothing",)]),
    (lambda value: Pins(framework=value), ["", "torchtitan"], ["nothing"]),
    (lambda value: Pins(precision=value), ["bf16"], ["nothing"]),
    (lambda value: planned(batch=value), [8], [0]),
    (lambda value: planned(top=value), [1], [0]),
    (lambda value: planned(headroom=value), [0.0], [-0.1, 1.0]),
    (lambda value: planned(pins=Pins(pipeline=value)), [8], [16]),
    (lambda value: placement_named(value, 2, 2), ["linear", "loop", "v", "bidirectional"], ["nothing"]),
    (lambda value: placement_named("linear", 2, 2, value), [None, 1], [0, 2]),
    (lambda value: placement_named("bidirectional", value, 2), [2, 4], [1, 3]),
    (lambda value: placement_named("bidirectional", 2, value), [2, 3], [1]),
    (lambda value: place(Layout(batch=8, data=8, counts=(12,)), MACHINES, value), [0, 7], [-1, 8]),
    (lambda value: plan_profile(PROFILE, num_ranks=2, batch=4, seconds=0.0, schedules=value), [["1f1b"]], [[]]),
]


@pytest.mark.parametrize(("ask", "right", "wrong"), CASES, ids=[str(at) for at in range(len(CASES))])
def test_values_outside_of_their_bounds_are_refused(
    ask: Callable[[Any], Any], right: list[Any], wrong: list[Any]
) -> None:
    for value in right:
        assert ask(value) is not None
    for value in wrong:
        with pytest.raises(DrumlineError):
            ask(value)


def test_a_layout_of_more_stages_than_layers_names_them() -> None:
    with refused(PlanError, "PP is 16, but small has only 12 layers"):
        plan(GPT, small_cluster(16), batch=8, surveyed=Rough().surveyed, pins=Pins(pipeline=16))


def test_memory_is_given_once() -> None:
    asked: dict[str, Any] = {"num_ranks": 2, "batch": 4, "seconds": 0.0, "schedules": ["1f1b"]}
    assert plan_profile(PROFILE, memory_bytes=1e9, **asked)
    assert plan_profile(PROFILE, rank_memory=[1e9, 1e9], **asked)
    with refused(PlanError, "both memory_bytes and rank_memory are set"):
        plan_profile(PROFILE, memory_bytes=1e9, rank_memory=[1e9, 1e9], **asked)


def test_what_a_search_measures_must_be_known() -> None:
    with refused(CostsError, "unknown objective 'makespam'", fix="makespan"):
        Objective(INSTANCE, "makespam")
    assert Jitter([0.1, 0.2]).factors(INSTANCE).shape[0] == INSTANCE.num_actions
    with refused(CostsError, "jitter has 3 values", expected="each of the 2 stages"):
        Jitter([0.1, 0.2, 0.3]).factors(INSTANCE)


def test_cuts_must_cover_all_blocks() -> None:
    profile = PROFILE.at(1)
    assert profile.costs([1, 2])
    for counts in ([1, 1], [3, 0], [2, 2]):
        with refused(ModelError, "counts are"):
            profile.costs(counts)


def test_configs_are_for_frameworks_that_are_known() -> None:
    made = launch(GPT, MACHINES, Layout(batch=8, data=8, counts=(12,)))
    assert made.of("drumline")
    with refused(PlanError, "unknown framework 'dumline'", fix="drumline"):
        made.of("dumline")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("counts", [3], saying("counts has 1 items for 2 stages")),
        ("cuts", [], saying("cuts has 1 items for 2 stages")),
        ("checkpoint", ["full"], saying("checkpoint has 1 items for 2 stages")),
        ("checkpoint", ["full", "half"], saying(r"checkpoint\[1\] is 'half'", expected="full or none")),
        ("limits", [1.0], saying("limits has 1 items for 2 ranks")),
        ("rows", ["0F0,0X0", "1F0"], saying("a damaged plan: its program")),
    ],
)
def test_a_plan_whose_parts_do_not_fit_each_other_is_damaged(key: str, value: Any, reason: dict[str, str]) -> None:
    found = plan_profile(PROFILE, num_ranks=2, batch=4, seconds=0.0, schedules=["1f1b"], memory_bytes=1e9).best
    table = json.loads(found.to_json())
    key = next(name for name in (key, "program") if name in table)
    with refused(PlanError, **reason):
        Plan.from_json(json.dumps({**table, key: value}))


def test_a_layout_as_fast_says_what_it_holds() -> None:
    found: Choice = planned().chosen
    gib = 2**30

    def holding(more: float) -> Choice:
        held = replace(found.estimate.bytes, weights=found.estimate.bytes.weights + more * gib)
        return replace(found, estimate=replace(found.estimate, bytes=held))

    limit = found.bytes + 9 * gib
    assert why(found, holding(1.0), limit) == "just as fast, but holds 1.0 GiB more"
    assert why(holding(1.0), found, limit) == "0.00% slower, but holds 1.0 GiB less"
    assert why(found, holding(0.04), limit) == why(holding(0.04), found, limit) == "just as fast, with the same memory"


def told(seconds: float, peak: float, sent: float, *, fits: bool = True) -> Any:
    items = StepSeconds(*[seconds] + [0.0] * (len(fields(StepSeconds)) - 1))
    return SimpleNamespace(
        step_seconds=seconds, peak=peak, sent_bytes=sent, fits=fits, over=(1, 3 * MIB), seconds=items
    )


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (told(1.0, 100.0 * MIB, 0.0, fits=False), "rank 1 is 3.0 MiB over"),
        (told(0.995, 102.0 * MIB, 0.0), "<1% faster, but holds 2.0 MiB more"),
        (told(0.995, 100.5 * MIB, 5 * MIB), "<1% faster, but sends 4.0 MiB more"),
        (told(1.0, 100.5 * MIB, MIB), "<1% faster"),
        (told(1.25, 100.0 * MIB, 0.0), "computes 250.0 ms longer"),
    ],
)
def test_why_a_candidate_loses_is_the_first_thing_that_speaks_against_it(other: Any, words: str) -> None:
    """Peaks within one percent are equal."""
    assert Candidate._against(other, told(1.0, 100.0 * MIB, MIB)) == words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"details": Details(qk_norm=True)}, "norms of queries and keys"),
        ({"details": Details(qkv_bias=True)}, "biases of queries"),
        ({"details": Details(alibi=True)}, "ALiBi positions"),
        ({"learned_positions": False}, "rotary positions"),
        ({"learned_positions": False, "details": Details(rotary_base=1e4)}, "rotary positions of base 10000"),
        ({"num_key_value_heads": 2}, "8 heads of 128 on 2 of keys and values"),
        ({"gated": True}, "gated feed-forward 4096"),
        ({"experts": ExpertShape(8, 2, 512)}, "2 of 8 experts of 512"),
        ({"experts": ExpertShape(8, 2, 512, 1)}, "2 of 8 experts of 512 and 1 shared"),
        ({"experts": ExpertShape(8, 2, 512), "num_dense_layers": 3}, "the first 3 layers without experts"),
        ({"tied": False}, "not tied"),
        ({"details": Details(others=("a window of 4096",))}, "a window of 4096"),
    ],
)
def test_a_transformer_is_described_by_what_sets_it_apart(changes: dict[str, Any], words: str) -> None:
    plain = described(small_transformer()).split(", ")
    found = described(small_transformer(**changes)).split(", ")
    assert words in found
    assert words not in plain
    assert len(set(plain) - set(found)) <= 1


@pytest.mark.parametrize("name", ["biased", "dropout"])
def test_what_a_transformer_does_without_is_not_described(name: str) -> None:
    word = {"biased": "biases", "dropout": "dropout"}[name]
    assert word in described(small_transformer(**{name: True})).split(", ")
    assert word not in described(small_transformer(**{name: False})).split(", ")
