"""What pipelines in slices take and hold at least: a few sums, so that most layouts need no simulation.

- Seconds: the work of the busiest rank, or of all ranks if they had equally much.
- Bytes: what the first rank holds. Its forwards run as early as those of as many microbatches, and in a line of single
  stages S-1 earlier. Before its first backward, all slices of a microbatch have gone forward.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import NamedTuple

from drumline.plan.cluster.device_memory import WEIGHT_BYTES, device_parameters, stage_activations
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import WHOLE, Layout
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.stages import alike, layer_counts, pairs_held
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.slices.layout_times import head_seconds, shared, slice_seconds
from drumline.schedules import DEFAULT


class Line(NamedTuple):
    """Pipelines without other parallelism than data's: how many ranks, and what microbatches a step has."""

    pipeline: int
    data: int
    zero: int
    microbatch: int
    num_microbatches: int


class SliceSchedule(NamedTuple):
    """A schedule, its stages per rank, and the number of slices."""

    schedule: str
    stages_per_rank: int
    slices: int


class RankLayers(NamedTuple):
    """Ranks that are alike: their dense layers, those with experts, and whether they have the head."""

    dense: int
    experts: int
    has_head: bool


@dataclass(frozen=True)
class LineBounds:
    """Bounds for a transformer on a cluster's nodes.

    >>> from drumline.plan.cluster.hardware import cluster
    >>> from drumline.plan.cluster.models import model
    >>> bounds = LineBounds(model("llama-3-8b"), cluster("h100", 8).nodes, Practice())
    >>> line, order = Line(4, 2, 1, 1, 4), SliceSchedule("1f1b", 1, 8)
    >>> 0 < bounds.even_seconds(line, 8, "none") < bounds.seconds(line, order, "none")
    True
    >>> 0 < bounds.even_bytes(line, "full") < bounds.bytes(line, order, "full")
    True
    """

    transformer: Transformer
    cluster: Cluster
    practice: Practice

    def even_seconds(self, line: Line, slices: int, recompute: str) -> float:
        """Return the work of a step on the busiest rank, whatever the schedule: a mean, and whole layers."""
        dense, experts, head = _seconds(self, line.microbatch, slices, recompute)
        layers, few = self.transformer.num_layers, self.transformer.num_dense_layers
        mean = (few * dense + (layers - few) * experts + head) / line.pipeline
        least = min(dense if few else experts, experts if few < layers else dense)
        most = ceil(layers / line.pipeline) * least
        return line.num_microbatches * max(mean, most)

    def seconds(self, line: Line, order: SliceSchedule, recompute: str) -> float:
        """Return the work of a step on the busiest rank."""
        dense, experts, head = _seconds(self, line.microbatch, order.slices, recompute)
        ranks = rank_layers(self.transformer, line.pipeline, order.schedule, order.stages_per_rank)
        return line.num_microbatches * max(
            each.dense * dense + each.experts * experts + each.has_head * head for each in ranks
        )

    def even_bytes(self, line: Line, recompute: str) -> float:
        """Return the bytes of every rank if all held equally much: state, and one microbatch."""
        parameters, size = _of_first(self, 1, DEFAULT, 1, recompute)
        return (parameters * self._state(line) + size * line.microbatch) / line.pipeline

    def bytes(self, line: Line, order: SliceSchedule, recompute: str) -> float:
        """Return the bytes of the first rank, without buffers."""
        (schedule, stages, slices), units = order, line.num_microbatches * order.slices
        pairs = pairs_held(schedule, 0, line.pipeline, units, stages)
        pairs = max(min(pairs + slices - 1, units) if stages == 1 else pairs, slices * stages)
        parameters, size = _of_first(self, line.pipeline, schedule, stages, recompute)
        return parameters * self._state(line) + pairs * size * line.microbatch / slices

    def _state(self, line: Line) -> float:
        states = self.practice.states.state_bytes / (line.data if line.zero else 1)
        return WEIGHT_BYTES + self.practice.gradient_bytes + states

    def __hash__(self) -> int:
        return hash((self.transformer, self.cluster, self.practice))


@lru_cache(maxsize=1024)
def _seconds(bounds: LineBounds, microbatch: int, slices: int, recompute: str) -> tuple[float, float, float]:
    """Return the seconds of a microbatch in a dense layer, in one with experts, and in the head."""
    share = shared(Layout(batch=microbatch, microbatch=microbatch, practice=bounds.practice).share)
    about, recomputed = (bounds.transformer, bounds.cluster, share, slices), WHOLE if recompute == "full" else ()
    kinds = (False, bounds.transformer.experts is not None)
    dense, experts = (float(slice_seconds(*about, experts=kind, recomputed=recomputed).sum()) for kind in kinds)
    return dense, experts, head_seconds(*about)


@lru_cache(maxsize=1024)
def _of_first(
    bounds: LineBounds, pipeline: int, schedule: str, stages_per_rank: int, recompute: str
) -> tuple[float, float]:
    """Return the parameters of a pipeline's first rank, and what the smallest of its stages keeps of a sequence."""
    transformer = bounds.transformer
    counts = layer_counts(transformer, pipeline, schedule, stages_per_rank)
    layout = Layout(1, pipeline=pipeline, recompute=recompute, counts=counts, practice=bounds.practice)
    rank = alike(transformer, counts, schedule, pipeline, stages_per_rank)[0]
    size = min(stage_activations(transformer, layout, part) for part, _ in rank.slices)
    return sum(device_parameters(transformer, layout, rank)), size


@lru_cache(maxsize=1024)
def rank_layers(transformer: Transformer, pipeline: int, schedule: str, stages_per_rank: int) -> tuple[RankLayers, ...]:
    """Return the ranks of a pipeline, those that are alike once.

    >>> from drumline.plan.cluster.models import model
    >>> [tuple(each) for each in rank_layers(model("llama-3-8b"), 4, "1f1b", 1)]
    [(8, 0, False), (9, 0, False), (8, 0, False), (7, 0, True)]
    """
    counts = layer_counts(transformer, pipeline, schedule, stages_per_rank)
    return tuple(
        RankLayers(
            sum(part.dense for part, _ in rank.slices),
            sum(part.experts for part, _ in rank.slices),
            any(part.is_last for part, _ in rank.slices),
        )
        for rank in alike(transformer, counts, schedule, pipeline, stages_per_rank)
    )
