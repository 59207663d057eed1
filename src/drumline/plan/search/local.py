"""Local search on rows: move one action along the critical path, and keep changes that are no worse.

Worse rows are accepted now and then, ever more rarely (simulated annealing), because most orders one move away from the
best look worse at first. Steps run in the kernel, or in Python with the same results.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from drumline.core.kernel.library import Kernel, kernel, pointer
from drumline.plan.search.bounds.instance import Rows
from drumline.plan.search.moves import Block, EqualDraws, Neighbourhood, critical_blocks, falling
from drumline.plan.search.objective import Objective, Score
from drumline.plan.search.packed import PackedInstance, record

_REACH = 8
_ALL = 10**9


class Annealer:
    r"""Simulated annealing from given rows; every step is one move along the critical path.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> from drumline.plan.search.bounds.instance import Instance
    >>> item = Instance(Costs(), Placement.linear(2), 2)
    >>> annealer = Annealer(Objective(item), random.Random(0))
    >>> value, rows = annealer.run(item.rows_of(item.plain), num_steps=400, heat=0.02)
    >>> value, item.program(rows).format()
    (7.0, '0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1')
    """

    def __init__(self, objective: Objective, rng: random.Random, *, may_join: bool = False) -> None:
        self.objective, self.instance, self.rng = objective, objective.instance, rng
        self.may_join = may_join

    def run(
        self,
        rows: Rows,
        *,
        num_steps: int,
        heat: float,
        enough: float = -math.inf,
        steps_to_do: Callable[[float, Rows | None, int], int] = lambda value, rows, done: _ALL,
    ) -> tuple[float, Rows]:
        """Return the best value and rows of this many steps, or of fewer if the best is as low as `enough`.

        After some steps at a time, `steps_to_do` says how many may follow at most. It gets the best value, its rows if
        they are new, and how many steps were done.
        """
        annealing = self._begin(rows, num_steps, heat, enough)
        best, samples = annealing.best, 1 if self.objective.jitter is None else self.objective.jitter.num_samples
        most = max(1, annealing.chunk // (self.instance.num_actions * samples))
        steps = steps_to_do(best, None, 0)
        while steps > 0 and annealing.is_going:
            done = annealing.steps(min(steps, most))
            better, best = annealing.best < best, annealing.best
            steps = steps_to_do(best, annealing.best_rows if better else None, done)
        return annealing.best, annealing.best_rows

    def _begin(self, rows: Rows, num_steps: int, heat: float, enough: float) -> Annealing | CompiledAnnealing:
        library, draws, packed = kernel(), EqualDraws(self.rng.getrandbits(64)), self.objective.packed
        settings = AnnealSettings(num_steps, heat, enough, self.may_join)
        if library is None or packed is None:
            return Annealing(self.objective, rows, draws, settings)
        return CompiledAnnealing(library, packed, rows, draws, settings)


@dataclass(frozen=True, slots=True)
class AnnealSettings:
    """How an annealing goes; it ends when its best is as low as `enough`."""

    num_steps: int
    heat: float
    enough: float
    may_join: bool


class Annealing:
    """Steps in Python, from rows that run."""

    chunk = 20_000  # action numbers to time between two looks at the clock

    def __init__(self, objective: Objective, rows: Rows, draws: EqualDraws, settings: AnnealSettings) -> None:
        self.objective, self.instance, self.draws = objective, objective.instance, draws
        self.around = Neighbourhood(objective.instance)
        self.settings, self.step = settings, 0
        now = objective.measure(rows)
        assert now is not None, "a search begins with rows that run"
        self.rows, self.now = rows, now
        self.best, self.best_rows = now.value, rows
        self.blocks = self._blocks(rows, now)

    @property
    def is_going(self) -> bool:
        """Whether there are steps left, something to move, and something to gain."""
        return self.step < self.settings.num_steps and bool(self.blocks) and self.best > self.settings.enough

    def steps(self, most: int) -> int:
        """Do at most so many steps, and return how many."""
        done = 0
        while done < most and self.is_going:
            self._step(1.0 - self.step / self.settings.num_steps)
            self.step += 1
            done += 1
        return done

    def _step(self, left: float) -> None:
        changed = self._moved()
        then = None if changed is None else self.objective.measure(changed)
        if changed is None or then is None:
            return
        cold = self.settings.heat * self.best * left
        worse = then.value - self.now.value
        if worse <= 0 or (cold > 0 and self.draws.share() < falling(worse / cold)):
            self.rows, self.now = changed, then
            self.blocks = self._blocks(changed, then)
            if then.value < self.best:
                self.best, self.best_rows = then.value, changed

    def _blocks(self, rows: Rows, now: Score) -> list[Block]:
        path = critical_blocks(self.instance, rows, now.ready, self.objective.longest(now.ends), self.draws)
        return [block for block in path if block[2] > block[1]]

    def _moved(self) -> Rows | None:
        rank, low, high = self.blocks[self.draws.below(len(self.blocks))]
        row = self.rows[rank]
        changed: list[int] | None
        if self.settings.may_join and self.draws.share() < 0.15:
            changed = self.around.rejoined(row, rank, low + self.draws.below(high + 1 - low))
        else:
            changed = self._shifted(row, rank, low, high)
        return None if changed is None or changed == row else [*self.rows[:rank], changed, *self.rows[rank + 1 :]]

    def _shifted(self, row: list[int], rank: int, low: int, high: int) -> list[int] | None:
        """Return the row with something moved to either end of the block, or across it, or swapped near it."""
        draws = self.draws
        kind = draws.share()
        if kind < 0.3:
            number = low + draws.below(high + 1 - low)
            other = min(max(number - _REACH + draws.below(2 * _REACH + 1), 0), len(row) - 1)
            return self.around.swapped(row, rank, number, other)
        if kind < 0.45:
            length = (2, 2, 3)[draws.below(3)]
            source = low + draws.below(high + 1 - low)
            target = source - _REACH + draws.below(2 * _REACH + 1)
            if source + length > len(row) or not 0 <= target <= len(row) - length:
                return None
            return self.around.moved(row, rank, source, target, length)
        if kind < 0.75:
            source, target = low + draws.below(high - low), high
        else:
            source, target = low + 1 + draws.below(high - low), low
        if draws.share() < 0.3:
            target = source + (1 if target > source else -1)
        return self.around.moved(row, rank, source, target)


class CompiledAnnealing:
    """The same steps in the kernel: `_record` is where they are, `_reals` the same memory as real numbers."""

    chunk = 400_000

    def __init__(
        self, library: Kernel, packed: PackedInstance, rows: Rows, draws: EqualDraws, settings: AnnealSettings
    ) -> None:
        self._anneal, self._packed = library.anneal, packed
        count, actions, ranks = int(packed.offsets[-1]), packed.instance.num_actions, packed.instance.num_ranks
        flat, lengths = packed.flat(rows)
        self._best = flat.copy(), lengths.copy()
        numbers = np.zeros(4 * actions + 3 * (actions // 4 * 3) + 4 * ranks, dtype=np.int64)
        reals = np.zeros(5 * actions + 2 + 3 * ranks + len(packed.instance.resources) + ranks * ranks)
        blocks = np.zeros(3 * (count + 1), dtype=np.int64)
        self._arrays = flat, lengths, *self._best, blocks, numbers, reals
        self._record = record(0, settings.num_steps, 0, 0, int(settings.may_join), 0, 0, 0, 0, 0, *self._arrays)
        self._record.view(np.uint64)[5] = draws.state
        self._reals = self._record.view(np.float64)
        self._reals[[6, 9]] = settings.heat, settings.enough
        self._do(0)

    def _do(self, most: int) -> int:
        done = self._anneal(self._packed.address, pointer(self._record), most)
        assert done >= 0, "a search begins with rows that run"
        return done

    @property
    def best(self) -> float:
        """The best value so far."""
        return float(self._reals[8])

    @property
    def best_rows(self) -> Rows:
        """The best rows so far."""
        return self._packed.rows(*self._best)

    @property
    def is_going(self) -> bool:
        """Whether there are steps left, something to move, and something to gain."""
        step, num_steps, num_blocks = self._record[:3].tolist()
        return step < num_steps and num_blocks > 0 and self.best > float(self._reals[9])

    def steps(self, most: int) -> int:
        """Do at most so many steps, and return how many."""
        return self._do(most)
