"""Bytes that a device sends in a step, by what they are for."""

from __future__ import annotations

from drumline.plan.cluster.estimate import Volumes
from drumline.plan.cluster.layers import WORD, ring_bytes, routed_bytes, tokens_of
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.model.transformer import Transformer
from drumline.plan.cluster.slices import Alike


def message_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return what a device sends of one microbatch to the next stage.

    >>> gpt = Transformer("175B", num_layers=96, hidden=12288, num_heads=96, vocabulary=51200, sequence=2048)
    >>> message_bytes(gpt, Layout(batch=64, tensor=8, pipeline=8)) / 2**20
    6.0
    """
    part = layout.tensor if layout.practice.scatter_gather or layout.sequence_parallel else 1
    return WORD * tokens_of(transformer, layout) * transformer.hidden / part


def device_volumes(transformer: Transformer, layout: Layout, rank: Alike, data: float) -> Volumes:
    """Return what a device of a pipeline rank sends; `data` is what the exchange of gradients takes.

    A layer's two blocks exchange in each pass: two of them, three with full recomputation. With sequence parallelism
    also the stored inputs are gathered.
    """
    times, ranks = layout.num_microbatches, layout.tensor
    exchange = 2 * WORD * tokens_of(transformer, layout) * transformer.hidden * (ranks - 1) / ranks
    forwards = 2 if layout.recompute == "full" else 1
    exchanges = 2 * (forwards + 1) + (1 if layout.sequence_parallel else 0)
    ring = ring_bytes(transformer, layout) * (layout.context - 1) / layout.context
    num_layers = sum(part * slice_.num_layers for slice_, part in rank.slices)
    num_expert_layers = sum(part * slice_.experts for slice_, part in rank.slices)
    sides = sum(part * (2 - slice_.is_first - slice_.is_last) for slice_, part in rank.slices)
    return Volumes(
        tensor=times * num_layers * exchanges * exchange,
        context=times * num_layers * (forwards + 2) * ring,
        expert=times * num_expert_layers * 2 * (forwards + 1) * routed_bytes(transformer, layout),
        pipeline=times * sides * message_bytes(transformer, layout) if layout.pipeline > 1 else 0.0,
        data=data,
    )
