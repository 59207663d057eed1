"""Cuts of an interleaved pipeline with single layers moved between stages, timed many at once.

All cuts run the same program, so they are columns of one simulation. A stage's seconds follow from its layers; what its
rank waits for and exchanges is taken to stay. A pipeline with many microbatches is timed with fewer: the middle of a
step repeats itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import comb

import numpy as np

from drumline.core.graph import Floats
from drumline.core.program import Program
from drumline.core.simulate.by_stage import makespans_by_stage
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.kernels import slice_ops
from drumline.plan.cluster.layout import Layout, StageLayers
from drumline.plan.cluster.loads import hop_seconds, stage_ops
from drumline.plan.cluster.stages import slices_of
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.cut.cuts import Counts
from drumline.schedules import find

_ROUNDS = 2  # microbatches per rank that show what a cut does
_LEAST = 8  # microbatches that show it on few ranks
_Seconds = tuple[float, float, float]  # of the forward and of both halves of the backward


def moves(counts: Counts) -> list[Counts]:
    """Return every cut with one layer moved from a stage that keeps some to another one.

    >>> moves((1, 2, 1))
    [(2, 1, 1), (1, 1, 2)]
    """
    moves_found = []
    for source, num_layers in enumerate(counts):
        for target in range(len(counts)) if num_layers > 1 else ():
            if target != source:
                moved = list(counts)
                moved[source] -= 1
                moved[target] += 1
                moves_found.append(tuple(moved))
    return moves_found


def least_pairs(counts: Counts) -> int:
    """Return a number of cuts that two moves reach at least: those with two sources and two other targets.

    >>> least_pairs((2, 2, 2, 2)) <= len({both for once in moves((2, 2, 2, 2)) for both in moves(once)})
    True
    """
    return comb(sum(count > 1 for count in counts), 2) * comb(len(counts) - 2, 2) if len(counts) > 3 else 0


@dataclass(frozen=True)
class MovedLayers:
    """The pipeline of a layout with other numbers of layers in its stages."""

    transformer: Transformer
    cluster: Cluster
    layout: Layout

    @cached_property
    def program(self) -> Program:
        """The program that all cuts run, with as many microbatches as show what they do."""
        layout = self.layout
        few = min(layout.num_microbatches, max(_ROUNDS * layout.pipeline, _LEAST))
        return find(layout.schedule).build(layout.pipeline, few, layout.stages_per_rank)

    def actions(self, counts: Counts) -> int:
        """Return how many actions are simulated to time all `moves` of a cut."""
        sources = sum(count > 1 for count in counts)
        return sources * (len(counts) - 1) * self.each

    @cached_property
    def each(self) -> int:
        """How many actions are simulated to time one cut."""
        return self.program.num_actions

    def seconds(self, many: Sequence[Counts]) -> list[float]:
        """Return the seconds of the pipeline with each of these cuts; what was asked before is not timed again."""
        if new := [counts for counts in dict.fromkeys(many) if counts not in self._took]:
            hop, _ = hop_seconds(self.transformer, self.cluster, self.layout)
            took = makespans_by_stage(self.program, self._each(new).transpose(1, 2, 0), comm=hop)
            self._took.update(zip(new, took.tolist(), strict=True))
        return [self._took[counts] for counts in many]

    @cached_property
    def _took(self) -> dict[Counts, float]:
        return {}

    def _each(self, many: Sequence[Counts]) -> Floats:
        """Return the seconds of every cut's ops, as in `STAGE_OPS`, and stages: cut, op, stage."""
        layers, stages = np.array(many), np.arange(len(many[0]))
        dense = np.clip(self.transformer.num_dense_layers - (layers.cumsum(axis=1) - layers), 0, layers)
        place = np.broadcast_to((stages == 0) + 2 * (stages == stages[-1]), layers.shape)
        kinds, which = np.unique(np.stack((dense, layers - dense, place)).reshape(3, -1), axis=1, return_inverse=True)
        each = [self._of(StageLayers(few, rest, bool(at & 1), bool(at & 2))) for few, rest, at in kinds.T.tolist()]
        own_loads = np.array(each)[which.reshape(layers.shape)]
        forward, by_input, by_weight = np.moveaxis(own_loads + np.array(self._beside), 2, 0)
        return np.stack([forward, by_input + by_weight, by_input, by_weight], axis=1)

    @cached_property
    def _known(self) -> dict[StageLayers, _Seconds]:
        return {}

    def _of(self, slice_: StageLayers) -> _Seconds:
        """Return the seconds of a stage's own work."""
        if slice_ not in self._known:
            ops = slice_ops(self.transformer, self.cluster, self.layout.share, slice_)
            by_input = ops.again.total + ops.backward_input.total
            self._known[slice_] = (ops.forward.total, by_input, ops.backward_weight.total)
        return self._known[slice_]

    @cached_property
    def _beside(self) -> list[_Seconds]:
        """What the stages take besides their own work: waits and exchanges."""
        neighbours = []
        slices = slices_of(self.transformer, self.layout.counts)
        for ops, slice_ in zip(stage_ops(self.transformer, self.cluster, self.layout), slices, strict=True):
            whole = (ops.forward.total, ops.again.total + ops.backward_input.total, ops.backward_weight.total)
            forward, by_input, by_weight = (a - b for a, b in zip(whole, self._of(slice_), strict=True))
            neighbours.append((forward, by_input, by_weight))
        return neighbours
