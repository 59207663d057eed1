"""Every formula of the cluster model beside a value computed by hand, with numbers small enough to follow."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster_models import activation_bytes
from drumline.core.errors import PlanError
from drumline.plan.cluster import kernels
from drumline.plan.cluster.device_memory import device_bytes, device_parameters, sharded
from drumline.plan.cluster.estimate import STEP_BYTES, estimate
from drumline.plan.cluster.hardware import Cluster, Device, DeviceLink, Reach
from drumline.plan.cluster.kernels import (
    CONTENTION,
    attention_seconds,
    exposed,
    gather_seconds,
    memory_seconds,
    product_seconds,
    reduce_seconds,
)
from drumline.plan.cluster.layers import fp8_weights, keys_of, ring_bytes, routed_bytes, tokens_of
from drumline.plan.cluster.layout import WHOLE, Layout, recomputed_ops
from drumline.plan.cluster.loads import (
    data_exchange,
    device_volumes,
    exchanging,
    hop_seconds,
    message_bytes,
    tied_exchange,
)
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.spent import Ops
from drumline.plan.cluster.stages import Alike, alike, counts_of, head_weight, slices_of
from drumline.plan.cluster.transformer import ExpertShape, LatentAttention, Transformer, model_flops
from refused import refused

# A device without overheads: a byte a second from memory, an operation a second. So few processors that no wave is
# partly empty.
IDEAL = Device("ideal", 1.0, 1e30, 1.0, 1e-12, Reach(1.0, 0.0, 1.0, 1.0, 0.0))  # type: ignore[arg-type]
BARE = Practice(
    overlap_tensor=False,
    overlap_data=False,
    overlap_pipeline=False,
    scatter_gather=False,
    host_seconds=0.0,
    host_meets=0.0,
    meet_seconds=0.0,
)
# 2 layers of width 256: 4 heads of 64 on 2 heads of keys and values, feed-forward 512, 128 tokens.
GPT = Transformer(
    "by hand", 2, 256, 4, 1024, 128, 2, 512, tied=False, learned_positions=False, biased=False, dropout=False
)
# The same, gated, with 8 experts of width 128, of which a token uses 2, and one shared.
MOE = replace(GPT, gated=True, experts=ExpertShape(8, 2, 128, 1), num_dense_layers=0)
# GPT with latent attention: 384 numbers for queries, 128 for keys and values; heads of 128 and 128 more with positions,
# values of 64. The widths of a head's queries and keys are 256, of queries, keys and values of all heads 2,304.
LATENT = replace(GPT, latent=LatentAttention(queries=384, keys_values=128, head=128, rotary_head=128, value_head=64))
DOWN, UP, OUT = 256 * 384 + 256 * (128 + 128), 384 * 4 * 256 + 128 * 4 * (128 + 64), 4 * 64 * 256


def machines(num_devices: int, per_node: int = 64, latency: float = 0.0, start: float = 0.0) -> Cluster:
    return Cluster(IDEAL, num_devices, per_node, DeviceLink(latency, 1.0, start), DeviceLink(latency, 0.5, start))


def layer_ops(transformer: Transformer, cluster: Cluster, layout: Layout, *, experts: bool = False) -> Ops:
    again = WHOLE if layout.recompute == "full" else recomputed_ops(layout)
    return kernels.layer_ops(transformer, cluster, layout.share, experts=experts, recomputed=again)


def embedding_ops(transformer: Transformer, cluster: Cluster, layout: Layout) -> Ops:
    return kernels.embedding_ops(transformer, cluster, layout.share)


def head_ops(transformer: Transformer, cluster: Cluster, layout: Layout) -> Ops:
    return kernels.head_ops(transformer, cluster, layout.share)


def rank_of(transformer: Transformer, layout: Layout, at: int = 0) -> Alike:
    counts = counts_of(transformer, layout)
    return alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)[at]


def test_kernels() -> None:
    device = Device("d", 100.0, 1.0, 10.0, 2, Reach(0.5, 128.0, 0.8, 0.25, 0.001))
    # 256 x 384 in tiles of 128: 6 tiles on 2 processors are 3 waves, and half a wave more is lost.
    busy = 2 * 256 * 384 * (512 + 128) / 50 * 3.5 / 3
    assert product_seconds(device, 256, 384, 512) == pytest.approx(busy + 0.001)
    # One row: a whole tile high, and 8 tiles wide; here the product is deep enough to hide the bytes.
    assert product_seconds(device, 1, 1024, 64) == pytest.approx(2 * 128 * 1024 * 192 / 50 * 4.5 / 4 + 0.001)
    assert memory_seconds(device, 16) == 2.0
    assert attention_seconds(device, 50) == pytest.approx(2.001)


def test_collectives() -> None:
    link = DeviceLink(0.25, 2.0, 1.0)
    assert gather_seconds(link, 4, 16.0) == 1 + 3 * (0.25 + 4 / 2)
    assert reduce_seconds(link, 4, 16.0) == 1 + 2 * 3 * (0.25 + 4 / 2)  # a tree takes 1 + 2 * (2 * 0.25 + 8)
    assert reduce_seconds(link, 16, 0.8) == 1 + 2 * (4 * 0.25 + 0.4)  # a ring takes 1 + 2 * 15 * (0.25 + 0.025)
    assert gather_seconds(link, 1, 16.0) == reduce_seconds(link, 1, 16.0) == 0.0
    assert link.seconds(3.0) == 1.75  # a message between two ranks has no collective's start
    assert exposed(10.0, 4.0) == 6 + CONTENTION * 4


def test_tokens_keys_and_messages() -> None:
    layout = Layout(batch=12, microbatch=3, tensor=2, context=4, practice=BARE)
    assert tokens_of(GPT, layout) == 3 * 128 / 4
    assert keys_of(GPT, layout) == 2 * 64 * 1
    assert keys_of(GPT, replace(layout, tensor=4)) == 2 * 64 * 1  # two ranks share a head: each has a copy
    assert ring_bytes(GPT, layout) == 2 * 3 * 128 * 128
    assert message_bytes(GPT, layout) == 2 * 96 * 256
    assert message_bytes(GPT, replace(layout, sequence_parallel=True)) == 2 * 96 * 256 / 2
    assert routed_bytes(MOE, replace(layout, expert=4)) == 2 * 96 * 2 * 256 * 3 / 4
    assert routed_bytes(MOE, replace(layout, expert=4, sequence_parallel=True)) == 2 * 96 * 2 * 256 * 3 / 4 / 2
    assert routed_bytes(GPT, layout) == 0.0


def test_a_dense_layer() -> None:
    layout = Layout(batch=1, practice=BARE)
    ops = layer_ops(GPT, machines(1), layout)
    weights = 256 * (256 + 256) + 256 * 256 + 2 * 256 * 512  # qkv, out, up and down
    attention = 4 * 4 * 128 * 128 * 64 / 2
    heads = 256 + 256
    passes = 2 * 128 * (10 * 256 + 2 * heads + 2 * 512)
    back = 2 * 128 * (12 * 256 + 2 * heads + 3 * 512)
    assert ops.forward.compute == pytest.approx(2 * 128 * weights + passes + attention)
    assert ops.backward_input.compute == pytest.approx(2 * 128 * weights + back + 2.5 * attention)
    assert ops.backward_weight.compute == pytest.approx(2 * 128 * weights)
    assert ops.again.total == 0
    summed = layer_ops(GPT, machines(1), replace(layout, practice=replace(BARE, accumulation_bytes=6)))
    added = summed.backward_weight.compute - ops.backward_weight.compute
    assert added == pytest.approx(6 * (weights + 2 * 256))


def test_tensor_parallel_exchanges() -> None:
    layout, size = Layout(batch=1, tensor=2, practice=BARE), 2 * 128 * 256
    ring = 2 * 1 * size / 2
    plain = layer_ops(GPT, machines(2), layout)
    assert (plain.forward.tensor, plain.backward_input.tensor) == (2 * ring, 2 * ring)
    divided = layer_ops(GPT, machines(2), replace(layout, sequence_parallel=True))
    assert (divided.forward.tensor, divided.backward_input.tensor) == (2 * ring, 3 * ring)
    hidden = layer_ops(GPT, machines(2), replace(layout, practice=replace(BARE, overlap_tensor=True)))
    assert hidden.backward_input.tensor == pytest.approx(CONTENTION * 2 * ring)  # products take longer than that
    met = layer_ops(GPT, machines(2), replace(layout, practice=replace(BARE, meet_seconds=5.0)))
    assert met.forward.tensor == 2 * (ring + 5)


def test_the_host_is_a_floor_of_every_pass() -> None:
    practice = replace(BARE, host_seconds=1e12, host_meets=0.25)
    for tensor, floor in ((1, 1e12), (4, 1.75e12)):
        layout = Layout(batch=1, tensor=tensor, recompute="full", practice=practice)
        ops = layer_ops(replace(GPT, num_key_value_heads=4), machines(tensor), layout)
        every = (ops.forward.total, ops.again.total, ops.backward_input.total, ops.backward_weight.total)
        assert every == pytest.approx((floor,) * 4)


def test_split_backwards_leave_nothing_to_hide_tensor_parallel_exchanges_behind() -> None:
    practice, size = replace(BARE, overlap_tensor=True), 2 * 128 * 256
    layout = Layout(batch=2, tensor=2, pipeline=2, schedule="zb-h1", practice=practice)
    ring = 2 * 1 * size / 2
    assert layer_ops(GPT, machines(4), layout).backward_input.tensor == 2 * ring
    assert head_ops(GPT, machines(4), layout).backward_input.tensor == ring
    whole = replace(layout, schedule="1f1b")
    assert layer_ops(GPT, machines(4), whole).backward_input.tensor == pytest.approx(CONTENTION * 2 * ring)
    assert head_ops(GPT, machines(4), whole).backward_input.tensor == pytest.approx(CONTENTION * ring)


def test_context_parallel_ranks_wait_for_gathered_keys_and_values() -> None:
    layout = Layout(batch=1, context=4, practice=replace(BARE, meet_seconds=5.0))
    link = DeviceLink(0.25, 2.0, 1.0)
    around = 1 + 3 * (0.25 + 2 * 128 * 256 / 4 / 2)  # three hops, each with a quarter of the keys and values
    ops = layer_ops(GPT, replace(machines(4), intra_node=link), layout)
    assert (ops.forward.context, ops.backward_input.context) == (around + 5, 2 * (around + 5))
    alone = layer_ops(GPT, machines(1), Layout(batch=1, practice=BARE))
    assert alone.forward.context == alone.backward_input.context == 0.0
    launched = replace(machines(4), device=replace(machines(4).device, reach=Reach(1.0, 0.0, 1.0, 1.0, 7.0)))
    again = replace(layout, recompute="attention")
    attention = 4 * 4 * 32 * 128 * 64 / 2  # 4 heads, a quarter of the queries, all keys
    repeated = layer_ops(GPT, launched, again).again
    assert repeated.compute == attention + 2 * 7  # two pieces of a sequence, two kernels


def test_context_parallel_rings_hide_behind_attention() -> None:
    layout = Layout(batch=1, context=2, practice=replace(BARE, overlap_context=True))
    ops = layer_ops(GPT, machines(2), layout)
    around = 1 * 2 * 128 * 256 / 2  # half of the keys and values of a sequence
    attention = 4 * 4 * 64 * 128 * 64 / 2
    assert (ops.forward.context, ops.backward_input.context) == (CONTENTION * around, CONTENTION * 2 * around)
    assert around < attention
    slow = replace(machines(2), intra_node=DeviceLink(0.0, 1e-6))
    waited = layer_ops(GPT, slow, layout).forward.context
    assert waited == pytest.approx(1e6 * around - (1 - CONTENTION) * attention)


def test_software_may_hide_more_than_plans_assume() -> None:
    size = 2 * 128 * 256
    practice = replace(BARE, overlap_forward=True, overlap_experts=True)
    layout = Layout(batch=1, tensor=2, practice=practice)
    assert layer_ops(GPT, machines(2), layout).forward.tensor == pytest.approx(CONTENTION * 2 * size)
    spread = Layout(batch=4, expert=4, data=4, practice=practice)
    routing = 2 * routed_bytes(MOE, spread)  # there and back, at a byte a second
    ops = layer_ops(MOE, machines(4), spread, experts=True)
    assert (ops.forward.expert, ops.backward_input.expert) == pytest.approx((CONTENTION * routing,) * 2)
    slow = replace(machines(4), intra_node=DeviceLink(0.0, 1e-6))
    waited = layer_ops(MOE, slow, spread, experts=True).forward
    assert waited.expert == pytest.approx(1e6 * routing - (1 - CONTENTION) * waited.compute)


def test_a_layer_with_experts() -> None:
    layout = Layout(batch=1, expert=4, data=4, practice=BARE)
    ops = layer_ops(MOE, machines(4), layout, experts=True)
    # 128 tokens go to 2 experts each; 2 of the 8 are here, and so many tokens arrive as leave: 128 each.
    assert ops.forward.expert == ops.backward_input.expert == 2 * (2 * 128 * 2 * 256 * 3 / 4)
    attention_weights = 256 * 512 + 256 * 256
    routed = 2 * 3 * 256 * 128
    weights = attention_weights + routed + 3 * 256 * 128
    router = 2 * 128 * 128 * 256  # 8 columns take a whole tile of 128
    attention = 4 * 4 * 128 * 128 * 64 / 2
    passes = 2 * 128 * (10 * 256 + 2 * 512 + 3 * 3 * 128 + 2 * 2 * 256)
    assert ops.forward.compute == pytest.approx(2 * 128 * weights + router + attention + passes)
    again = layer_ops(MOE, machines(4), replace(layout, recompute="experts"), experts=True).again
    assert again.compute == pytest.approx(2 * 128 * routed)
    assert again.expert == ops.forward.expert


def test_a_layer_with_latent_attention() -> None:
    layout = Layout(batch=1, practice=BARE)
    ops = layer_ops(LATENT, machines(1), layout)
    weights = DOWN + UP + OUT + 2 * 256 * 512
    attention = 4 * 128 * 128 * (256 + 64)  # half of the scores, two operations for each
    behind = 4 * 128 * 128 * (3 * 256 + 2 * 64)
    passes = 2 * 128 * (10 * 256 + 2 * 2304 + 2 * 512 + 2 * (384 + 128))
    back = 2 * 128 * (12 * 256 + 2 * 2304 + 3 * 512 + 3 * (384 + 128))
    assert ops.forward.compute == pytest.approx(2 * 128 * weights + passes + attention)
    assert ops.backward_input.compute == pytest.approx(2 * 128 * weights + back + behind)
    assert ops.backward_weight.compute == pytest.approx(2 * 128 * weights)
    scores = layer_ops(LATENT, machines(1), replace(layout, practice=replace(BARE, flash_attention=False)))
    stored = 2 * 4 * 128 * 128 * (256 + 128) + 2 * 2 * 4 * 128 * 128  # values of 64 take a whole tile of 128
    assert scores.forward.compute == pytest.approx(2 * 128 * weights + passes + stored)
    # With 2 ranks, each has 2 heads and half of the feed-forward, but projects all tokens down with whole weights.
    split = layer_ops(LATENT, machines(2), replace(layout, tensor=2))
    assert split.backward_weight.compute == pytest.approx(2 * 128 * (DOWN + (UP + OUT) / 2 + 256 * 512))
    summed = replace(layout, tensor=2, practice=replace(BARE, accumulation_bytes=6))
    added = layer_ops(LATENT, machines(2), summed).backward_weight.compute - split.backward_weight.compute
    norms = 2 * 256  # of the blocks, divided like all else; those of the latents are whole
    assert added == pytest.approx(6 * (DOWN + 384 + 128 + (UP + OUT + 2 * 256 * 512 + norms) / 2))


def test_latent_attention_may_project_queries_directly() -> None:
    direct = replace(
        LATENT, latent=LatentAttention(queries=0, keys_values=128, head=128, rotary_head=128, value_head=64)
    )
    weights = 256 * 256 + 256 * 1024 + 128 * 768 + OUT
    assert direct.attention_weights == weights
    assert direct.attention_parameters == weights + 128 + 256
    assert direct.whole_parameters == 256 * 256 + 128
    layout = Layout(batch=1, practice=BARE)
    ops = layer_ops(direct, machines(1), layout)
    assert ops.backward_weight.compute == pytest.approx(2 * 128 * (weights + 2 * 256 * 512))
    again = layer_ops(direct, machines(1), replace(layout, recompute="projections")).again
    assert again.compute == pytest.approx(2 * 128 * (256 * 1024 + 128 * 768) + 2 * 128 * 2 * 2304)


def test_latent_attention_has_these_parameters_and_operations() -> None:
    assert LATENT.attention_weights == DOWN + UP + OUT
    assert LATENT.whole_parameters == DOWN + 384 + 128
    assert LATENT.attention_parameters == DOWN + UP + OUT + 384 + 128 + 256
    # With biases: 384 and 256 outputs down, 1024 and 768 up, 256 of the output; norms have one each.
    biases = 384 + 256 + 1024 + 768 + 256 + (384 + 128 + 256)
    assert replace(LATENT, biased=True).attention_parameters == LATENT.attention_parameters + biases
    assert replace(LATENT, biased=True).whole_parameters == DOWN + 2 * (384 + 128) + 384 + 256
    layout = Layout(batch=4, tensor=2, pipeline=2, data=2, practice=BARE)
    beside = UP + OUT + 2 * 256 * 512 + 2 * 256 + 1024 * 256
    assert device_parameters(LATENT, layout, rank_of(LATENT, layout)) == (DOWN + 384 + 128 + beside / 2, 0)
    weights = 2 * (DOWN + UP + OUT + 2 * 256 * 512) + 256 * 1024
    assert model_flops(LATENT, 1) == 6 * 128 * weights + 3 * 2 * (2 * 128 * 128 * 4 * (256 + 64))
    layer = DOWN + UP + OUT + 128 * 4 * (256 + 64) + 2 * 256 * 512
    assert head_weight(LATENT) == 1024 * 256 / layer


def test_latent_attention_sends_the_keys_and_values_of_all_heads() -> None:
    layout = Layout(batch=12, microbatch=3, tensor=2, context=4, practice=BARE)
    assert keys_of(LATENT, layout) == 2 * (256 + 64)
    assert ring_bytes(LATENT, layout) == 2 * 3 * 128 * 2 * (256 + 64)


def test_what_latent_attention_keeps() -> None:
    layout = Layout(batch=1, practice=BARE)
    between, latents, heads = 8 * 256, 4 * (384 + 128), 2 * 2304 + 2 * 4 * 64 + 4 * 4
    assert activation_bytes(LATENT, layout) == 128 * (between + latents + heads + 4 * 512)
    split = replace(layout, tensor=2)  # every rank keeps whole latents
    assert activation_bytes(LATENT, split) == 128 * (between + latents + (heads + 4 * 512) / 2)
    again = replace(split, recompute="projections")  # the shared key, and no heads but for the output
    kept = between + 2 * 128 + latents + (2 * 4 * 64 + 4 * 4 + 4 * 512) / 2
    assert activation_bytes(LATENT, again) == 128 * kept
    fp8 = replace(again, practice=replace(BARE, fp8=True))  # inputs of products take a byte, the output is kept twice
    kept = 6 * 256 + 2 * 128 + 3 * (384 + 128) + (3 * 4 * 64 + 4 * 4 + 3 * 512) / 2
    assert activation_bytes(LATENT, fp8) == 128 * kept
    # While they are used, one layer's queries, keys and values are there in place of its shared key: half of the heads.
    plain, more = (device_bytes(LATENT, plan, rank_of(LATENT, plan)).buffers for plan in (split, again))
    assert more - plain == 128 * 2 * (2304 / 2 - 128)
    gathered = replace(split, data=2, zero=3)
    layer = DOWN + 384 + 128 + (UP + OUT + 2 * 256 * 512 + 2 * 256) / 2
    sharing = device_bytes(LATENT, gathered, rank_of(LATENT, gathered)).buffers
    assert sharing - plain == pytest.approx(2 * 2 * layer)


@pytest.mark.parametrize(
    ("recompute", "seconds", "freed"),
    [
        ("norms", 2 * 128 * (4 * 256 + 2 * 512), 4 * 256 + 2 * 512),
        ("attention", 4 * 128 * 128 * (256 + 64), 2 * 4 * 64 + 4 * 4),
        ("projections", 2 * 128 * (UP + 2 * 2304), 2 * 2304 - 2 * 128),
        ("norms+projections", 2 * 128 * (4 * 256 + 2 * 512 + UP + 2 * 2304), 4 * 256 + 2 * 512 + 2 * 2304 - 2 * 128),
    ],
)
def test_recomputation_in_latent_attention(recompute: str, seconds: float, freed: float) -> None:
    layout = Layout(batch=1, recompute=recompute, practice=BARE)
    assert layer_ops(LATENT, machines(1), layout).again.total == pytest.approx(seconds)
    kept = activation_bytes(LATENT, replace(layout, recompute="none"))
    assert kept - activation_bytes(LATENT, layout) == 128 * freed


def test_only_latents_are_projected_up_again() -> None:
    layout = Layout(batch=1, recompute="norms+projections", practice=BARE)
    assert estimate(LATENT, machines(1), layout).seconds.recompute > 0
    with refused(PlanError, r"'norms\+projections', but by hand has no latent attention", fix="use norms$"):
        estimate(GPT, machines(1), layout)


@pytest.mark.parametrize(
    ("recompute", "seconds", "freed"),
    [
        ("norms", 2 * 128 * 4 * 256, 4 * 256),
        ("activation", 2 * 128 * 2 * 512, 2 * 512),
        ("attention", 4 * 4 * 128 * 128 * 64 / 2, 2 * 256 + 4 * 4),
        ("norms+activation", 2 * 128 * (4 * 256 + 2 * 512), 4 * 256 + 2 * 512),
        ("selective", 2 * 128 * (4 * 256 + 2 * 512), 4 * 256 + 2 * 512),
    ],
)
def test_recomputation_by_operation(recompute: str, seconds: float, freed: float) -> None:
    layout = Layout(batch=1, recompute=recompute, practice=BARE)
    assert layer_ops(GPT, machines(1), layout).again.total == pytest.approx(seconds)
    kept = activation_bytes(GPT, replace(layout, recompute="none"))
    assert kept - activation_bytes(GPT, layout) == 128 * freed


def test_activations_of_a_layer() -> None:
    layout = Layout(batch=1, practice=BARE)
    between, inside = 8 * 256, 2 * (256 + 256) + 2 * 256 + 4 * 4 + 4 * 512
    assert activation_bytes(GPT, layout) == 128 * (between + inside)
    scores = replace(layout, practice=replace(BARE, flash_attention=False))
    assert activation_bytes(GPT, scores) == 128 * (between + inside - 16 + 2 * 4 * 128)
    split = replace(layout, tensor=2)
    assert activation_bytes(GPT, split) == 128 * (between + inside / 2)
    assert activation_bytes(GPT, replace(split, sequence_parallel=True)) == 128 * (between + inside) / 2
    assert activation_bytes(GPT, replace(layout, recompute="full")) == 128 * 2 * 256
    routed = 2 * 2 * 256 + 6 * 2 * 128
    shared = 6 * 128
    with_experts = 128 * (between + 2 * (256 + 256) + 2 * 256 + 16 + routed + shared)
    assert activation_bytes(MOE, layout, experts=True) == with_experts
    assert activation_bytes(MOE, replace(layout, recompute="experts"), experts=True) == with_experts - 128 * routed


def test_some_layers_recomputed() -> None:
    deep = replace(GPT, num_layers=4)
    layout = Layout(batch=1, recompute="full:3", practice=BARE)
    rank = rank_of(deep, layout)
    kept, input_only = activation_bytes(GPT, Layout(batch=1, practice=BARE)), 128 * 2 * 256
    assert device_bytes(deep, layout, rank).activations == kept + 3 * input_only
    once = layer_ops(GPT, machines(1), Layout(batch=1, practice=BARE)).forward.total
    assert estimate(deep, machines(1), layout).seconds.recompute == pytest.approx(3 * once)


def test_parameters_of_a_device() -> None:
    dense = 256 * (2 * 256 + 256) + 2 * 256 * 512 + 2 * 256
    layout = Layout(batch=4, tensor=2, pipeline=2, data=2, practice=BARE)
    assert device_parameters(GPT, layout, rank_of(GPT, layout)) == ((dense + 1024 * 256) / 2, 0)
    assert device_parameters(GPT, layout, rank_of(GPT, layout, 1)) == ((dense + 1024 * 256 + 256) / 2, 0)
    other_layout = Layout(batch=4, data=4, expert=4, practice=BARE)
    attention, expert = 256 * (2 * 256 + 256) + 256, 3 * 256 * 128
    beside = attention + 256 + 256 * 8 + expert
    held = device_parameters(MOE, other_layout, rank_of(MOE, other_layout))
    assert held == (2 * beside + 2 * 1024 * 256 + 256, 2 * 2 * expert)
    assert sharded(other_layout, held) == held[0] / 4 + held[1]
    assert sharded(replace(other_layout, expert=2), held) == held[0] / 4 + held[1] / 2


@pytest.mark.parametrize(
    ("zero", "pipeline", "weights", "gradients", "optimizer"),
    [(0, 1, 2, 4, 12), (1, 1, 2, 4, 3), (2, 1, 2, 1, 3), (3, 1, 0.5, 1, 3), (1, 2, 2, 4, 3), (3, 2, 0.5, 4, 3)],
)
def test_state_by_zero(zero: int, pipeline: int, weights: float, gradients: float, optimizer: float) -> None:
    layout = Layout(batch=8, data=4, pipeline=pipeline, zero=zero, practice=BARE)
    rank = rank_of(GPT, layout)
    count = sum(device_parameters(GPT, layout, rank))
    held = device_bytes(GPT, layout, rank)
    assert (held.weights, held.gradients, held.optimizer) == (weights * count, gradients * count, optimizer * count)


def test_buffers() -> None:
    logits, head = 128 * 6 * 1024, 128 * 4 * 256
    alone = Layout(batch=4, practice=BARE)
    assert device_bytes(GPT, alone, rank_of(GPT, alone)).buffers == logits + head
    eager = replace(alone, practice=replace(BARE, logit_bytes=14))
    assert device_bytes(GPT, eager, rank_of(GPT, eager)).buffers == 128 * 14 * 1024 + head
    staged = Layout(batch=4, pipeline=2, practice=BARE)
    message = 4 * 128 * 256
    assert device_bytes(GPT, staged, rank_of(GPT, staged)).buffers == message
    assert device_bytes(GPT, staged, rank_of(GPT, staged, 1)).buffers == message + logits + head
    masked = replace(GPT, dropout=True)
    assert device_bytes(masked, staged, rank_of(masked, staged)).buffers == message + 2 * 128 * 256
    full = replace(staged, recompute="full")
    layer = activation_bytes(GPT, staged)
    assert device_bytes(GPT, full, rank_of(GPT, full)).buffers == message + layer
    dense = 256 * (2 * 256 + 256) + 2 * 256 * 512 + 2 * 256
    gathered = Layout(batch=4, data=2, zero=3, practice=BARE)
    assert device_bytes(GPT, gathered, rank_of(GPT, gathered)).buffers == logits + head + 2 * 2 * dense
    divided = Layout(batch=1, context=2, practice=BARE)
    keys = 2 * 128 * (2 * 64 * 2)  # of the whole sequence, in 16 bits; their gradients take as much
    assert device_bytes(GPT, divided, rank_of(GPT, divided)).buffers == (logits + head) / 2 + 2 * keys
    ring = replace(divided, practice=replace(BARE, overlap_context=True))
    assert device_bytes(GPT, ring, rank_of(GPT, ring)).buffers == (logits + head) / 2


# 1000 parameters on 4 ranks at a byte a second: gradients of 4 bytes take 3 x 1000 s one way, weights of 2 bytes 1500.
@pytest.mark.parametrize(
    ("zero", "pipeline", "forward", "backward", "once", "sent"),
    [
        (0, 1, 0, 0, 6000, 6000),
        (1, 1, 0, 0, 4500, 4500),
        (2, 1, 0, 3000, 1500, 5 * 3000 + 1500),
        (3, 1, 1500, 4500, 0, 5 * (3000 + 2 * 1500)),
        (1, 2, 0, 0, 4500, 4500),
        (2, 2, 0, 0, 4500, 4500),
        (3, 2, 1500, 1500, 3000, 3000 + 5 * 2 * 1500),
    ],
)
def test_the_exchange_by_zero(
    zero: int, pipeline: int, forward: float, backward: float, once: float, sent: float
) -> None:
    layout = Layout(batch=20, data=4, pipeline=pipeline, zero=zero, practice=BARE)
    found = data_exchange(exchanging(machines(4), layout), (1000.0, 0.0), 0.0, 0.0)
    assert (found.forward, found.backward, found.once, found.bytes) == (forward, backward, once, sent)


def test_hidden_exchanges_contend() -> None:
    practice = replace(BARE, overlap_data=True)
    for zero, expected in ((0, (0, 0, 6000)), (1, (0, 0, 4500)), (2, (0, 3000, 1500)), (3, (1500, 4500, 0))):
        layout = Layout(batch=20, data=4, zero=zero, practice=practice)
        found = data_exchange(exchanging(machines(4), layout), (1000.0, 0.0), 1e6, 1e6)
        hidden = tuple(CONTENTION * number for number in expected)
        assert (found.forward, found.backward, found.once) == pytest.approx(hidden)


def test_layers_of_zero_3_start_one_by_one() -> None:
    layout = Layout(batch=20, data=4, zero=3, practice=BARE)
    found = data_exchange(
        exchanging(machines(4, latency=1.0, start=10.0), layout), (1000.0, 0.0), 0.0, 0.0, num_layers=7
    )
    assert found.forward == 1500 + 7 * (10 + 3 * 1)
    assert found.backward == 4500 + 2 * 7 * (10 + 3 * 1)


def test_experts_are_exchanged_among_fewer_ranks() -> None:
    layout = Layout(batch=20, data=4, expert=2, zero=1, practice=BARE)
    found = data_exchange(exchanging(machines(4), layout), (1000.0, 600.0), 0.0, 0.0)
    assert found.once == 4500 + 600 * (4 + 2) / 2
    assert found.bytes == 4500 + 600 * (4 + 2) / 2


def test_a_tied_embedding_is_summed_between_the_ends() -> None:
    tied, layout = replace(GPT, tied=True), Layout(batch=4, pipeline=2, tensor=2, practice=BARE)
    size = 4 * 1024 * 256 / 2
    found = tied_exchange(tied, machines(4), layout)
    assert (found.once, found.bytes) == (2 * size / 2, size)
    assert tied_exchange(GPT, machines(4), layout).once == 0.0


def test_messages_between_stages() -> None:
    layout = Layout(batch=4, pipeline=2, practice=BARE)
    size = 2 * 128 * 256
    assert hop_seconds(GPT, machines(2, latency=3.0), layout) == (0.0, size + 3.0)
    one_way = replace(layout, practice=replace(BARE, duplex=False))
    assert hop_seconds(GPT, machines(2, latency=3.0), one_way) == (0.0, 2 * (size + 3.0))
    hidden = replace(layout, practice=replace(BARE, overlap_pipeline=True))
    assert hop_seconds(GPT, machines(2, latency=3.0), hidden) == (size + 3.0, 0.0)
    parts = replace(layout, tensor=2, practice=replace(BARE, scatter_gather=True))
    # Between nodes at half the rate goes half of the message; inside of the node the halves are gathered.
    assert hop_seconds(GPT, machines(4, per_node=2), parts) == (0.0, size / 2 / 0.5 + size / 2)


def test_bytes_sent_by_purpose() -> None:
    layout = Layout(batch=12, microbatch=3, tensor=2, pipeline=2, context=2, expert=2, practice=BARE)
    tokens, times = 3 * 128 / 2, 4
    rank = rank_of(MOE, layout)
    sent = device_volumes(MOE, layout, rank, 7.0)
    exchange = 2 * (2 * tokens * 256) * 1 / 2
    assert sent.tensor == times * 1 * 4 * exchange
    assert sent.context == times * 1 * 3 * (2 * 3 * 128 * 128) / 2
    assert sent.expert == times * 1 * 4 * (2 * tokens * 2 * 256 / 2)
    assert sent.pipeline == times * 1 * 2 * tokens * 256
    assert sent.data == 7.0
    again = device_volumes(MOE, replace(layout, recompute="full", sequence_parallel=True), rank, 7.0)
    assert again.tensor == times * 1 * 7 * exchange
    assert again.context == times * 1 * 4 * (2 * 3 * 128 * 128) / 2
    assert again.expert == times * 1 * 6 * (2 * tokens * 2 * 256 / 2) / 2


def test_layers_recomputed_as_a_whole_send_only_their_own_messages_again() -> None:
    deep = replace(MOE, num_layers=4, num_dense_layers=2)
    layout = Layout(batch=12, microbatch=3, data=4, expert=4, practice=BARE)
    rank, each = rank_of(deep, layout), routed_bytes(MOE, layout)
    two, three = (device_volumes(deep, replace(layout, recompute=how), rank, 0.0) for how in ("full:2", "full:3"))
    assert two.expert == 2 * 4 * each  # the two dense layers send nothing to experts
    assert three.expert == (6 + 4) * each


def test_embedding_and_head() -> None:
    layout = Layout(batch=1, tensor=2, practice=replace(BARE, loss_bytes=10.0))
    tokens, ring = 128, 2 * 128 * 256
    first, last = embedding_ops(GPT, machines(2), layout), head_ops(GPT, machines(2), layout)
    assert first.forward.compute == first.backward_weight.compute == 3 * 2 * tokens * 256
    assert first.forward.tensor == ring
    product, loss = 2 * tokens * 256 * 512, 10 * tokens * 512
    assert last.forward.compute == pytest.approx(product + loss / 2)
    assert last.backward_input.compute == pytest.approx(product + loss / 2)
    assert last.backward_weight.compute == pytest.approx(product)
    assert (last.forward.tensor, last.backward_input.tensor) == (0.0, ring)
    divided = head_ops(GPT, machines(2), replace(layout, sequence_parallel=True))
    assert (divided.forward.tensor, divided.backward_input.tensor) == (ring / 2, ring)


def test_the_optimizer_passes_over_its_share() -> None:
    for zero, ranks in ((0, 1), (1, 4)):
        layout = Layout(batch=4, data=4, zero=zero, practice=BARE)
        count = sum(device_parameters(GPT, layout, rank_of(GPT, layout)))
        assert estimate(GPT, machines(4), layout).seconds.optimizer == STEP_BYTES * count / ranks
    assert STEP_BYTES == 42


def test_operations_of_a_step() -> None:
    weights = 2 * (256 * (2 * 256 + 256) + 2 * 256 * 512) + 256 * 1024
    attention = 4 * 128 * 128 * 256 * 2
    assert model_flops(GPT, 3) == 3 * 3 * (2 * 128 * weights + attention)
    assert model_flops(GPT, 3, causal=True) == 3 * 3 * (2 * 128 * weights + attention / 2)


def test_operations_of_experts() -> None:
    # A token visits 2 experts of 8, and the shared one: widths of 128, three products each.
    weights = 256 * (2 * (2 * 256 + 256) + 3 * 2 * (2 + 1) * 128)
    attention = 4 * 128 * 128 * 256 * 2
    assert model_flops(MOE, 1) == 3 * (attention + 2 * 128 * (weights + 256 * 1024))


def test_a_tied_embedding_is_summed_between_the_ends_of_a_pipeline() -> None:
    layout = Layout(batch=2, pipeline=2, practice=BARE)
    assert estimate(GPT, machines(2), layout).seconds.data_exposed == 0.0
    # A ring of two: each sends all gradients of 4 bytes once, half of them twice.
    assert estimate(replace(GPT, tied=True), machines(2), layout).seconds.data_exposed == 4 * 1024 * 256


def test_only_the_first_layers_are_dense() -> None:
    transformer = replace(MOE, num_layers=6, num_dense_layers=3)
    assert [(slice_.dense, slice_.experts) for slice_ in slices_of(transformer, (2, 2, 2))] == [(2, 0), (1, 1), (0, 2)]


# FP8 with the same weights: the ideal device computes two 8-bit operations a second.
FP8 = replace(BARE, fp8=True)
EIGHT = replace(IDEAL, fp8_flops_per_second=2.0)


def eights(num_devices: int) -> Cluster:
    return replace(machines(num_devices), device=EIGHT)


def test_a_product_in_fp8() -> None:
    reach = Reach(0.5, 128.0, 0.8, 0.25, 0.001)
    device = Device("d", 100.0, 1.0, 10.0, 2, reach, 200.0)
    # The inner sum runs at 200 x 0.5, and starting a tile takes as long as at 100 x 0.5.
    busy = 2 * 256 * 384 * (512 / 100 + 128 / 50) * 3.5 / 3
    assert product_seconds(device, 256, 384, 512, fp8=True) == pytest.approx(busy + 0.001)
    thin = replace(device, flops_per_second=1e9, fp8_flops_per_second=2e9)
    # Inputs of one byte, results of two, at 8 bytes a second.
    assert product_seconds(thin, 1, 1024, 64, fp8=True) == pytest.approx((64 + 64 * 1024 + 2 * 1024) / 8 + 0.001)


def test_a_dense_layer_in_fp8() -> None:
    layout = Layout(batch=1, practice=FP8)
    ops, plain = (layer_ops(GPT, eights(1), replace(layout, practice=practice)) for practice in (FP8, BARE))
    weights = 256 * (256 + 256) + 256 * 256 + 2 * 256 * 512
    inputs = 128 * (256 + 256 + 256 + 512)  # of qkv, out, up and down
    outputs = 128 * (512 + 256 + 512 + 256)
    saved = 128 * weights  # half of the operations' seconds
    assert plain.forward.compute - ops.forward.compute == pytest.approx(saved - 6 * inputs)
    assert plain.backward_input.compute - ops.backward_input.compute == pytest.approx(saved - 6 * outputs)
    assert plain.backward_weight.compute - ops.backward_weight.compute == pytest.approx(saved)
    assert head_ops(GPT, eights(1), layout) == head_ops(GPT, eights(1), replace(layout, practice=BARE))
    assert fp8_weights(GPT, layout, experts=False) == weights
    # Software that keeps nothing in 8 bits casts inputs and weights for every pass, written once each.
    titan = replace(FP8, keeps_fp8_inputs=False, keeps_fp8_weights=False)
    cast = layer_ops(GPT, eights(1), replace(layout, practice=titan))
    assert cast.forward.compute - ops.forward.compute == pytest.approx(5 * weights - 1 * inputs)
    assert cast.backward_input.compute - ops.backward_input.compute == pytest.approx(5 * weights)
    assert cast.backward_weight.compute - ops.backward_weight.compute == pytest.approx(5 * inputs)
    # So does ZeRO 3 with weights.
    gathered = layer_ops(GPT, eights(4), replace(layout, batch=4, data=4, zero=3))
    assert gathered.forward.compute - ops.forward.compute == pytest.approx(5 * weights)
    launched = replace(eights(1), device=replace(EIGHT, reach=Reach(1.0, 0.0, 1.0, 1.0, 7.0)))
    more = layer_ops(GPT, launched, layout).forward.compute - ops.forward.compute
    assert more == pytest.approx(7 * (12 + 4 + 1 + 4 * 2))  # passes, products, attention, two kernels per cast


def test_experts_in_fp8() -> None:
    layout = Layout(batch=1, expert=4, data=4, practice=FP8)
    ops, plain = (layer_ops(MOE, eights(4), replace(layout, practice=item), experts=True) for item in (FP8, BARE))
    # 2 experts here, 128 tokens each, of width 128; a shared one; the router stays in 16 bits.
    weights = 256 * 512 + 256 * 256 + (2 + 1) * 3 * 256 * 128
    inputs = 128 * (256 + 256 + (2 + 1) * (256 + 128))
    assert fp8_weights(MOE, layout, experts=True) == weights
    assert plain.forward.compute - ops.forward.compute == pytest.approx(128 * weights - 6 * inputs)
    assert (ops.forward.expert, ops.backward_input.expert) == (plain.forward.expert, plain.backward_input.expert)
    again = layer_ops(MOE, eights(4), replace(layout, recompute="experts"), experts=True).again.compute
    assert again == pytest.approx(128 * 2 * 3 * 256 * 128 + 6 * 128 * 2 * (256 + 128))


@pytest.mark.parametrize(
    ("recompute", "seconds", "freed"),
    [
        ("norms", 2 * 128 * 4 * 256 + 6 * 128 * 2 * 256, 2 * 256),
        ("activation", 2 * 128 * 2 * 512 + 6 * 128 * 512, 512),
        ("attention", 4 * 4 * 128 * 128 * 64 / 2 + 6 * 128 * 256, 3 * 256 + 4 * 4),
    ],
)
def test_recomputation_casts_again_in_fp8(recompute: str, seconds: float, freed: float) -> None:
    layout = Layout(batch=1, recompute=recompute, practice=FP8)
    assert layer_ops(GPT, eights(1), layout).again.total == pytest.approx(seconds)
    assert activation_bytes(GPT, replace(layout, recompute="none")) - activation_bytes(GPT, layout) == 128 * freed
    recast = replace(layout, practice=replace(FP8, keeps_fp8_inputs=False))
    assert layer_ops(GPT, eights(1), recast).again == layer_ops(GPT, eights(1), replace(layout, practice=BARE)).again


def test_what_fp8_holds() -> None:
    layout = Layout(batch=4, practice=FP8)
    # Inputs of qkv and up take a byte; fused attention keeps its output, and the product after it a copy of a byte.
    between, inside = (4 + 2) * 256, 2 * (256 + 256) + 3 * 256 + 4 * 4 + 3 * 512
    assert activation_bytes(GPT, layout) == 128 * (between + inside)
    scores = replace(layout, practice=replace(FP8, flash_attention=False))
    assert activation_bytes(GPT, scores) == 128 * (between + inside - 2 * 256 - 16 + 2 * 4 * 128)
    routed, shared = 2 * 256 + 5 * 2 * 128, 5 * 128
    with_experts = 128 * (between + 2 * (256 + 256) + 3 * 256 + 16 + routed + shared)
    assert activation_bytes(MOE, layout, experts=True) == with_experts
    wide = replace(layout, practice=replace(FP8, keeps_fp8_inputs=False))
    assert activation_bytes(GPT, wide) == activation_bytes(GPT, replace(layout, practice=BARE))
    # 8-bit weights and their transposed copies beside the 16-bit ones; with ZeRO 3 those of one layer.
    rank, weights = rank_of(GPT, layout), 256 * 512 + 256 * 256 + 2 * 256 * 512
    held, plain = (device_bytes(GPT, replace(layout, practice=practice), rank) for practice in (FP8, BARE))
    assert held.weights - plain.weights == 2 * 2 * weights
    assert (held.gradients, held.optimizer, held.buffers) == (plain.gradients, plain.optimizer, plain.buffers)
    gathered = replace(layout, data=4, zero=3)
    sharding, bare = (device_bytes(GPT, replace(gathered, practice=practice), rank) for practice in (FP8, BARE))
    assert (sharding.weights, sharding.buffers) == (bare.weights, bare.buffers + weights)


def test_fp8_weights_are_cast_once_a_step() -> None:
    layout = Layout(batch=4, practice=FP8)
    weights = 2 * (256 * 512 + 256 * 256 + 2 * 256 * 512)
    took, plain = (estimate(GPT, eights(1), replace(layout, practice=practice)).seconds for practice in (FP8, BARE))
    assert took.optimizer - plain.optimizer == pytest.approx(6 * weights)
    with refused(PlanError, "ideal has no FP8 products"):
        estimate(GPT, machines(1), layout)
