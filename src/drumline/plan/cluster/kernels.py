"""Seconds of kernels: a product by its shape, a pass over memory by its bytes, a collective by its ring; and of layers.

Rates are the device's data-sheet numbers times the share that kernels achieve, `Device.reach`. Seconds of a layer are
sums over its operations.

With FP8, a kernel first reads every number to find the largest one (2 bytes). Then another kernel reads it again (2)
and writes it in 8 bits (1). Tensor cores need both operands along the inner sum, so operands of two products are
written twice, once transposed. These are inputs (forward, and the weight's gradient) and gradients of outputs (those of
the input and the weight).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from drumline.plan.cluster.frozen_base import FrozenBase
from drumline.plan.cluster.hardware import Cluster, Device, DeviceLink
from drumline.plan.cluster.layers import (
    WORD,
    AxisMessage,
    Layer,
    Operation,
    Product,
    exchange,
    layers_of,
    tokens_of,
)
from drumline.plan.cluster.layout import WHOLE, Share, StageLayers
from drumline.plan.cluster.practice import ATTENTION
from drumline.plan.cluster.spent import Ops, Spent, all_ops
from drumline.plan.cluster.transformer import Transformer

CONTENTION = 0.15  # of a hidden message's seconds: it runs on 16 of an A100's 108 processors
TILE = 128  # a processor computes 128 x 128 numbers of a product at a time
CAST_ONCE, CAST_TWICE = 5, 6  # bytes read and written to cast a number, written once or also transposed
_CAST_KERNELS = 2  # one finds the largest number, one casts


def product_seconds(
    device: Device, rows: float, columns: float, depth: float, count: float = 1.0, *, fp8: bool = False
) -> float:
    """Return the seconds of `count` parallel products of (rows x depth) by (depth x columns): 16-bit ones, or `fp8`.

    Processors compute the tiles in waves, and the last wave is half empty on average. Memory traffic limits a product
    that is too thin. With `fp8`, inputs are 8-bit numbers and results 16-bit ones; it takes as long to start and to
    write out a tile.

    >>> a100 = Device("A100", 312e12, 80e9, 2.039e12)
    >>> [round(2 * n**3 / product_seconds(a100, n, n, n) / 1e12) for n in (512, 2048, 8192)]
    [27, 186, 243]
    """
    reach = device.reach
    high, wide = max(rows, TILE), max(columns, TILE)
    waves = high * wide * count / (TILE * TILE * device.num_processors)
    step = 2.0 * high * wide * count / (device.flops_per_second * reach.product)  # one of the inner sum
    inner = 2.0 * high * wide * count / (device.fp8_flops_per_second * reach.product) if fp8 else step
    busy = (inner * depth + step * reach.depth) * (waves + 0.5) / waves
    size = ((1.0 if fp8 else 2.0) * (rows * depth + depth * columns) + 2.0 * rows * columns) * count
    return max(busy, memory_seconds(device, size)) + reach.launch_seconds


def memory_seconds(device: Device, size: float) -> float:
    """Return the seconds to read and write `size` bytes in total."""
    return size / (device.memory_bytes_per_second * device.reach.memory)


def attention_seconds(device: Device, flops: float) -> float:
    """Return the seconds of fused attention with this many operations."""
    return flops / (device.flops_per_second * device.reach.attention) + device.reach.launch_seconds


def gather_seconds(link: DeviceLink, num_devices: int, size: float) -> float:
    """Return the seconds of an all-gather or a reduce-scatter with `size` bytes in total, round a ring.

    >>> gather_seconds(DeviceLink(0.0, 1e9), 4, 4e9), gather_seconds(DeviceLink(0.0, 1e9, start_seconds=0.5), 4, 4e9)
    (3.0, 3.5)
    """
    if num_devices == 1:
        return 0.0
    return link.start_seconds + (num_devices - 1) * (link.latency_seconds + size / num_devices / link.bytes_per_second)


def reduce_seconds(link: DeviceLink, num_devices: int, size: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes: round a ring, or up and down a tree if that is faster.

    A ring sends fewer bytes, a tree takes fewer hops.

    >>> reduce_seconds(DeviceLink(0.0, 1e9), 4, 4e9), reduce_seconds(DeviceLink(1.0, 1e9), 64, 1e9)
    (6.0, 14.0)
    """
    if num_devices == 1:
        return 0.0
    hops, carried = num_devices - 1, size / link.bytes_per_second
    ring = 2 * hops * (link.latency_seconds + carried / num_devices)
    tree = 2 * (math.ceil(math.log2(num_devices)) * link.latency_seconds + carried)
    return link.start_seconds + min(ring, tree)


