"""The order in which unequal microbatches run: a few are simulated, and the quickest is taken where it pays.

    as given                  5 1 8 2 7 3        a long microbatch at an end is waited for by every rank
    longest in the middle     1 3 7 8 5 2        ranks fill and drain with short ones

A program says which slot runs when, and an order which microbatch is in which slot. So only ranks with the first and
the last stage have to know of it. Gradients are added slot by slot: in another order they differ by rounding.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drumline.core.errors import BatchError, RunError, counted
from drumline.core.measured.measured import Measured
from drumline.core.program import Program
from drumline.core.simulate.simulate import makespans, simulate
from drumline.core.timeline.idle import Limit
from drumline.engine.ranks.crew import Crew
from drumline.engine.ranks.observer import Observer
from drumline.engine.ranks.tally import RankReport, Tally
from drumline.engine.stages.sizes import Size, SizeCosts, fitted, sizes_given
from drumline.plan.search.search import search
from drumline.runtime.step import Step

_LEAST_GAIN = 0.01  # of the simulated step: for less, nothing is changed
_PARTS = 32  # into which the mean microbatch's cost is divided where costs are rounded
_MOST_KEPT = 4096
_NUM_STEPS = 16  # by which costs are fitted

Order = tuple[int, ...]


def orders(weights: Sequence[float]) -> dict[str, Order]:
    """Return the orders that are tried; what costs the same stays as given.

    >>> for name, order in orders([5, 1, 8, 2, 7, 3]).items():
    ...     print(name, [[5, 1, 8, 2, 7, 3][at] for at in order])
    as given [5, 1, 8, 2, 7, 3]
    longest in the middle [1, 3, 7, 8, 5, 2]
    shortest first [1, 2, 3, 5, 7, 8]
    longest first [8, 7, 5, 3, 2, 1]
    longest at both ends [8, 5, 2, 1, 3, 7]
    short and long in turn [1, 8, 2, 7, 3, 5]
    """
    up = sorted(range(len(weights)), key=lambda at: weights[at])
    down = up[::-1]
    turns = [number for pair in zip(up, down, strict=True) for number in pair][: len(up)]
    listed = {
        "as given": range(len(weights)),
        "longest in the middle": (*up[::2], *up[1::2][::-1]),
        "shortest first": up,
        "longest first": down,
        "longest at both ends": (*down[::2], *down[1::2][::-1]),
        "short and long in turn": turns,
    }
    return {name: tuple(order) for name, order in listed.items()}


@dataclass(frozen=True, slots=True)
class LengthOrder:
    """The order that was chosen, and what a step takes by it and as given, simulated."""

    name: str
    order: Order
    makespan: float
    as_given: float

    @property
    def gain(self) -> float:
        """The part of the simulated step that the order saves."""
        return 1.0 - self.makespan / self.as_given


def arranged(program: Program, costs: SizeCosts, sizes: Sequence[Size]) -> LengthOrder:
    """Return the order by which a step takes least in the simulator; as given where that saves less than 1%.

    >>> from drumline.schedules import generate
    >>> program = generate("1f1b", num_ranks=2, num_microbatches=6)
    >>> order = arranged(program, SizeCosts(2), sizes_given([500, 100, 800, 200, 700, 300]))
    >>> order.name, round(order.gain, 2)
    ('longest in the middle', 0.29)
    """
    weights = costs.weights(sizes)
    tried = orders(weights)
    each = costs.of(sizes)
    factors = each.factors(len(sizes))
    times = makespans(
        program, [replace(each, microbatch_factor=tuple(factors[at] for at in order)) for order in tried.values()]
    ).tolist()
    best = min(range(len(times)), key=times.__getitem__)
    if times[best] > times[0] * (1.0 - _LEAST_GAIN):
        best = 0
    name = list(tried)[best]
    return LengthOrder(name, tried[name], times[best], times[0])


@dataclass(frozen=True, slots=True)
class SearchedSizes:
    """What was found for microbatches of given sizes; times are of a step, simulated.

    `program` is None where nothing found pays: a step with program=None runs by the pipeline's own.
    """

    program: Program | None
    arranged: LengthOrder  # by the pipeline's own program
    predicted: float
    bound: float
    seconds: float  # that the search took
    is_measured: bool  # whether times are seconds, fitted to steps; else they are by size alone


class Arranging(Observer):
    """Knows orders for a pipeline's steps, and searches programs for microbatches of given sizes.

    `program` returns the one that runs.
    """

    def __init__(self, crew: Crew, program: Callable[[], Program]) -> None:
        self._crew, self._program = crew, program
        self._costs: SizeCosts | None = None  # the same on all ranks
        self._known: dict[Any, LengthOrder] = {}
        self._searched: dict[Any, SearchedSizes] = {}
        self._measured_steps: deque[tuple[Tally, tuple[Size, ...]]] = deque(maxlen=_NUM_STEPS)

    @property
    def costs(self) -> SizeCosts:
        """What microbatches cost: as measured once a search has made all ranks agree on it, before by size alone."""
        return self._costs or SizeCosts(self._program().num_stages)

    def order_of(self, sizes: tuple[Size, ...]) -> Order:
        """Return the order in which microbatches of these sizes run."""
        return self.arranged(sizes).order

    def arranged(self, sizes: tuple[Size, ...]) -> LengthOrder:
        """Return the same with what is known of it; costs that differ little are not simulated again."""
        program = self._program()
        weights = self.costs.weights(sizes)
        mean = sum(weights) / len(weights)
        key = (id(program), self._costs is None, tuple(round(_PARTS * weight / mean) for weight in weights))
        order = self._known.get(key)
        if order is None:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            order = self._known[key] = arranged(program, self.costs, sizes)
        return order

    def moved(self) -> None:
        """Forget what was measured and found for other stages."""
        self._costs = None
        for memory in (self._measured_steps, self._known, self._searched):
            memory.clear()

    def after_telling(self, step: Step, tally: Tally, each: Sequence[RankReport]) -> None:
        """Keep what is measured of a step whose sizes are known, on the rank that searches."""
        if step.train and step.sizes and self._crew.rank == 0:
            sizes = step.sizes
            self._measured_steps.append((tally, tuple(sizes[at] for at in step.order) if step.order else tuple(sizes)))

    def search(self, sizes_by_user: Sequence[Any], *, seconds: float, num_steps: int) -> SearchedSizes:
        """Search a program for microbatches of these sizes; all ranks call it alike, and rank 0 decides."""
        sizes, program = sizes_given(sizes_by_user), self._program()
        if len(sizes) != program.num_microbatches:
            raise BatchError(
                f"{counted(len(sizes), 'size')} are given",
                expected=f"one for each of the program's {counted(program.num_microbatches, 'microbatch')}",
            )
        key = (id(program), sizes, num_steps)
        if key not in self._searched:
            with self._crew.together("the search for a program"):
                mine = self._search_result(sizes, seconds, num_steps) if self._crew.rank == 0 else None
                searched, self._costs = self._crew.collect("search for sizes", mine)[0]
            self._known.clear()
            self._searched[key] = searched
        return self._searched[key]

    def _search_result(
        self, sizes: tuple[Size, ...], seconds: float, num_steps: int
    ) -> tuple[SearchedSizes, SizeCosts]:
        started, program = time.monotonic(), self._program()
        costs = self._fitted()
        ours = arranged(program, costs, sizes)
        each = costs.of([sizes[at] for at in ours.order])
        now = simulate(program, each)
        order = search(
            each,
            program.placement,
            num_microbatches=len(sizes),
            limit=Limit(max_activations=max(now.peak_activations)),
            seconds=seconds,
        )
        took, saved = time.monotonic() - started, ours.makespan - order.value
        # What a search took is only known in the same unit where seconds were measured.
        pays = saved >= _LEAST_GAIN * ours.makespan and (not costs.is_measured or saved * num_steps > took)
        better = order.program if pays else None
        return SearchedSizes(better, ours, order.value, float(order.bound.value), took, costs.is_measured), costs

    def _fitted(self) -> SizeCosts:
        steps: list[tuple[Measured, Sequence[Size]]] = []
        for tally, sizes in self._measured_steps:
            try:
                steps.append((tally.timeline, sizes))
            except RunError:  # captured, or not passed by the device
                continue
        return fitted(steps, self._program().num_stages)
