"""MFU and HFU: what a model needs and what devices run, counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster_models import GIB, small_cluster
from drumline.plan.cluster.adapters import with_adapters
from drumline.plan.cluster.estimate import device_flops
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.transformer import ExpertShape, Transformer, model_flops
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import ClusterPlan, plan

# 4 layers of width 256: 4 heads of 64 on 2 of keys and values, feed-forward 512, gated; 128 tokens.
GPT = Transformer(
    "by hand",
    4,
    256,
    4,
    1024,
    128,
    2,
    512,
    gated=True,
    tied=False,
    learned_positions=False,
    biased=False,
    dropout=False,
)
WEIGHTS = 256 * (256 + 2 * 128) + 256 * 256 + 3 * 256 * 512
HEAD = 256 * 1024
PAIRS = 2 * 2 * 128 * 128 * 256  # scores and their products with values, of every token with every other: one layer
TOKENS = 8 * 128


def test_a_model_needs_three_passes_and_half_of_the_pairs() -> None:
    assert model_flops(GPT, 8, causal=True) == 6 * TOKENS * (4 * WEIGHTS + HEAD) + 3 * 8 * 4 * PAIRS / 2


@pytest.mark.parametrize(
    "layout",
    [
        Layout(8, data=8),
        Layout(8, tensor=2, pipeline=2, data=2, counts=(2, 2)),
        Layout(8, 2, pipeline=4, data=2, counts=(0, 2, 2, 0)),
        Layout(8, pipeline=2, data=4, schedule="dualpipe", counts=(2, 2)),
    ],
)
def test_devices_run_fused_attentions_scores_again_and_what_is_recomputed(layout: Layout) -> None:
    # Fused, a backward has five products for the two of a forward: 3.5 forwards in all.
    plain = 6 * TOKENS * (4 * WEIGHTS + HEAD) + 3.5 * 8 * 4 * PAIRS / 2
    assert device_flops(GPT, layout) * 8 == pytest.approx(plain)
    again = 2 * TOKENS * WEIGHTS + 8 * PAIRS / 2
    assert device_flops(GPT, replace(layout, recompute="full")) * 8 == pytest.approx(plain + 4 * again)
    assert device_flops(GPT, replace(layout, recompute="selective")) * 8 == pytest.approx(plain)
    assert device_flops(GPT, replace(layout, recompute="attention")) * 8 == pytest.approx(plain + 4 * 8 * PAIRS / 2)


def test_some_layers_of_every_stage_run_again() -> None:
    layout = Layout(8, pipeline=2, data=4, counts=(1, 3), recompute="full:2")
    more = device_flops(GPT, layout) - device_flops(GPT, replace(layout, recompute="none"))
    assert more * 8 == pytest.approx(3 * (2 * TOKENS * WEIGHTS + 8 * PAIRS / 2))


def test_attention_that_is_not_fused_computes_what_is_masked() -> None:
    layout = Layout(8, data=8, practice=Practice(flash_attention=False))
    assert device_flops(GPT, layout) * 8 == pytest.approx(6 * TOKENS * (4 * WEIGHTS + HEAD) + 3 * 8 * 4 * PAIRS)


def test_experts_run_for_the_tokens_that_they_get() -> None:
    sparse = replace(GPT, experts=ExpertShape(8, 2, 128, 1), num_dense_layers=1)
    attention, experts = WEIGHTS - 3 * 256 * 512, 256 * 8 + 3 * 3 * 256 * 128
    layout = Layout(8, data=8, expert=4)
    weights = 4 * attention + 3 * 256 * 512 + 3 * experts
    assert device_flops(sparse, layout) * 8 == pytest.approx(6 * TOKENS * (weights + HEAD) + 3.5 * 8 * 4 * PAIRS / 2)


def test_a_frozen_base_has_no_gradients_of_weights() -> None:
    tuned = with_adapters(GPT, 8)
    assert tuned.frozen_base is not None
    adapters = tuned.frozen_base.trainable_share * 4 * WEIGHTS
    ran = device_flops(tuned, Layout(8, data=8)) * 8
    assert ran == pytest.approx(TOKENS * (4 * (4 * WEIGHTS + HEAD) + 6 * adapters) + 3.5 * 8 * 4 * PAIRS / 2)


def planned(**pins: object) -> ClusterPlan:
    return plan(GPT, small_cluster(memory=GIB), batch=8, pins=Pins(**pins), top=1)  # type: ignore[arg-type]


def test_plans_say_both_shares_of_the_peak() -> None:
    found = planned(recompute="full", tensor=1, pipeline=1)
    peak = found.cluster.device.flops_per_second
    needed = model_flops(GPT, 8, causal=True) / 8 / found.chosen.seconds / peak
    assert found.mfu(found.chosen) == pytest.approx(needed)
    assert found.hfu(found.chosen) / needed == pytest.approx(
        device_flops(GPT, found.chosen.layout) * 8 / model_flops(GPT, 8, causal=True)
    )
    assert 1.2 < found.hfu(found.chosen) / needed < 1.4
    assert found.utilisation_words(found.chosen) == f"MFU {needed:.1%}, HFU {found.hfu(found.chosen):.1%}"


def test_long_sequences_do_not_count_what_is_masked() -> None:
    """At a million tokens nearly all is attention: of its pairs the model needs half, and 77% of a peak were 39%."""
    long = replace(GPT, sequence=2**20)
    assert model_flops(long, 1, causal=True) / model_flops(long, 1) == pytest.approx(0.5, abs=0.01)
    layout = Layout(1, context=8, practice=Pins().practice)
    assert device_flops(long, layout) * 8 / model_flops(long, 1, causal=True) == pytest.approx(3.5 / 3, abs=0.01)