def exposed(seconds: float, hidden: float) -> float:
    """Return what messages of so many seconds cost beside compute of `hidden` seconds.

    What compute does not hide is waited for. What it hides still takes processors and memory from it.

    >>> exposed(3.0, 1.0), exposed(1.0, 3.0)
    (2.15, 0.15)
    """
    return max(seconds - hidden, 0.0) + CONTENTION * min(seconds, hidden)


class KernelTimes(NamedTuple):
    """Compute seconds of one operation: forward, for gradients of inputs, of weights; and of its forward's products."""

    forward: float
    by_input: float
    by_weight: float
    products: float


def device_of(cluster: Cluster, share: Share) -> Device:
    """Return the device with what the kernels of this software reach on it."""
    practice = share.practice
    if practice.product_share == 1 and practice.attention_kernels == max(ATTENTION):
        return cluster.device
    return _reaching(cluster.device, practice.product_share, practice.attention_kernels)


@lru_cache(maxsize=64)
def _reaching(device: Device, product_share: float, attention_kernels: int) -> Device:
    before, hopper = ATTENTION[attention_kernels]
    reach, of_best = device.reach, hopper if device.fp8_flops_per_second else before
    # Shares are fitted on Hopper; before it, no row says what a release reaches.
    product = min(reach.product * (product_share if device.fp8_flops_per_second else 1.0), 1.0)
    return replace(device, reach=replace(reach, product=product, attention=reach.attention * of_best))


def operation_times(
    cluster: Cluster, share: Share, operation: Operation, base: FrozenBase | None = None
) -> KernelTimes:
    """Return the compute seconds of an operation of a layer, of whose weights perhaps nothing but adapters trains."""
    device = device_of(cluster, share)
    products, by_input, by_weight = product_times(cluster, share, operation.products, trains=base is None)
    if base is not None:
        more = [_adapted(device, base, product) for product in operation.products]
        products, by_input, by_weight = map(sum, zip((products, by_input, by_weight), *more, strict=True))
    launches = operation.num_kernels * device.reach.launch_seconds
    passes, passes_back = (memory_seconds(device, size) + launches for size in operation.bytes)
    scores = sum(product_seconds(device, *product[:4]) for product in operation.scores)
    attend, attend_back = (attention_seconds(device, flops) if flops else 0.0 for flops in operation.flops)
    return KernelTimes(
        products + passes + scores + attend,
        by_input + passes_back + 2 * scores + attend_back,
        by_weight,
        products,
    )


def product_times(
    cluster: Cluster, share: Share, products: Sequence[Product], *, trains: bool = True
) -> tuple[float, float, float]:
    """Return the seconds of products: forward, gradients of their inputs, gradients of their weights if these train."""
    forward = by_input = by_weight = 0.0
    device = device_of(cluster, share)
    for product in products:
        rows, columns, depth, times, _ = product
        fp8 = product.fp8 and share.practice.fp8
        forward += product_seconds(device, rows, columns, depth, times, fp8=fp8)
        by_input += product_seconds(device, rows, depth, columns, times, fp8=fp8)
        by_weight += product_seconds(device, depth, columns, rows, times, fp8=fp8)
        if fp8:
            casts = _casts(cluster, share, product)
            forward, by_input, by_weight = forward + casts[0], by_input + casts[1], by_weight + casts[2]
    return forward, by_input, by_weight if trains else 0.0


def _adapted(device: Device, base: FrozenBase, product: Product) -> tuple[float, float, float]:
    """Return the seconds that an adapter adds to a product of a frozen base in its three passes.

    Each has two thin products, those of inputs and outputs also a sum, and a quantised base to write out in 16 bits.
    """
    rows, columns, depth, times, _ = product
    rank, launch = base.rank_of(depth, columns), device.reach.launch_seconds
    passes = (
        [(rows, rank, depth), (rows, columns, rank)],
        [(rows, rank, columns), (rows, depth, rank)],
        [(depth, rank, rows), (rank, columns, rows)],
    )
    thin = [sum(product_seconds(device, *size, times) for size in pair) for pair in passes]
    sums = [memory_seconds(device, 3 * WORD * rows * wide * times) + launch for wide in (columns, depth)]
    size = (base.bytes_of(depth, columns) + WORD * depth * columns) * times
    out = memory_seconds(device, size) + launch if base.is_quantised else 0.0
    return thin[0] + sums[0] + out, thin[1] + sums[1] + out, thin[2]


