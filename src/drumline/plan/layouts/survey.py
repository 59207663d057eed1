"""Find the best layouts under a memory limit without evaluating most of them.

Layouts with the same mesh and microbatch size form a family: they differ in schedule, ZeRO stage and recomputation.
Memory comes first: bytes are fast to compute, and show how much must be recomputed. Then a few assumptions that hold
for any estimate let the search skip what cannot win:

    more recomputation never saves time, and never holds more           what includes another that fits is not tried
    ZeRO 2 and 3 exchange more than ZeRO 1, and work no less            its bound without exchange serves at first
    larger microbatches never hold less                                 if the smallest do not fit, none do
    all layouts of a family do the same work, at best evenly            a lower bound of their seconds
    no rank starts before a microbatch has come down to it              a bound of each layout (`least_seconds`)

Layouts are opened in the order of their bounds, so that the first ones evaluated rule out most of the others. Results
are cached, so another limit costs only what was skipped before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import heapify, heappop, heappush
from itertools import count
from typing import NamedTuple

from drumline.plan.cluster.device_memory import fixed_bytes, peak_bytes
from drumline.plan.cluster.estimate import Estimate, Least, estimate, least_seconds, recomputed_seconds
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout, includes
from drumline.plan.cluster.stages import even_counts, layer_counts
from drumline.plan.cluster.transformer import Transformer
from drumline.plan.layouts.choice import BestChoices, Choice
from drumline.plan.layouts.layer_moves import LayerMoves, Weigher
from drumline.plan.layouts.pins import Degrees, Pins
from drumline.plan.layouts.space import layout_of, meshes, schedules_of
from drumline.schedules import DEFAULT, find

Evaluator = Callable[[Transformer, Cluster, Layout], Estimate]
Bounder = Callable[[Transformer, Cluster, Layout], Least]
Adder = Callable[[Transformer, Cluster, Layout], float]
_SIMULATED: Evaluator = partial(estimate, exact=True)
_Key = tuple[tuple[str, int], int, str]  # the schedule with its stages per rank, the ZeRO stage, the recomputation

MOST_PAIRS = 40_000  # (stage, microbatch) pairs of the largest pipeline to simulate
_BOUNDED = 0.98  # factor on a bound: formulas may be so much shorter than the simulator
_SLACK = 0.97  # factor on a lower bound: stages of other schedules may be slightly more even than the weights say


@dataclass(slots=True)
class _Family:
    """Layouts with one mesh and one microbatch size, and what is known about them."""

    mesh: Degrees
    microbatch: int
    schedules: list[tuple[str, int]]
    floor: float | None = None
    fixed: dict[tuple[tuple[str, int], int], float] = field(default_factory=dict)
    weighed: dict[_Key, float] = field(default_factory=dict)
    layouts: dict[_Key, Layout] = field(default_factory=dict)
    choices: dict[_Key, Choice] = field(default_factory=dict)
    bounded: dict[_Key, Least] = field(default_factory=dict)


class _Open(NamedTuple):
    """A family, or a schedule of it, before or after it was weighed; none of its layouts takes less than `least`.

    `is_bounded` says whether `least` is the bound of this very layout, or of a faster one that was quick to compute.
    """

    least: float
    number: int
    family: _Family
    key: _Key | None = None
    is_weighed: bool = False
    is_bounded: bool = True


def other_cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Return cuts into stages that are as equal as possible, without and with the embedding and the head as layers.

    >>> other_cuts(6, 4), other_cuts(5, 4)
    ([(1, 2, 2, 1)], [(1, 2, 1, 1)])
    >>> other_cuts(10, 4)
    [(2, 3, 3, 2)]
    """
    cuts = [even_counts(num_layers, num_stages)] if num_stages <= num_layers else []
    each, odd = divmod(num_layers + 2, num_stages)
    if not odd and num_stages > 1:
        cuts.append((each - 1, *(each,) * (num_stages - 2), each - 1))
    return list(dict.fromkeys(cuts))


