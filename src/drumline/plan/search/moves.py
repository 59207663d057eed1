"""Moves of single actions inside rows, and the critical path that says which of them may help.

The critical path runs back from the last end, through whatever each action started right after. If it stays on one rank
for several actions, these form a block:

    rank 1   ... F4 [I1 W0 F5 I2] ...          rank 0 waits for I2: a move takes something out from before it,
                            └──► rank 0        or moves the first of the block, which rank 1 waited for, further back

Only moves that touch a block can shorten the path. If a move would make the rank hold too much, a W that is due anyway
moves ahead; if there is none, the move is dropped.

The kernel does all of this too, with the same random numbers (moves.c).
"""

from __future__ import annotations

from collections.abc import Sequence

from drumline.plan.search.bounds.instance import B, F, I, Instance, Rows, W

Block = tuple[int, int, int]

_WORD = 2**64 - 1


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
        if target > source:
            conflict = self._conflict_between(piece, rest[source:target])
        else:
            conflict = self._conflict_between(rest[target:source], piece)
        return None if conflict else self._fitting([*rest[:target], *piece, *rest[target:]], rank)

    def swapped(self, row: list[int], rank: int, number: int, other: int) -> list[int] | None:
        """Return the row with two actions exchanged, which hardly changes what is held."""
        low, high = min(number, other), max(number, other)
        if self._conflict_between(row[low : low + 1], row[low + 1 : high + 1]):
            return None
        if self._conflict_between(row[low + 1 : high], row[high : high + 1]):
            return None
        changed = list(row)
        changed[low], changed[high] = row[high], row[low]
        return self._fitting(changed, rank)

    def _conflict_between(self, before: list[int], after: list[int]) -> bool:
        """Whether any of what comes before must stay before any of what comes after."""
        return any(self.conflict(first, second) for first in before for second in after)

    def _fitting(self, changed: list[int], rank: int) -> list[int] | None:
        """Return the changed row, repaired if it holds too much; None if that is not enough."""
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


class EqualDraws:
    """Random numbers that the kernel draws too (splitmix64).

    >>> draws = EqualDraws(1)
    >>> draws.below(10), draws.below(10), round(draws.share(), 6)
    (5, 7, 0.971003)
    """

    def __init__(self, seed: int) -> None:
        self.state = seed & _WORD

    def _next(self) -> int:
        self.state = mixed = (self.state + 0x9E3779B97F4A7C15) & _WORD
        mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & _WORD
        return mixed ^ (mixed >> 31)

    def below(self, count: int) -> int:
        """Return a number from 0 to `count` - 1."""
        return (self._next() >> 32) * count >> 32

    def share(self) -> float:
        """Return a number from 0 to 1."""
        return (self._next() >> 11) * 2.0**-53


def falling(x: float) -> float:
    """Return nearly exp(-x), by products alone: so every machine, and the kernel, has the same bits.

    >>> round(falling(0.5), 3), falling(1e300)
    (0.607, 0.0)
    """
    power = 1.0 / (1.0 + x / 1024.0)
    for _ in range(10):
        power *= power
    return power


def critical_blocks(
    instance: Instance, rows: Rows, ready: Sequence[float], rank: int, draws: EqualDraws
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
        if at > 0 and _ended(ready, latency, row[at - 1]) >= start - slack and not (by_need and draws.share() < 0.5):
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