def _casts(cluster: Cluster, share: Share, product: Product) -> tuple[float, float, float]:
    """Return the seconds of the casts of a product in its three passes.

    What software does not keep in 8 bits is cast for every pass that needs it.
    """
    practice = share.practice
    inputs, weights = product.rows * product.depth * product.times, product.depth * product.columns * product.times
    forward = cast_seconds(cluster, inputs, CAST_TWICE if practice.keeps_fp8_inputs else CAST_ONCE)
    by_input = cast_seconds(cluster, product.rows * product.columns * product.times, CAST_TWICE)
    by_weight = 0.0 if practice.keeps_fp8_inputs else cast_seconds(cluster, inputs, CAST_ONCE)
    if share.holds_fp8:
        return forward, by_input, by_weight
    again = cast_seconds(cluster, weights, CAST_ONCE)
    return forward + again, by_input + again, by_weight


def cast_seconds(cluster: Cluster, count: float, size: int = CAST_TWICE) -> float:
    """Return the seconds to cast so many numbers; `size` is what is read and written for each."""
    return memory_seconds(cluster.device, size * count) + _CAST_KERNELS * cluster.device.reach.launch_seconds


def message_seconds(cluster: Cluster, share: Share, message: AxisMessage) -> float:
    """Return the seconds of a message that travels once.

    Tensor-parallel ranks meet in an all-reduce; a reduce-scatter and an all-gather take the same. Keys and values
    travel in a ring behind attention; otherwise ranks meet and attention waits, as in Llama 3 (arXiv 2407.21783).
    """
    ranks = message.num_devices
    if ranks == 1:
        return 0.0
    link = cluster.link(ranks, message.stride)
    if message.axis == "expert":
        return link.latency_seconds * (ranks - 1) + message.sent / link.bytes_per_second
    if message.axis == "tensor":
        return reduce_seconds(link, ranks, message.size) + share.practice.meet_seconds
    seconds = gather_seconds(link, ranks, message.size)
    return seconds if share.practice.overlap_context else seconds + share.practice.meet_seconds


@lru_cache(maxsize=4096)
def layer_ops(
    transformer: Transformer, cluster: Cluster, share: Share, *, experts: bool, recomputed: tuple[str, ...]
) -> Ops:
    """Return the seconds of a microbatch in one layer; what is `recomputed` may differ from layer to layer."""
    layer, ops, base = layers_of(transformer, share)[experts], Ops(), transformer.frozen_base
    times = [operation_times(cluster, share, operation, base) for operation in layer.operations]
    whole = KernelTimes(*map(sum, zip(*times, strict=True)))
    for operation, own_times in zip(layer.operations, times, strict=True):
        ops = ops + _operation_ops(cluster, share, operation, own_times, whole, recomputed)
    parameters = layer.parameters + layer.expert_parameters
    if base is not None:
        parameters *= base.trainable_share
    added = Spent(memory_seconds(cluster.device, share.practice.accumulation_bytes * parameters))
    again = ops.again
    if recomputed == WHOLE:
        again = _hosted(ops.forward + _not_again(cluster, share, layer), share)
    return Ops(
        _hosted(ops.forward, share),
        again,
        _hosted(ops.backward_input, share),
        _hosted(ops.backward_weight + added, share),
    )


def _not_again(cluster: Cluster, share: Share, layer: Layer) -> Spent:
    """Return the seconds, below 0, that a whole layer's recomputation saves by ending before its last product."""
    if not share.practice.stops_early or layer.operations[-2].name != "feed-forward":
        return Spent()
    return Spent(-product_times(cluster, share, layer.operations[-2].products[-1:])[0])


