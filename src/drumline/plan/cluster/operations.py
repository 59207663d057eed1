"""The operations that devices run in a step, those included that they run again: what HFU counts.

What the model needs is in `transformer` (`model_flops`): MFU counts that. Devices run more: what is recomputed, and the
scores that fused attention computes again in its backward. Without fused attention they also compute what is masked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drumline.plan.cluster.layers import Operation, layers_of, tokens_of
from drumline.plan.cluster.layout import WHOLE, Layout
from drumline.plan.cluster.stages import counts_of, slices_of
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules import DEFAULT

LAST = "feed-forward"  # the operation with a dense layer's last product


def device_flops(transformer: Transformer, layout: Layout) -> float:
    """Return the operations of a step on a device, in the mean of all.

    >>> from drumline.plan.cluster.models import MODELS
    >>> from drumline.plan.cluster.transformer import model_flops
    >>> gpt, layouts = MODELS["gpt-1.7b"], [Layout(batch=8, data=8, recompute=how) for how in ("none", "full")]
    >>> needed = model_flops(gpt, 8, causal=True) / 8
    >>> [round(device_flops(gpt, layout) / needed, 2) for layout in layouts]
    [1.01, 1.32]
    """
    # The order of a schedule changes no operation.
    layers, total = layers_of(transformer, replace(layout, schedule=DEFAULT).share), 0.0
    base = transformer.frozen_base
    # Gradients of weights: of all, or of adapters, which run in every pass.
    again, by_weight = (0.0, 1.0) if base is None else (2 * base.trainable_share, base.trainable_share)
    for slice_ in slices_of(transformer, counts_of(transformer, layout)):
        for count, experts, recomputed in slice_.parts(layout):
            every = (_flops(op, recomputed, again + by_weight) for op in layers[experts].operations)
            total += count * sum(every)
            if recomputed == WHOLE and layout.practice.stops_early and layers[experts].operations[-2].name == LAST:
                last = layers[experts].operations[-2].products[-1]
                total -= count * 2.0 * last.rows * last.columns * last.depth
    head = 2.0 * tokens_of(transformer, layout) * transformer.hidden * transformer.vocabulary / layout.tensor
    total += (2.0 if base is not None else 3.0) * head
    return total * layout.num_microbatches / layout.pipeline


def _flops(op: Operation, recomputed: Sequence[str], more: float) -> float:
    """Return an operation's own, in all passes: forward, by inputs, and `more` forwards for gradients of weights."""
    products = sum(2.0 * p.rows * p.columns * p.depth * p.times for p in op.products)
    scores = sum(2.0 * p.rows * p.columns * p.depth * p.times for p in op.scores)
    forward = products + scores + op.flops[0]
    again = forward if recomputed == WHOLE or op.repeats(recomputed) else op.again(recomputed) * products
    return forward + again + (1 + more) * products + 2 * scores + op.flops[1]
