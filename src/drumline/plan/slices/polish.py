"""Local search: actions move along their rows, and tokens from slice to slice, as long as steps get shorter.

    row      F3 B1 W4 F4 B0      F4 moves to before B1, if no other rule than time keeps it where it is
    lengths  704 528 432 384     64 tokens move from slice 0 to slice 3; the order stays, or is dispatched again

Equal steps are accepted too, and slightly longer ones while the search is hot.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import permutations

from drumline.plan.search.bounds.instance import Instance, Rows
from drumline.plan.slices.lengths import moved_lengths
from drumline.plan.slices.units import UnitRule, UnitTimes

_FARTHEST = 6  # places that an action moves


def annealed(
    instance: Instance,
    rows: Rows,
    num_slices: int,
    rng: random.Random,
    *,
    keep_on: Callable[[], bool],
    heat: float = 0.002,
    num_steps: int = 10_000,
    enough: float = 0.0,
) -> tuple[float, Rows]:
    """Return the best rows that moves of single actions find, with their makespan; it ends unless told to `keep_on`.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> instance = Instance(Costs(), Placement.linear(2), 2)
    >>> rows = [[0, 3, 4, 7], [8, 11, 12, 15]]
    >>> value, _ = annealed(instance, rows, 1, random.Random(0), keep_on=lambda: True, num_steps=100)
    >>> value
    9.0
    """
    times, rule = UnitTimes(instance), UnitRule(instance.num_microbatches, num_slices)
    now_rows = [list(row) for row in rows]
    times.load(now_rows)
    now = best = times.makespan()
    best_rows = [list(row) for row in rows]
    for step in range(num_steps):
        if best <= enough or not keep_on():
            break
        rank = rng.randrange(len(now_rows))
        row = now_rows[rank]
        source = rng.randrange(len(row))
        target = source + rng.choice((-1, 1)) * rng.randint(1, _FARTHEST)
        if not 0 <= target < len(row):
            continue
        first, last = min(source, target), max(source, target) + 1
        before, moved = row[first:last], row[source]
        others = before[1:] if source < target else before[:-1]
        if source < target:
            legal, after = not any(rule.keeps(moved, other) for other in others), [*others, moved]
        else:
            legal, after = not any(rule.keeps(other, moved) for other in others), [moved, *others]
        if not legal:
            continue
        row[first:last] = after
        if instance.resources and not instance.fits(row, rank):
            row[first:last] = before
            continue
        times.put(rank, first, after)
        value = times.makespan()
        hot = now * heat * (1.0 - step / num_steps)
        if value <= now or (value < math.inf and hot > 0 and rng.random() < math.exp((now - value) / hot)):
            now = value
            if value < best * (1 - 1e-12):
                best, best_rows = value, [list(each) for each in now_rows]
        else:
            row[first:last] = before
            times.put(rank, first, before)
    return best, best_rows


def length_moves(lengths: tuple[int, ...], multiple: int) -> Iterator[tuple[int, ...]]:
    """Yield lengths in which tokens have moved from one slice to another, many tokens first.

    >>> list(length_moves((16, 8), 8))
    [(8, 16)]
    """
    largest = max(lengths) // multiple
    for size in (2**power for power in range(max(largest.bit_length() - 2, 0), -1, -1)):
        for source, target in permutations(range(len(lengths)), 2):
            moved = moved_lengths(lengths, source, target, size * multiple)
            if moved is not None:
                yield moved