def _operation_ops(
    cluster: Cluster,
    share: Share,
    op: Operation,
    own_times: KernelTimes,
    whole: KernelTimes,
    recomputed: Sequence[str],
) -> Ops:
    """Return an operation's seconds with its messages; `own_times` and `whole` are its compute and the layer's."""
    forward, again, back = Spent(own_times.forward), Spent(own_times.forward), Spent(own_times.by_input)
    part, repeats = op.again(recomputed), op.repeats(recomputed)
    if part and not repeats:  # of its products this part runs again, of its passes all
        again = Spent(own_times.forward - (1 - part) * own_times.products)
    if (message := op.message) is not None:
        seconds = message_seconds(cluster, share, message)
        hidden, hidden_back = _hidden(share, message, own_times, whole)
        there = message.forward * seconds
        sent = exposed(there, hidden)
        sent_back = exposed(message.backward * seconds, hidden_back) + message.waited * seconds
        forward, back = forward + Spent(**{message.axis: sent}), back + Spent(**{message.axis: sent_back})
        repeated = there if message.axis == "expert" else sent
        again = again + Spent(**{message.axis: repeated if repeats else part * repeated})
    if op.output and share.practice.fp8 and share.practice.keeps_fp8_inputs:
        again = again + Spent(cast_seconds(cluster, op.output))
    return Ops(forward, again if part else Spent(), back, Spent(own_times.by_weight))


def _hidden(share: Share, message: AxisMessage, own_times: KernelTimes, whole: KernelTimes) -> tuple[float, float]:
    """Return the compute that an operation's messages travel behind, forward and backward.

    Tokens travel to experts and back beside as much compute of another microbatch.
    """
    practice = share.practice
    if message.axis == "tensor":
        forward = whole.products if practice.overlap_forward else 0.0
        return forward, whole.by_weight if share.hides_tensor else 0.0
    if message.axis == "context":
        return (own_times.forward, own_times.by_input) if practice.overlap_context else (0.0, 0.0)
    return (whole.forward, whole.by_input) if practice.overlap_experts else (0.0, 0.0)


def _hosted(spent: Spent, share: Share) -> Spent:
    """Return a pass through a layer that lasts at least as long as the slowest host takes to issue its kernels."""
    floor = share.practice.host_seconds * (1 + share.practice.host_meets * (share.tensor - 1))
    return spent + Spent(max(floor - spent.total, 0.0))


@lru_cache(maxsize=4096)
def embedding_ops(transformer: Transformer, cluster: Cluster, share: Share) -> Ops:
    """Return the seconds of a microbatch before the first layer: reading rows, and summing them over ranks."""
    size = WORD * tokens_of(transformer, share) * transformer.hidden
    summed = message_seconds(cluster, share, exchange(transformer, share)) / (2 if share.sequence_parallel else 1)
    passes = Spent(memory_seconds(cluster.device, 3 * size) + 3 * cluster.device.reach.launch_seconds)
    return Ops(passes + Spent(tensor=summed), Spent(), Spent(), passes if transformer.frozen_base is None else Spent())


@lru_cache(maxsize=4096)
def head_ops(transformer: Transformer, cluster: Cluster, share: Share) -> Ops:
    """Return the seconds of a microbatch after the last layer: a product with the vocabulary, and the loss."""
    device = cluster.device
    tokens = tokens_of(transformer, share)
    part = transformer.vocabulary / share.tensor
    table = Product(tokens, part, transformer.hidden, fp8=False)
    trains = transformer.frozen_base is None
    forward, by_input, by_weight = product_times(cluster, share, [table], trains=trains)
    loss = memory_seconds(device, share.practice.loss_bytes * tokens * part)
    add = memory_seconds(device, share.practice.accumulation_bytes * part * transformer.hidden) if trains else 0.0
    summed = message_seconds(cluster, share, exchange(transformer, share))
    hidden = by_weight if share.hides_tensor else 0.0
    return Ops(
        Spent(forward + loss / 2, tensor=summed / 2 if share.sequence_parallel else 0.0),
        Spent(),
        Spent(by_input + loss / 2, tensor=exposed(summed, hidden)),
        Spent(by_weight + add),
    )


@lru_cache(maxsize=16384)
def slice_ops(transformer: Transformer, cluster: Cluster, share: Share, slice_: StageLayers) -> Ops:
    """Return the seconds of a microbatch in a stage."""
    same = share.whatever_recomputed
    parts = [
        layer_ops(transformer, cluster, same, experts=experts, recomputed=recomputed).times(count)
        for count, experts, recomputed in slice_.parts(share)
    ]
    if slice_.is_first:
        parts.append(embedding_ops(transformer, cluster, same))
    if slice_.is_last:
        parts.append(head_ops(transformer, cluster, same))
    return all_ops(parts)
