"""The best layouts under a memory limit, without a look at most of them.

Layouts of one mesh and one microbatch size are a family: they differ in schedule, ZeRO stage and recomputation. Some
things are taken for true of any estimate, and let a search pass by what cannot win:

    what a family computes and sends within a microbatch is paid by all of its layouts   →  a floor of their seconds
    only the gradient exchange and the optimizer know of the ZeRO stage                  →  the rest is a floor, too
    recomputing more never saves time, and never holds more                              →  the first that fits is best
    a schedule that is made to hold less (`SAVERS`) is not faster than the one it is made from

Estimates are kept, so that another limit costs only what was passed by before.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from drumline.plan.cluster.cut import layer_counts, stage_weights
from drumline.plan.cluster.estimate import Estimate
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.space import (
    RECOMPUTE,
    SCHEDULES,
    Mesh,
    Pins,
    layout_of,
    meshes,
    microbatch_sizes,
    recomputations,
    schedules_of,
    zero_stages,
)
from drumline.plan.cluster.transformer import Transformer

Evaluator = Callable[[Transformer, Cluster, Layout], Estimate]

# Schedules that are made to hold less, and what they are made from.
SAVERS = {("v-half", 2): ("zb-v", 2)}
MOST_PAIRS = 40_000  # (stage, microbatch) pairs of a pipeline that is simulated
_SLACK = 0.97  # of a floor: stages of other schedules may be a little more even than the weights say


@dataclass(frozen=True, slots=True)
class Candidate:
    """A layout and what it takes; `is_exact` where its pipeline was simulated action by action."""

    layout: Layout
    estimate: Estimate
    is_exact: bool = False

    @property
    def mesh(self) -> Mesh:
        """Return its degrees of parallelism."""
        return Mesh.of(self.layout)

    @property
    def seconds(self) -> float:
        """Return the seconds of a step."""
        return self.estimate.seconds.total

    @property
    def bytes(self) -> float:
        """Return what the fullest device holds."""
        return self.estimate.bytes.total

    @property
    def rank(self) -> tuple[object, ...]:
        """Return what decides: seconds, then bytes, then how little is asked for."""
        one = self.layout
        plain = (one.stages_per_rank, list(SCHEDULES).index(one.schedule), one.zero, RECOMPUTE.index(one.recompute))
        return (self.seconds, self.bytes, *plain, one.microbatch, self.mesh)


@dataclass(slots=True)
class _Family:
    """Layouts of one mesh and one microbatch size."""

    mesh: Mesh
    microbatch: int
    schedules: list[tuple[str, int]]
    floor: float = 0.0
    seen: dict[tuple[tuple[str, int], int, str], Candidate] = field(default_factory=dict)


class _Best:
    """The best candidates so far: some of each mesh, and how fast another must be to count."""

    def __init__(self, top: int, each: int) -> None:
        self.top, self.each = top, each
        self.threshold = math.inf
        self._held: dict[Mesh, list[Candidate]] = {}

    def bound(self, mesh: Mesh) -> float:
        """Return the seconds above which nothing of this mesh counts."""
        held = self._held.get(mesh, ())
        return min(self.threshold, held[-1].seconds) if len(held) == self.each else self.threshold

    def add(self, one: Candidate) -> None:
        held = self._held.setdefault(one.mesh, [])
        insort(held, one, key=lambda one: one.rank)
        del held[self.each :]
        firsts = sorted(held[0].seconds for held in self._held.values())
        if len(firsts) >= self.top:
            self.threshold = firsts[self.top - 1]

    def candidates(self) -> list[Candidate]:
        chosen = sorted(self._held.values(), key=lambda held: held[0].rank)[: self.top]
        return sorted((one for held in chosen for one in held), key=lambda one: one.rank)


class Survey:
    """All layouts of a transformer on a cluster, evaluated as far as was needed."""

    def __init__(
        self,
        transformer: Transformer,
        cluster: Cluster,
        *,
        batch: int,
        pins: Pins,
        evaluate: Evaluator,
        refine: Evaluator | None = None,
    ) -> None:
        self.transformer, self.cluster, self.batch, self.pins = transformer, cluster, batch, pins
        self.evaluate, self.refine = evaluate, refine
        self.num_evaluated = 0
        self._exact: dict[Layout, Candidate] = {}
        self._families = [self._floored(one) for one in self._enumerated()]
        self._families.sort(key=lambda one: one.floor)

    def asked(self, cluster: Cluster, *, batch: int, pins: Pins) -> Survey:
        """Return the survey of another question about the same transformer."""
        return Survey(self.transformer, cluster, batch=batch, pins=pins, evaluate=self.evaluate, refine=self.refine)

    def exact(self, layout: Layout) -> Candidate:
        """Return what the layout takes as exactly as is known; the longest pipelines are left to the formulas."""
        if layout not in self._exact:
            known = self.refine if layout.num_microbatches * layout.num_stages <= MOST_PAIRS else None
            estimate = (known or self.evaluate)(self.transformer, self.cluster, layout)
            self._exact[layout] = Candidate(layout, estimate, is_exact=known is not None)
        return self._exact[layout]

    @property
    def num_layouts(self) -> int:
        """Return how many layouts there are."""
        settings = len(recomputations(self.pins))
        return sum(len(one.schedules) * len(zero_stages(one.mesh, self.pins)) * settings for one in self._families)

    def best(self, limit_bytes: float, *, top: int = 1, each: int = 1) -> list[Candidate]:
        """Return the `each` best layouts of each of the `top` best meshes that stay within the limit, best first."""
        found = _Best(top, each)
        for family in self._families:
            if family.floor > found.bound(family.mesh):
                if family.floor > found.threshold:
                    break
                continue
            for schedule in family.schedules:
                self._search(family, schedule, limit_bytes, found)
        return found.candidates()

    def smallest(self) -> Candidate | None:
        """Return the layout that holds the least, or None where the pins admit none."""
        least: dict[Mesh, _Family] = {}
        for family in self._families:
            if family.mesh not in least or family.microbatch < least[family.mesh].microbatch:
                least[family.mesh] = family
        every = (
            self._seen(family, schedule, zero, recomputations(self.pins)[-1])
            for family in least.values()
            for schedule in family.schedules
            for zero in zero_stages(family.mesh, self.pins)[-2:]
        )
        return min(every, key=lambda one: (one.bytes, one.seconds), default=None)

    def _enumerated(self) -> Iterator[_Family]:
        for mesh in meshes(self.transformer, self.cluster, self.batch, self.pins):
            for size in microbatch_sizes(self.batch, mesh, self.pins):
                admitted = schedules_of(self.transformer, mesh, self.batch // (mesh.data * size), self.pins)
                if admitted:
                    yield _Family(mesh, size, admitted)

    def _floored(self, family: _Family) -> _Family:
        """Note what no layout of the family can save: work on a perfectly even cut, without bubble and exchange."""
        zero, recompute = zero_stages(family.mesh, self.pins)[0], recomputations(self.pins)[0]
        took = self._seen(family, ("1f1b", 1), zero, recompute).estimate.seconds
        weights = stage_weights(self.transformer, layer_counts(self.transformer, family.mesh.pipeline))
        even = sum(weights) / (len(weights) * max(weights))
        family.floor = _SLACK * even * (took.compute + took.recompute + took.tensor + took.context + took.expert)
        return family

    def _search(self, family: _Family, schedule: tuple[str, int], limit: float, found: _Best) -> None:
        """Add what stays within the limit and may be among the best."""
        again = recomputations(self.pins)
        larger = SAVERS.get(schedule, schedule)
        if larger not in family.schedules:
            larger = schedule
        for zero in zero_stages(family.mesh, self.pins):
            first = self._seen(family, larger, zero, again[0])
            if larger != schedule and first.bytes <= limit:
                continue
            took = first.estimate.seconds
            if took.total - took.data_exposed - took.optimizer > found.bound(family.mesh):
                return
            if min(self._seen(family, schedule, zero, one).bytes for one in (again[0], again[-1])) > limit:
                continue
            for recompute in again:
                one = self._seen(family, schedule, zero, recompute)
                if one.seconds > found.bound(family.mesh):
                    break
                if one.bytes <= limit:
                    found.add(one)
                    break

    def _seen(self, family: _Family, schedule: tuple[str, int], zero: int, recompute: str) -> Candidate:
        key = (schedule, zero, recompute)
        if key not in family.seen:
            layout = layout_of(
                self.transformer, self.batch, self.pins, family.mesh, family.microbatch, schedule, zero, recompute
            )
            family.seen[key] = Candidate(layout, self.evaluate(self.transformer, self.cluster, layout))
            self.num_evaluated += 1
        return family.seen[key]
