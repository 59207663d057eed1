"""A hill climb over cuts: boundaries are moved for as long as that is better, by whatever measure.

    2 | 3 | 3 | 1      12.4 ms      one boundary moved by one or two blocks, or two of them by one
    2 | 3 | 2 | 2      12.1 ms      the best neighbour is next, until none is shorter

All neighbours of a cut are measured at once: the simulator times them as columns of one compiled program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, combinations, pairwise
from typing import Any

Counts = tuple[int, ...]
Values = Callable[[Sequence[Counts]], Sequence[Any]]


def climb(
    starts: Sequence[Counts],
    values: Values,
    *,
    rounds: int,
    reach: int = 2,
    singly: bool = False,
    better: Callable[[Any, Any], bool] = operator.lt,
) -> Counts:
    """Return the cut that is reached from the best of `starts`; a lesser value is better.

    With `singly` a step tries the moves of two boundaries, which are many, only where no single one is better.

    >>> climb([(1, 4)], lambda many: [abs(one[0] - one[1]) for one in many], rounds=10)
    (2, 3)
    """
    value, best = _least(values, starts)
    alone = singly
    for _ in range(rounds):
        around = list(dict.fromkeys(neighbours(best, reach=reach, alone=alone)))
        nearest = _least(values, around) if around else None
        if nearest is not None and better(nearest[0], value):
            (value, best), alone = nearest, singly
        elif alone:
            alone = False
        else:
            break
    return best


def _least(values: Values, many: Sequence[Counts]) -> tuple[Any, Counts]:
    """Return the least value and its cut; of equal ones the cut whose first stages are the smallest."""
    return min(zip(values(many), many, strict=True))


def neighbours(counts: Counts, *, reach: int = 2, alone: bool = False) -> Iterator[Counts]:
    """Yield the cuts with one boundary moved by up to `reach` blocks, or, unless `alone`, two of them by one."""
    inner = range(1, len(counts))
    steps = [by for far in range(1, reach + 1) for by in (-far, far)]
    moves: list[tuple[tuple[int, int], ...]] = [((at, by),) for at in inner for by in steps]
    if not alone:
        moves += [((at, by), (to, also)) for at, to in combinations(inner, 2) for by in (-1, 1) for also in (-1, 1)]
    ends = ends_of(counts)
    for move in moves:
        moved = list(ends)
        for at, by in move:
            moved[at] += by
        if all(i < j for i, j in pairwise(moved)):
            yield tuple(j - i for i, j in pairwise(moved))


def ends_of(counts: Sequence[int]) -> list[int]:
    """Return where the stages end, from 0 on.

    >>> ends_of((2, 3))
    [0, 2, 5]
    """
    return list(accumulate(counts, initial=0))


def even_cut(num_blocks: int, num_stages: int) -> Counts:
    """Return the cut whose stages have about as many blocks each.

    >>> even_cut(5, 2)
    (2, 3)
    """
    ends = [stage * num_blocks // num_stages for stage in range(num_stages + 1)]
    return tuple(j - i for i, j in pairwise(ends))


def every_cut(num_blocks: int, num_stages: int) -> list[Counts]:
    """Return every cut of so many blocks.

    >>> every_cut(3, 2)
    [(1, 2), (2, 1)]
    """
    inner = combinations(range(1, num_blocks), num_stages - 1)
    return [tuple(j - i for i, j in pairwise((0, *one, num_blocks))) for one in inner]


def by_training(trains: Sequence[bool], many: Sequence[Counts]) -> dict[tuple[bool, ...], list[int]]:
    """Return the places of cuts in `many` by which of their stages have anything to train: each has a program.

    >>> by_training([False, True, True], [(1, 2), (2, 1), (1, 1, 1)])
    {(False, True): [0], (True, True): [1], (False, True, True): [2]}
    """
    groups: dict[tuple[bool, ...], list[int]] = {}
    for at, counts in enumerate(many):
        groups.setdefault(trained(trains, counts), []).append(at)
    return groups


def trained(trains: Sequence[bool], counts: Counts) -> tuple[bool, ...]:
    """Return which stages have anything to train, given which blocks have."""
    if all(trains):
        return (True,) * len(counts)
    return tuple(any(trains[i:j]) for i, j in pairwise(ends_of(counts)))