@dataclass(eq=False)
class Survey:
    """All layouts of a transformer on a cluster, evaluated on demand.

    `evaluate` says what a layout takes. `bound` is faster and says what it takes at least: what is too slow by that is
    not evaluated. `more` is faster still: what recomputation adds at least. `refine` is exact, and `weigh` returns the
    bytes alone, `weigh_fixed` those that no recomputation frees.
    """

    transformer: Transformer
    cluster: Cluster
    batch: int
    pins: Pins
    evaluate: Evaluator = estimate
    refine: Evaluator = _SIMULATED
    weigh: Weigher = peak_bytes
    bound: Bounder = least_seconds
    more: Adder = recomputed_seconds
    weigh_fixed: Weigher = fixed_bytes
    num_evaluated: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._kinds, self._practice = self.pins.recomputations(self.transformer), self.pins.practice
        # What was asked before: the fastest by limit, and by the number of devices, the batch and the limit.
        self.fastest: dict[float, Choice | None] = {}
        self.elsewhere: dict[tuple[int, int, float], Choice | None] = {}
        self._exact: dict[Layout, Choice] = {}
        self._moves = LayerMoves(self.transformer, self.cluster, self.weigh)
        self._families = sorted(self._enumerated(), key=self._floor)
        # Per mesh, the family with the smallest microbatches: if it holds too much, all of them do.
        self._least: dict[Degrees, _Family] = {}
        for family in self._families:
            if family.mesh not in self._least or family.microbatch < self._least[family.mesh].microbatch:
                self._least[family.mesh] = family

    def exact(self, layout: Layout) -> Choice:
        """Return the costs of the layout as exactly as known; formulas handle the longest pipelines."""
        if layout not in self._exact:
            is_exact = layout.num_microbatches * layout.num_stages <= MOST_PAIRS
            known = (self.refine if is_exact else self.evaluate)(self.transformer, self.cluster, layout)
            self._exact[layout] = Choice.of(self.cluster, layout, known, is_exact=is_exact)
        return self._exact[layout]

    def cut(self, layout: Layout, limit_bytes: float) -> Choice:
        """Return the layout with the best of several cuts, simulated exactly.

        Interleaved stages wait for each other, so equal stages may be faster than equal ranks; no formula shows which.
        From the best of these, layers move one by one as long as that is faster, if the pipeline is small enough.
        """
        first = self.exact(layout)
        if find(layout.schedule).placement == "v" or layout.stages_per_rank == 1 or not first.is_exact:
            return first
        cuts = other_cuts(self.transformer.num_layers, layout.num_stages)
        others = [self.exact(replace(layout, counts=counts)) for counts in cuts if counts != layout.counts]

        def order(choice: Choice) -> tuple[object, ...]:
            return (choice.bytes > limit_bytes, choice.rank)

        best = min([first, *others], key=order)
        if best.bytes > limit_bytes:
            return best
        return min(best, self.exact(self._moves.best(best.layout, limit_bytes)), key=order)

    @property
    def num_layouts(self) -> int:
        """Return the number of layouts."""
        return sum(
            (len(self._kinds) + self._largest_stage(kind.mesh, schedule) - 1) * len(self.pins.zero_stages(kind.mesh))
            for kind in self._families
            for schedule in kind.schedules
        )

    def _largest_stage(self, mesh: Degrees, schedule: tuple[str, int]) -> int:
        """Return the most layers of a stage that may be recomputed apart from the others; 1 if a pin says which."""
        if self.pins.recompute is not None or not self.pins.runs.some_layers:
            return 1
        return max(layer_counts(self.transformer, mesh.pipeline, *schedule))

    def best(self, limit_bytes: float, *, top: int = 1, margin: float = 0.0) -> list[Choice]:
        """Return the best layout of each of the `top` best meshes within the limit, best first.

        With a margin, there are also all layouts that take at most that share longer than the best.
        """
        best = BestChoices(top, margin)
        numbers = count()
        opened = [_Open(self._floor(family), next(numbers), family) for family in self._families]
        heapify(opened)
        while opened and _BOUNDED * opened[0].least <= best.threshold:
            branch = heappop(opened)
            family, key, bound = branch.family, branch.key, best.bound(branch.family.mesh)
            if _BOUNDED * branch.least > bound:
                continue
            inside: Iterable[_Open] = ()
            if key is None:
                inside = self._split(family, limit_bytes)
            elif not branch.is_bounded:
                least = max(branch.least, self._took_least(family, key).total)
                inside = [branch._replace(least=least, is_bounded=True)]
            elif not branch.is_weighed:
                inside = self._weighed(branch, limit_bytes, bound)
            elif (choice := self._choice(family, key)).seconds <= bound:
                best.add(choice)
            for each in inside:
                if _BOUNDED * each.least <= bound:
                    heappush(opened, each._replace(number=next(numbers)))
        return best.candidates()

    def smallest(self) -> Choice | None:
        """Return the layout that holds the least, or None if the pins allow none."""
        every = (
            (self._bytes(family, (schedule, zero, most)), at, family, (schedule, zero, most))
            for at, family in enumerate(self._least.values())
            for schedule in family.schedules
            for zero in self.pins.zero_stages(family.mesh)[-2:]
            for most in self._kinds[:-3:-1]
        )
        smallest = min(every, key=lambda entry: entry[:2], default=None)
        return None if smallest is None else self._choice(smallest[2], smallest[3])

    def _enumerated(self) -> Iterator[_Family]:
        for mesh in meshes(self.transformer, self.cluster, self.batch, self.pins):
            for size in self.pins.microbatch_sizes(self.batch, mesh):
                count = self.batch // (mesh.data * size)
                admitted = schedules_of(self.transformer, mesh, count, self.pins)
                if admitted:
                    yield _Family(mesh, size, admitted)

    def _floor(self, family: _Family) -> float:
        """Return what no layout of the family can save: work on a perfectly even cut, without bubble and exchange."""
        if family.floor is None:
            key = ((DEFAULT, 1), self.pins.zero_stages(family.mesh)[0], self._kinds[0])
            family.floor = _SLACK * self._took_least(family, key).even
        return family.floor

    def _split(self, family: _Family, limit: float) -> Iterator[_Open]:
        """Yield the family's schedules and ZeRO stages, with bounds that are quick to compute.

        What holds too much with the smallest microbatches is left out: all families of a mesh share that answer.
        """
        least, plain = self._least[family.mesh], self._kinds[0]
        for schedule in family.schedules:
            alone = 0.0  # seconds of ZeRO 1 without its exchange, if it fits
            for zero in self.pins.zero_stages(family.mesh):
                if self._never_fits(least, schedule, zero, limit):
                    continue
                key = (schedule, zero, plain)
                if alone:
                    yield _Open(alone, 0, family, key, is_bounded=False)
                    continue
                least_taken = self._took_least(family, key)
                alone = least_taken.alone if zero == 1 else 0.0
                yield _Open(least_taken.total, 0, family, key)

    def _never_fits(self, family: _Family, schedule: tuple[str, int], zero: int, limit: float) -> bool:
        """Whether even the most recomputation holds too much; unknown, so False, if the family lacks the schedule.

        A layer that is recomputed as a whole needs room for all of it: the kind before the last may hold less.
        """
        if schedule not in family.schedules:
            return False
        if (schedule, zero) not in family.fixed:
            layout = self._layout(family, (schedule, zero, self._kinds[-1]))
            family.fixed[schedule, zero] = self.weigh_fixed(self.transformer, layout)
        return family.fixed[schedule, zero] > limit or all(
            self._bytes(family, (schedule, zero, name)) > limit for name in self._kinds[:-3:-1]
        )

    def _weighed(self, branch: _Open, limit: float, bound: float) -> Iterator[_Open]:
        """Yield a schedule with as much recomputation as it needs within the limit, with quick bounds."""
        assert branch.key is not None, "families are split first"
        schedule, zero, _ = branch.key
        for recompute in self._recomputations(branch, limit, bound):
            key = (schedule, zero, recompute)
            yield _Open(self._took_more(branch, key), 0, branch.family, key, is_weighed=True, is_bounded=False)

    def _took_more(self, branch: _Open, key: _Key) -> float:
        """Return what a layout takes at least, from what the same without recomputation does."""
        assert branch.key is not None, "families are split first"
        family = branch.family
        if key == branch.key or self._kinds[0] != "none":
            return branch.least
        less, layout = self._took_least(family, branch.key), self._layout(family, key)
        return max(branch.least, less.working + self.more(self.transformer, self.cluster, layout))

    def _recomputations(self, branch: _Open, limit: float, bound: float) -> Iterator[str]:
        """Yield the least recomputations of every layer within the limit, and that of the fewest whole layers.

        For these to be looked for, a single layer has to be within the bound.
        """
        assert branch.key is not None, "families are split first"
        family, (schedule, zero, _) = branch.family, branch.key
        operations = self._least_within(family, schedule, zero, limit)
        if (
            not operations
            or operations == ["none"]
            or self.pins.recompute is not None
            or not self.pins.runs.some_layers
        ):
            yield from operations
            return
        yield from (name for name in operations if name != "full")
        if _BOUNDED * self._took_more(branch, (schedule, zero, "full:1")) > bound:
            return
        fewest = self._fewest_within(family, schedule, zero, limit)
        if self._bytes(family, (schedule, zero, fewest)) <= limit:
            yield fewest

    def _fewest_within(self, family: _Family, schedule: tuple[str, int], zero: int, limit: float) -> str:
        """Return the full recomputation of as few layers of every stage as keep within the limit.

        Bytes fall almost in a line with the number of layers, so the line through two known numbers says which is next.
        """
        most = self._largest_stage(family.mesh, schedule)
        over, within = 0, most
        over_bytes, within_bytes = (self._bytes(family, (schedule, zero, self._kinds[end])) for end in (0, -1))
        while within - over > 1 and within_bytes <= limit < over_bytes:
            steps = math.ceil((over_bytes - limit) / (over_bytes - within_bytes) * (within - over))
            middle = over + min(max(steps, 1), within - over - 1)
            middle_bytes = self._bytes(family, (schedule, zero, f"full:{middle}"))
            if middle_bytes <= limit:
                within, within_bytes = middle, middle_bytes
            else:
                over, over_bytes = middle, middle_bytes
        return f"full:{within}" if within < most else "full"

    def _least_within(self, family: _Family, schedule: tuple[str, int], zero: int, limit: float) -> list[str]:
        """Return the recomputations within the limit that include no other within it."""
        again = self._kinds
        if self._never_fits(family, schedule, zero, limit):
            return []
        names: list[str] = []
        over: list[str] = []
        for name in (again[0], *again[:0:-1]):  # what is included in something that does not fit does not fit either
            if not any(includes(more, name) for more in over):
                if self._bytes(family, (schedule, zero, name)) <= limit:
                    names.append(name)
                elif name != "full":
                    over.append(name)
            if names == [again[0]]:
                break
        return [name for name in names if not any(includes(name, less) for less in names if less != name)]

    def _bytes(self, family: _Family, key: _Key) -> float:
        if key not in family.weighed:
            family.weighed[key] = self.weigh(self.transformer, self._layout(family, key))
        return family.weighed[key]

    def _choice(self, family: _Family, key: _Key) -> Choice:
        if key not in family.choices:
            layout = self._layout(family, key)
            known = self.evaluate(self.transformer, self.cluster, layout)
            family.choices[key] = Choice.of(self.cluster, layout, known)
            self.num_evaluated += 1
        return family.choices[key]

    def _took_least(self, family: _Family, key: _Key) -> Least:
        """Return what a layout takes at least."""
        if key not in family.bounded:
            family.bounded[key] = self.bound(self.transformer, self.cluster, self._layout(family, key))
        return family.bounded[key]

    def _layout(self, family: _Family, key: _Key) -> Layout:
        if key not in family.layouts:
            settings = family.mesh, family.microbatch, *key, self._practice
            family.layouts[key] = layout_of(self.transformer, self.batch, self.pins, *settings)
        return family.layouts[key]
