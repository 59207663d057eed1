"""A transformer cut into a layout's stages: layers, parameters and activations of each."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from drumline.plan.cluster.activations import activation_bytes
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.parameters import (
    dense_layer_parameters,
    embedding_parameters,
    expert_parameters,
    head_parameters,
    shared_parameters,
)
from drumline.plan.cluster.shape import stages_of
from drumline.plan.cluster.transformer import Transformer


@lru_cache(maxsize=4096)
def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage as even as possible; the ends, which have the head and the embedding, get fewer.

    >>> even_counts(70, 12), even_counts(126, 16)[::15]
    ((5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5), (7, 7))
    """
    base, rest = divmod(num_layers, num_stages)
    counts = [base + 1] * num_stages
    for turn in range(num_stages - rest):
        counts[-1 - turn // 2 if turn % 2 == 0 else turn // 2] -= 1
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class Slices:
    """For every stage the layers with and without experts, and on one device its parameters and activations."""

    layout: Layout
    dense_layers: tuple[int, ...]
    expert_layers: tuple[int, ...]
    dense: tuple[float, ...]
    experts: tuple[float, ...]
    activations: tuple[float, ...]
    largest_layer: float

    @property
    def has_experts(self) -> bool:
        """Whether any layer has experts."""
        return any(self.expert_layers)

    def parameters(self, rank: int) -> tuple[float, float]:
        """Return how many a device of this pipeline rank has: those that all use, and its experts'."""
        layout = self.layout
        stages = [stage for stage, _ in stages_of(layout.schedule, rank, layout.pipeline, layout.stages_per_rank)]
        return sum(self.dense[stage] for stage in stages), sum(self.experts[stage] for stage in stages)


def slices_of(transformer: Transformer, layout: Layout) -> Slices:
    """Return the stages of a layout."""
    counts = layout.counts or even_counts(transformer.num_layers, layout.num_stages)
    dense_layers, expert_layers, first = [], [], 0
    for count in counts:
        dense = min(max(transformer.num_dense_layers - first, 0), count)
        dense_layers.append(dense)
        expert_layers.append(count - dense)
        first += count
    plain = dense_layer_parameters(transformer) / layout.tensor
    shared = shared_parameters(transformer) / layout.tensor if transformer.experts else 0.0
    local = transformer.experts.num_experts / layout.expert if transformer.experts else 0.0
    expert = local * expert_parameters(transformer) / layout.tensor
    kept = activation_bytes(transformer, layout)
    kept_experts = activation_bytes(transformer, layout, experts=True) if transformer.experts else 0.0
    parameters = [a * plain + b * shared for a, b in zip(dense_layers, expert_layers, strict=True)]
    parameters[0] += embedding_parameters(transformer) / layout.tensor
    if layout.pipeline > 1 or not transformer.tied:
        parameters[-1] += head_parameters(transformer) / layout.tensor
    return Slices(
        layout,
        tuple(dense_layers),
        tuple(expert_layers),
        tuple(parameters),
        tuple(count * expert for count in expert_layers),
        tuple(a * kept + b * kept_experts for a, b in zip(dense_layers, expert_layers, strict=True)),
        max(plain if any(dense_layers) else 0.0, shared + expert if any(expert_layers) else 0.0),
    )
