"""Local search on rows: move one action along the critical path, and keep changes that are no worse.

The critical path runs back from the last end, through whatever each action started right after. If it stays on one rank
for several actions, these form a block:

    rank 1   ... F4 [I1 W0 F5 I2] ...          rank 0 waits for I2: a move takes something out from before it,
                            └──► rank 0        or moves the first of the block, which rank 1 waited for, further back

Only moves that touch a block can shorten the path. If a move would make the rank hold too much, a W that is due anyway
moves ahead; if there is none, the move is dropped. Worse rows are accepted now and then, ever more rarely (simulated
annealing), because most orders one move away from the best look worse at first.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from drumline.plan.search.bounds.instance import B, F, I, Instance, Rows, W
from drumline.plan.search.objective import Objective, Score

Block = tuple[int, int, int]

_REACH = 8


class Neighbourhood:
    """Legal moves of single actions inside rows."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        factors = instance.costs.factors(instance.num_microbatches)
        # Equal microbatches may as well stay in order; unequal ones may overtake each other.
        self.in_order = len(set(factors)) == 1

    def conflict(self, first: int, second: int) -> bool:
        """Whether `first` must stay before `second` on one rank."""
        need = self.instance.need
        if first // 4 == second // 4 or need[second] == first - (2 if first % 4 == B else 0):
            return True
        if not self.in_order:
            return False
        per_stage = 4 * self.instance.num_microbatches
        if first // per_stage != second // per_stage:
            return False
        number, other = first % 4, second % 4
        return number == other or (number != F and other != F and B in (number, other))

    def moved(self, row: list[int], rank: int, source: int, target: int, length: int = 1) -> list[int] | None:
        """Return the row with `length` actions from `source` moved to begin at `target`; None if not allowed."""
        piece, rest = row[source : source + length], [*row[:source], *row[source + length :]]
        changed = [*rest[:target], *piece, *rest[target:]]
        return self.allowed(row, changed, rank, min(source, target), max(source, target) + length)

    def swapped(self, row: list[int], rank: int, number: int, other: int) -> list[int] | None:
        """Return the row with two actions exchanged, which hardly changes what is held."""
        changed = list(row)
        changed[number], changed[other] = row[other], row[number]
        return self.allowed(row, changed, rank, min(number, other), max(number, other) + 1)

    def allowed(self, row: list[int], changed: list[int], rank: int, low: int, high: int) -> list[int] | None:
        """Return the changed row (it differs in [low, high)), repaired if it holds too much; None if not allowed."""
        before = row[low:high]
        place = {number: at for at, number in enumerate(changed[low:high])}
        for at, first in enumerate(before):
            for second in before[at + 1 :]:
                if place[first] > place[second] and self.conflict(first, second):
                    return None
        return changed if self.instance.fits(changed, rank) else self.repaired(changed, rank)

    def repaired(self, row: list[int], rank: int) -> list[int] | None:
        """Return the row with W moved ahead of whatever would hold too much; None if that is not enough."""
        limits = [(device.during, device.after, device.always[rank], device.most) for device in self.instance.resources]
        stash = [0.0] * len(limits)
        row_made: list[int] = []
        owed: list[int] = []
        paid: set[int] = set()
        for number in row:
            if number in paid:
                continue
            while any(
                always + (has + during[number]) > most
                for has, (during, _, always, most) in zip(stash, limits, strict=True)
            ):
                if not owed:
                    return None
                row_made.append(owed.pop(0))
                paid.add(row_made[-1])
                stash = [has + after[row_made[-1]] for has, (_, after, _, _) in zip(stash, limits, strict=True)]
            row_made.append(number)
            stash = [has + after[number] for has, (_, after, _, _) in zip(stash, limits, strict=True)]
            if number % 4 == I:
                owed.append(number + 1)
            elif number % 4 == W:
                owed.remove(number)
        return row_made

    def rejoined(self, row: list[int], rank: int, at: int) -> list[int] | None:
        """Return the row with the backward at `at` joined if it was split, and split if it was whole."""
        number = row[at]
        if number % 4 == B:
            changed = [*row[:at], number - 2, number - 1, *row[at + 1 :]]
        elif number % 4 == I:
            changed = [number + 2 if n == number else n for n in row if n != number + 1]
        else:
            return None
        return changed if self.instance.fits(changed, rank) else None


