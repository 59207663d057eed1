"""What a layer of a transformer takes for every slice of a sequence, by the kernels that price whole sequences.

A slice has fewer tokens, so its products are smaller and its launches count for more: both are priced at the slice's
own length. Attention also sees the keys of all slices before it. Training joins their keys and values to the slice's
own, and backward adds up what it owes to them:

    slice k of u tokens    products and passes of u tokens, attention of u²/2 + k u² pairs of a query and a key
                           forward and backward copy the keys and values of k+1 slices, backward adds up as many
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np

from drumline.core.graph import Floats
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import (
    attention_seconds,
    device_of,
    embedding_ops,
    head_ops,
    layer_ops,
    memory_seconds,
)
from drumline.plan.cluster.layers import layers_of, ring_bytes
from drumline.plan.cluster.layout import WHOLE, Share, StageLayers
from drumline.plan.cluster.spent import Ops
from drumline.plan.cluster.transformer import Transformer

FORWARD, AGAIN, BY_INPUT, BY_WEIGHT = range(4)  # rows of a table of seconds: the fields of `Ops`
_MOVED = 2  # a copy reads and writes
_ADDED = 3  # a sum reads two and writes one


def unit_of(transformer: Transformer, num_slices: int) -> Transformer:
    """Return the transformer with sequences as long as one of so many equal slices.

    >>> from drumline.plan.cluster.models import model
    >>> unit_of(model("llama-3-8b"), 8).sequence
    1024
    """
    return replace(transformer, sequence=transformer.sequence // num_slices)


@lru_cache(maxsize=1024)
def slice_seconds(
    transformer: Transformer,
    cluster: Cluster,
    share: Share,
    num_slices: int,
    *,
    experts: bool,
    recomputed: tuple[str, ...],
) -> Floats:
    """Return the seconds of a layer: (passes, slices). Tensor, context and expert parallelism divide nothing.

    Only attention grows from slice to slice, and what is copied for it:

    >>> from drumline.plan.cluster.hardware import cluster
    >>> from drumline.plan.cluster.layout import Layout
    >>> from drumline.plan.cluster.models import model
    >>> long, share = replace(model("llama-3-8b"), sequence=131072), Layout(batch=1).share
    >>> seconds = slice_seconds(long, cluster("h100", 8), share, 4, experts=False, recomputed=())
    >>> forward, _, by_input, by_weight = seconds
    >>> bool((np.diff(forward) > 0).all()), bool((np.diff(by_input) > 0).all()), len(set(by_weight.tolist()))
    (True, True, 1)
    """
    unit, practice = unit_of(transformer, num_slices), share.practice
    # What the host takes at least counts for the whole pass: with attention to the slices before.
    bare = share._replace(practice=replace(practice, host_seconds=0.0))
    plain = [spent.total for spent in layer_ops(unit, cluster, bare, experts=experts, recomputed=recomputed)]
    forward, back = _of_keys(unit, cluster, share, num_slices, experts)
    again = forward if recomputed == WHOLE else np.zeros(num_slices)
    more = np.stack([forward, again, back, np.zeros(num_slices)])
    seconds = np.array(plain)[:, None] + more
    return np.where(seconds > 0, np.maximum(seconds, practice.host_seconds), 0.0)


def _of_keys(
    unit: Transformer, cluster: Cluster, share: Share, num_slices: int, experts: bool
) -> tuple[Floats, Floats]:
    """Return the seconds that slices take beyond the first for the keys before them: forward, and backward."""
    device = device_of(cluster, share)
    attention = next(op for op in layers_of(unit, share)[experts].operations if op.name == "attention")
    launch, keys = device.reach.launch_seconds, ring_bytes(unit, share)
    before = np.arange(num_slices).astype(np.float64)
    # u²/2 pairs are a slice's own, and each slice before it has twice as many.
    nothing = attention_seconds(device, 0.0)
    pairs = [before * (attention_seconds(device, 2 * flops) - nothing) for flops in attention.flops]
    joined = memory_seconds(device, _MOVED * keys) * (before + 1) + 2 * launch
    added = memory_seconds(device, _ADDED * keys) * (before + 1) + 2 * launch
    copied = memory_seconds(device, _MOVED * keys) + 2 * launch  # a slice's part of the sum
    follows, precedes = before > 0, before < num_slices - 1
    forward: Floats = pairs[0] + np.where(follows, joined, 0.0)
    back: Floats = pairs[1] + np.where(follows, joined + copied, 0.0) + np.where(precedes, added, 0.0)
    return forward, back


def shared(share: Share) -> Share:
    """Return the share of all layouts whose layers take the same: the schedule has no messages to hide."""
    return share._replace(recompute="none", hides_tensor=False)


@lru_cache(maxsize=1024)
def stage_seconds(
    transformer: Transformer, cluster: Cluster, share: Share, num_slices: int, part: StageLayers
) -> Floats:
    """Return the seconds of a stage: (passes, slices); the embedding and the head take the same for every slice."""
    total, alike = np.zeros((4, num_slices)), shared(share)
    for count, experts, recomputed in part.parts(share):
        each = slice_seconds(transformer, cluster, alike, num_slices, experts=experts, recomputed=recomputed)
        total += count * each
    unit = unit_of(transformer, num_slices)
    if part.is_first:
        total += _column(embedding_ops(unit, cluster, alike))
    if part.is_last:
        total += _column(head_ops(unit, cluster, alike))
    return total


@lru_cache(maxsize=256)
def head_seconds(transformer: Transformer, cluster: Cluster, share: Share, num_slices: int) -> float:
    """Return the seconds of a sequence's slices after the last layer."""
    return num_slices * head_ops(unit_of(transformer, num_slices), cluster, share).total.total


def _column(ops: Ops) -> Floats:
    """Return the seconds of every pass, one below the other."""
    return np.array([[spent.total] for spent in ops])
