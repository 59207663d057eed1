"""Bytes of the fullest device, without the seconds: a survey asks for these first, and far more often."""

from __future__ import annotations

from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.memory import device_bytes
from drumline.plan.cluster.model.transformer import Transformer
from drumline.plan.cluster.slices import alike, counts_of


def peak_bytes(transformer: Transformer, layout: Layout) -> float:
    """Return what the fullest device holds: the total of the bytes that `estimate` itemises."""
    counts = counts_of(transformer, layout)
    kinds = alike(transformer, counts, layout.schedule, layout.pipeline, layout.stages_per_rank)
    return max(device_bytes(transformer, layout, one).total for one in kinds)