def critical_blocks(
    instance: Instance, rows: Rows, ready: Sequence[float], rank: int, rng: random.Random
) -> list[Block]:
    """Return the critical path to a rank's end as blocks (rank, first position, last position), the last one first.

    If an action started right after two others, the path follows one of them at random.
    """
    seconds, latency, need = instance.seconds, instance.latency, instance.need
    row = rows[rank]
    at = last = len(row) - 1
    slack = 1e-9 * max(1.0, _ended(ready, latency, row[-1]))
    blocks: list[Block] = []
    while True:
        number = row[at]
        start = _ended(ready, latency, number) - seconds[number]
        needed = need[number]
        by_need = needed >= 0 and instance.rank[needed // 4] != rank and ready[needed] >= start - slack
        if at > 0 and _ended(ready, latency, row[at - 1]) >= start - slack and not (by_need and rng.random() < 0.5):
            at -= 1
            continue
        blocks.append((rank, at, last))
        if not by_need:
            return blocks
        rank = instance.rank[needed // 4]
        row = rows[rank]
        at = last = row.index(needed) if needed in row else row.index(needed + 2)


def _ended(ready: Sequence[float], latency: Sequence[float], number: int) -> float:
    return ready[number - 2 if number % 4 == B else number] - latency[number]


class Annealer:
    r"""Simulated annealing from given rows; every step is one move along the critical path.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> item = Instance(Costs(), Placement.linear(2), 2)
    >>> annealer = Annealer(Objective(item), random.Random(0))
    >>> value, rows = annealer.run(item.rows_of(item.plain), num_steps=400, heat=0.02)
    >>> value, item.program(rows).format()
    (7.0, '0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1')
    """

    def __init__(self, objective: Objective, rng: random.Random, *, may_join: bool = False) -> None:
        self.objective, self.instance, self.rng = objective, objective.instance, rng
        self.around = Neighbourhood(objective.instance)
        self.may_join = may_join

    def run(
        self,
        rows: Rows,
        *,
        num_steps: int,
        heat: float,
        keep_on: Callable[[float, Rows], bool] = lambda value, rows: True,
    ) -> tuple[float, Rows]:
        """Return the best value and rows of this many steps; `keep_on` gets the best so far before every step."""
        now = self.objective.measure(rows)
        assert now is not None, "a search begins with rows that run"
        best, best_rows, blocks = now.value, rows, self._blocks(rows, now)
        for step in range(num_steps):
            if not blocks or not keep_on(best, best_rows):
                break
            changed = self._moved(rows, blocks)
            then = None if changed is None else self.objective.measure(changed)
            if changed is None or then is None:
                continue
            cold = heat * best * (1 - step / num_steps)
            worse = then.value - now.value
            if worse <= 0 or (cold > 0 and self.rng.random() < math.exp(-worse / cold)):
                rows, now = changed, then
                blocks = self._blocks(rows, now)
                if now.value < best:
                    best, best_rows = now.value, rows
        return best, best_rows

    def _blocks(self, rows: Rows, now: Score) -> list[Block]:
        path = critical_blocks(self.instance, rows, now.ready, self.objective.longest(now.ends), self.rng)
        return [block for block in path if block[2] > block[1]]

    def _moved(self, rows: Rows, blocks: list[Block]) -> Rows | None:
        rng = self.rng
        rank, low, high = rng.choice(blocks)
        row = rows[rank]
        changed: list[int] | None
        if self.may_join and rng.random() < 0.15:
            changed = self.around.rejoined(row, rank, rng.randrange(low, high + 1))
        else:
            changed = self._shifted(row, rank, low, high)
        return None if changed is None or changed == row else [*rows[:rank], changed, *rows[rank + 1 :]]

    def _shifted(self, row: list[int], rank: int, low: int, high: int) -> list[int] | None:
        """Return the row with something moved to either end of the block, or across it, or swapped near it."""
        rng, kind = self.rng, self.rng.random()
        if kind < 0.3:
            number = rng.randrange(low, high + 1)
            other = min(max(number + rng.randrange(-_REACH, _REACH + 1), 0), len(row) - 1)
            return self.around.swapped(row, rank, number, other)
        if kind < 0.45:
            length = rng.choice((2, 2, 3))
            source = rng.randrange(low, high + 1)
            target = source + rng.randrange(-_REACH, _REACH + 1)
            if source + length > len(row) or not 0 <= target <= len(row) - length:
                return None
            return self.around.moved(row, rank, source, target, length)
        if kind < 0.75:
            source, target = rng.randrange(low, high), high
        else:
            source, target = rng.randrange(low + 1, high + 1), low
        if rng.random() < 0.3:
            target = source + (1 if target > source else -1)
        return self.around.moved(row, rank, source, target)
