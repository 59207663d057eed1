"""A transformer cut into a layout's stages: the layers of each, and which ranks are alike."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.shape import stages_of
from drumline.plan.cluster.transformer import Transformer


@lru_cache(maxsize=4096)
def even_counts(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Return layers per stage as even as possible; the ends, which have the head and the embedding, get fewer.

    >>> even_counts(70, 12), even_counts(126, 16)[::15]
    ((5, 6, 6, 6, 6, 6, 6, 6, 6, 6, 6, 5), (7, 7))
    """
    base, rest = divmod(num_layers, num_stages)
    if not rest:
        return (base,) * num_stages
    counts = [base + 1] * num_stages
    for turn in range(num_stages - rest):
        counts[-1 - turn // 2 if turn % 2 == 0 else turn // 2] -= 1
    return tuple(counts)


@dataclass(frozen=True, slots=True)
class Slice:
    """A stage: how many of its layers are dense and how many have experts, and whether it is the first or the last."""

    dense: int
    experts: int
    is_first: bool = False
    is_last: bool = False

    @property
    def num_layers(self) -> int:
        """Return all its layers."""
        return self.dense + self.experts


@dataclass(frozen=True, slots=True)
class Alike:
    """Ranks with equal stages: `slices`, each with the part of its microbatches that runs there."""

    ranks: tuple[int, ...]
    slices: tuple[tuple[Slice, float], ...]

    @property
    def first(self) -> int:
        """Return the first of them, which holds no less than the others."""
        return self.ranks[0]


@lru_cache(maxsize=1024)
def slices_of(transformer: Transformer, counts: tuple[int, ...]) -> tuple[Slice, ...]:
    """Return the stages with these numbers of layers."""
    found, first = [], 0
    for stage, count in enumerate(counts):
        dense = min(max(transformer.num_dense_layers - first, 0), count)
        found.append(Slice(dense, count - dense, stage == 0, stage == len(counts) - 1))
        first += count
    return tuple(found)


def counts_of(transformer: Transformer, layout: Layout) -> tuple[int, ...]:
    """Return the layers of every stage of a layout."""
    return layout.counts or even_counts(transformer.num_layers, layout.num_stages)


@lru_cache(maxsize=1024)
def alike(
    transformer: Transformer, counts: tuple[int, ...], schedule: str, num_ranks: int, stages_per_rank: int
) -> tuple[Alike, ...]:
    """Return the ranks of a pipeline, those with equal stages as one."""
    slices = slices_of(transformer, counts)
    found: dict[tuple[tuple[Slice, float], ...], list[int]] = {}
    for rank in range(num_ranks):
        key = tuple((slices[stage], part) for stage, part in stages_of(schedule, rank, num_ranks, stages_per_rank))
        found.setdefault(key, []).append(rank)
    return tuple(Alike(tuple(ranks), key) for key, ranks in found.items())
