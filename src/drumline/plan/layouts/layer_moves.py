"""Cuts of an interleaved pipeline with single layers moved between stages, timed many at once.

All cuts run the same program, so they are columns of one simulation. A stage's seconds follow from its layers; what its
rank waits for and exchanges is taken to stay. A pipeline with many microbatches is timed with fewer: the middle of a
step repeats itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import comb, inf

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
_ACTIONS = 400_000  # actions to simulate for the cut of one layout
_GAIN = 1e-3  # the least gain of a moved layer, as a share of the pipeline's seconds
Weigher = Callable[[Transformer, Layout], float]
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
        place = (stages == 0) + 2 * (stages == stages[-1])
        most = int(layers.max()) + 1
        # Each kind of stage is one number: its dense layers, its others, and whether it is the first or the last.
        kinds, which = np.unique((dense * most + layers - dense) * 4 + place, return_inverse=True)
        each = [
            self._of(StageLayers(kind // 4 // most, kind // 4 % most, bool(kind & 1), bool(kind & 2)))
            for kind in kinds.tolist()
        ]
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


@dataclass(frozen=True)
class LayerMoves:
    """The search for a better cut of a layout, by moving its layers one by one; `weigh` returns a device's bytes."""

    transformer: Transformer
    cluster: Cluster
    weigh: Weigher

    def best(self, layout: Layout, limit_bytes: float) -> Layout:
        """Return the layout with its layers moved, one or two at once, while its pipeline gets shorter and fits.

        What is counted is how many actions to simulate for it, so that it is the same on every machine.
        """
        if (layout, limit_bytes) not in self._known:
            if layout not in self._timed:  # which serves for every limit
                self._timed[layout] = MovedLayers(self.transformer, self.cluster, layout)
            self._known[layout, limit_bytes] = self._search(self._timed[layout], limit_bytes)
        return self._known[layout, limit_bytes]

    def _search(self, timed: MovedLayers, limit_bytes: float) -> Layout:
        left, layout, now = _ACTIONS, timed.layout, inf
        while (tried := moves(layout.counts)) and (left := left - timed.actions(layout.counts)) >= 0:
            now = min(now, timed.seconds([layout.counts])[0])
            better = self._shorter(timed, tried, layout, now, limit_bytes)
            if better is None:  # perhaps two at once are shorter
                if least_pairs(layout.counts) * timed.each > left:
                    break
                pairs = list(dict.fromkeys(both for counts in tried for both in moves(counts)))
                if (left := left - len(pairs) * timed.each) < 0:
                    break
                better = self._shorter(timed, pairs, layout, now, limit_bytes)
            if better is None:
                break
            now, layout = better
        return layout

    def _shorter(
        self, timed: MovedLayers, tried: Sequence[Counts], layout: Layout, now: float, limit_bytes: float
    ) -> tuple[float, Layout] | None:
        """Return the shortest of these cuts that fits, if it gains enough."""
        within = (
            (took, other)
            for took, counts in sorted(zip(timed.seconds(tried), tried, strict=True))
            if took < now * (1 - _GAIN)
            and self.weigh(self.transformer, other := replace(layout, counts=counts)) <= limit_bytes
        )
        return next(within, None)

    @cached_property
    def _known(self) -> dict[tuple[Layout, float], Layout]:
        return {}

    @cached_property
    def _timed(self) -> dict[Layout, MovedLayers]:
        return {}
