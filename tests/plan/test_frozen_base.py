"""Adapters over a frozen base: seconds and bytes of the cluster model beside values computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drumline.core.errors import PlanError
from drumline.plan.cluster import kernels
from drumline.plan.cluster.adapters import lora_parameters, projections, with_adapters
from drumline.plan.cluster.device_memory import base_bytes, device_bytes, device_parameters, trained_parameters
from drumline.plan.cluster.estimate import STEP_BYTES, estimate
from drumline.plan.cluster.frozen_base import BASES, FrozenBase
from drumline.plan.cluster.hardware import Cluster, Device, DeviceLink, Reach
from drumline.plan.cluster.kernels import embedding_ops, head_ops, product_seconds
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.loads import data_exchange, exchanging, tied_exchange
from drumline.plan.cluster.models import model
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.spent import Ops
from drumline.plan.cluster.stages import Alike, alike, counts_of
from drumline.plan.cluster.transformer import ExpertShape, LatentAttention, Transformer, model_flops
from refused import refused


def layer_ops(transformer: Transformer, cluster: Cluster, layout: Layout) -> Ops:
    return kernels.layer_ops(transformer, cluster, layout.share, experts=False, recomputed=())


# A device without overheads: a byte a second from memory, an operation a second, and no wave is partly empty.
IDEAL = Device("ideal", 1.0, 1e30, 1.0, 1e-12, Reach(1.0, 0.0, 1.0, 1.0, 0.0))  # type: ignore[arg-type]
BARE = Practice(overlap_data=False, host_seconds=0.0, meet_seconds=0.0)
# 2 layers of width 256: 4 heads of 64 on 2 heads of keys and values, feed-forward 512, 128 tokens.
GPT = Transformer(
    "by hand", 2, 256, 4, 1024, 128, 2, 512, tied=False, learned_positions=False, biased=False, dropout=False
)
# Inputs and outputs of the products of a layer: queries, keys and values together; out; up; down.
SHAPES = [(256, 512), (256, 256), (256, 512), (512, 256)]
WEIGHTS = 256 * 512 + 256 * 256 + 2 * 256 * 512
NORMS, TABLE = 2 * 256, 1024 * 256
# As many parameters as the base, so that no thin product is thinner than a tile.
WIDE = replace(GPT, frozen_base=FrozenBase(1.0))


def machines(num_devices: int = 1) -> Cluster:
    return Cluster(IDEAL, num_devices, 64, DeviceLink(0.0, 1.0), DeviceLink(0.0, 0.5))


def rank_of(transformer: Transformer, layout: Layout, at: int = 0) -> Alike:
    counts = counts_of(transformer, layout)
    return alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)[at]


def test_adapters_add_thin_products_and_a_sum_to_both_passes_and_are_all_of_w() -> None:
    layout = Layout(batch=1, practice=BARE)
    full, tuned = (layer_ops(transformer, machines(), layout) for transformer in (GPT, WIDE))
    products = 2 * 128 * WEIGHTS
    assert full.backward_weight.total == pytest.approx(products)
    assert tuned.backward_weight.total == pytest.approx(products)
    sums = sum(3 * 2 * 128 * outputs for _, outputs in SHAPES)
    assert tuned.forward.total - full.forward.total == pytest.approx(products + sums)
    sums = sum(3 * 2 * 128 * inputs for inputs, _ in SHAPES)
    assert tuned.backward_input.total - full.backward_input.total == pytest.approx(products + sums)


def test_w_of_a_small_share_is_that_of_tiles() -> None:
    tuned = layer_ops(replace(GPT, frozen_base=FrozenBase(0.01)), machines(), Layout(batch=1, practice=BARE))
    # A tile is 128 wide, however thin the product is.
    assert tuned.backward_weight.total == pytest.approx(sum(2 * 128 * 128 * (i + o) for i, o in SHAPES))
    assert product_seconds(IDEAL, 256, 2, 128) == product_seconds(IDEAL, 256, 128, 128)


def test_f_equals_i_and_w_is_little_for_a_large_model() -> None:
    llama = with_adapters(replace(model("llama-3-8b"), sequence=1024), 16)  # attention itself costs I more than F
    ops = layer_ops(llama, Cluster(IDEAL, 1, 8, DeviceLink(0.0, 1.0), DeviceLink(0.0, 1.0)), Layout(batch=1))
    assert ops.backward_input.total / ops.forward.total == pytest.approx(1.0, rel=0.1)
    assert ops.backward_weight.total < 0.05 * ops.forward.total


def test_embedding_and_head_have_no_weight_gradients() -> None:
    share = Layout(batch=1, practice=BARE).share
    assert embedding_ops(WIDE, machines(), share).backward_weight.total == 0
    frozen, full = head_ops(WIDE, machines(), share), head_ops(GPT, machines(), share)
    assert frozen.backward_weight.total == 0 < full.backward_weight.total
    assert (frozen.forward, frozen.backward_input) == (full.forward, full.backward_input)


@pytest.mark.parametrize(("kind", "weight", "output"), [("int8", 1, 4), ("float8", 1, 4), ("nf4", 0.5625, 0)])
def test_a_quantised_base_is_written_out_in_16_bits_before_each_product(
    kind: str, weight: float, output: float
) -> None:
    layout = Layout(batch=1, practice=BARE)
    plain, packed = (
        layer_ops(replace(WIDE, frozen_base=FrozenBase(1.0, k)), machines(), layout) for k in ("bf16", kind)
    )
    more = sum((weight + 2) * inputs * outputs + output * outputs for inputs, outputs in SHAPES)
    assert packed.forward.total - plain.forward.total == pytest.approx(more)
    assert packed.backward_input.total - plain.backward_input.total == pytest.approx(more)
    assert packed.backward_weight == plain.backward_weight


def test_bytes_of_a_device_are_those_of_adapters_and_of_the_base_by_its_kind() -> None:
    layout = Layout(batch=4, pipeline=2, practice=BARE)
    sizes = {
        "bf16": 2 * WEIGHTS,
        "int8": WEIGHTS + 4 * (512 + 256 + 512 + 256),
        "int4": (0.5 + 4 / 128) * WEIGHTS,
        "nf4": (0.5 + 4 / 64) * WEIGHTS,
    }
    activations = device_bytes(GPT, layout, rank_of(GPT, layout)).activations
    for kind, size in sizes.items():
        tuned = replace(GPT, frozen_base=FrozenBase(0.01, kind))
        held = device_bytes(tuned, layout, rank_of(tuned, layout))
        adapters = 0.01 * WEIGHTS
        assert held.weights == pytest.approx(2 * adapters + size + 2 * (NORMS + TABLE))
        assert held.gradients == pytest.approx(4 * adapters)
        assert held.optimizer == pytest.approx(12 * adapters)
        assert held.activations == activations
        message, out = 4 * 128 * 256, 0 if kind == "bf16" else 2 * 256 * 512
        assert held.buffers == message + out
    assert set(sizes) | {"float8"} == set(BASES)


def test_experts_are_quantised_and_adapted_too() -> None:
    sparse = replace(GPT, gated=True, experts=ExpertShape(8, 2, 128, 1), num_dense_layers=0)
    tuned = replace(sparse, frozen_base=FrozenBase(0.01, "nf4"))
    layout = Layout(batch=4, data=4, expert=4, practice=BARE)
    rank = rank_of(tuned, layout)
    expert, attention = 3 * 256 * 128, 256 * 512 + 256 * 256
    used = attention + 256 * 8 + expert
    assert trained_parameters(tuned, layout, rank) == pytest.approx((0.01 * 2 * used, 0.01 * 2 * 2 * expert))
    beside = 2 * (2 * TABLE + 5 * 256)
    assert base_bytes(tuned, layout, rank) == pytest.approx((0.5625 * 2 * used + beside, 0.5625 * 2 * 2 * expert))
    assert base_bytes(sparse, layout, rank) == (0, 0)
    assert trained_parameters(sparse, layout, rank) == device_parameters(sparse, layout, rank)


def test_ranks_exchange_and_update_adapters_alone_and_zero_3_gathers_the_base() -> None:
    layout = Layout(batch=8, data=4, practice=BARE)
    adapters = 0.01 * 2 * WEIGHTS
    tuned = replace(GPT, frozen_base=FrozenBase(0.01, "nf4"))
    held = estimate(tuned, machines(4), layout)
    assert held.volumes.data == pytest.approx(2 * 4 * adapters * 3 / 4)
    assert held.seconds.optimizer == pytest.approx(STEP_BYTES * adapters)
    divided = device_bytes(tuned, replace(layout, zero=3), rank_of(tuned, layout))
    frozen = 0.5625 * 2 * WEIGHTS + 2 * (2 * NORMS + 2 * TABLE + 256)
    assert divided.weights == pytest.approx((2 * adapters + frozen) / 4)
    gathered = data_exchange(exchanging(machines(4), replace(layout, zero=3)), (10.0, 0.0), 0.0, 0.0, 1, (600.0, 0.0))
    assert gathered.forward == gathered.backward - 4 * 10 * 3 / 4 == (2 * 10 + 600) * 3 / 4
    once = data_exchange(exchanging(machines(4), replace(layout, zero=1)), (10.0, 0.0), 0.0, 0.0, 1, (600.0, 0.0))
    assert once.once == (4 * 10 + 2 * 10) * 3 / 4


def test_a_frozen_tied_embedding_is_not_exchanged() -> None:
    layout = Layout(batch=4, pipeline=2, practice=BARE)
    tied = replace(GPT, tied=True)
    assert tied_exchange(tied, machines(2), layout).bytes > 0
    assert tied_exchange(replace(tied, frozen_base=FrozenBase(0.01)), machines(2), layout).bytes == 0


def test_a_split_backward_fills_nothing_and_more_stages_do() -> None:
    cards = Cluster(IDEAL, 4, 8, DeviceLink(0.0, 1e30), DeviceLink(0.0, 1e30))
    tuned = with_adapters(replace(GPT, num_layers=16, vocabulary=1), 8)

    def seconds(transformer: Transformer, schedule: str, stages_per_rank: int = 1) -> float:
        layout = Layout(16, pipeline=4, schedule=schedule, stages_per_rank=stages_per_rank, practice=BARE)
        return estimate(transformer, cards, layout, exact=True).seconds.total

    assert seconds(tuned, "zb-h1") == pytest.approx(seconds(tuned, "1f1b"))
    full = replace(tuned, frozen_base=None)
    assert seconds(full, "zb-h1") < 0.95 * seconds(full, "1f1b")
    # 16 microbatches and three more of idle time, or half of them.
    assert seconds(tuned, "interleaved-1f1b", 2) / seconds(tuned, "1f1b") == pytest.approx(17.5 / 19, rel=0.01)
    assert seconds(tuned, "zb-v", 2) < 0.95 * seconds(tuned, "1f1b")


def test_operations_of_a_step() -> None:
    attention = 2 * 128 * 128 * 4 * 128 * 2
    base, adapters = 2 * WEIGHTS + TABLE, 0.01 * 2 * WEIGHTS
    tuned = replace(GPT, frozen_base=FrozenBase(0.01))
    assert model_flops(tuned, 1) == pytest.approx(3 * attention + 128 * (4 * base + 6 * adapters))


def test_parameters_of_lora_are_its_rank_for_every_input_and_output() -> None:
    attention = 2 * (256 + 256) + 2 * (256 + 128)
    assert lora_parameters(GPT, 8) == 2 * 8 * (attention + 2 * (256 + 512))
    assert lora_parameters(GPT, 8, ["q_proj", "v_proj"]) == 2 * 8 * (256 + 256 + 256 + 128)
    assert lora_parameters(GPT, 8, "o_proj") == 2 * 8 * 512
    latent = replace(
        GPT, latent=LatentAttention(queries=384, keys_values=128, head=128, rotary_head=128, value_head=64)
    )
    assert lora_parameters(latent, 1, "kv_b_proj") == 2 * (128 + 4 * (128 + 64))
    direct = replace(latent, latent=replace(latent.latent, queries=0))  # type: ignore[type-var]
    assert [item.name for item in projections(direct)][:3] == ["kv_a_proj_with_mqa", "q_proj", "kv_b_proj"]
    sparse = replace(GPT, gated=True, experts=ExpertShape(8, 2, 128, 1), num_dense_layers=1)
    assert lora_parameters(sparse, 1, "down_proj") == (512 + 256) + 9 * (128 + 256)
    assert lora_parameters(sparse, 1) == lora_parameters(sparse, 1, [item.name for item in projections(sparse)][:4]) + (
        3 * (256 + 512) + 9 * 3 * (256 + 128)
    )


@pytest.mark.parametrize("name", ["gpt-1.7b", "llama-3-8b", "mixtral-8x7b", "deepseek-v3"])
def test_projections_are_the_products_that_the_model_has(name: str) -> None:
    transformer = model(name)
    weights = sum(item.times * item.inputs * item.outputs for item in projections(transformer))
    layout = Layout(batch=1, practice=BARE)
    tuned = replace(transformer, frozen_base=FrozenBase(1.0))
    assert sum(trained_parameters(tuned, layout, rank_of(tuned, layout))) == pytest.approx(weights)


def test_refusals() -> None:
    with refused(PlanError, "trainable_share is 0"):
        FrozenBase(0)
    with refused(PlanError, "unknown base 'nf3'", fix="nf4"):
        FrozenBase(0.1, "nf3")
    with refused(PlanError, "the rank of an adapter is 0"):
        lora_parameters(GPT, 0)
    with refused(PlanError, "by hand has no linear layers named 'k_prj'", fix="k_proj"):
        lora_parameters(GPT, 1, ["k_prj"])
    with refused(PlanError, "adapters of rank 4096 have"):
        with_adapters(GPT, 4096)
