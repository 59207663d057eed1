"""Rows as arrays: what recipes make of regular patterns, without an object for every action.

    run(Op.FORWARD, 2, 4)                        2F0 2F1 2F2 2F3
    Turns().add(2, (0, F)).add(3, (0, F), (0, B))     0F0 0F1 | 0F2 0B0 | 0F3 0B1 | 0F4 0B2

Whoever looks at a row sees actions; the registry takes the arrays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import repeat

import numpy as np

from drumline.core.action import Action, Op
from drumline.core.graph import CODE, OPS, Ints


@dataclass(frozen=True, slots=True)
class Cells(Iterable[Action]):
    """Actions of one row, none of them an overlapped pair, all with a microbatch.

    >>> list(run(Op.FORWARD, 2, 3))
    [2F0, 2F1, 2F2]
    """

    stage: Ints
    code: Ints
    microbatch: Ints

    def __len__(self) -> int:
        return len(self.stage)

    def __iter__(self) -> Iterator[Action]:
        columns = self.stage.tolist(), map(OPS.__getitem__, self.code.tolist()), self.microbatch.tolist()
        return (tuple.__new__(Action, parts) for parts in zip(*columns, repeat(())))

    def __getitem__(self, chosen: slice | Ints) -> Cells:
        return Cells(self.stage[chosen], self.code[chosen], self.microbatch[chosen])

    def below(self, num_microbatches: int) -> Cells:
        """Return the actions on microbatches 0 to num_microbatches - 1.

        >>> list(run(Op.BACKWARD, 0, 3).below(1))
        [0B0]
        """
        return self[np.flatnonzero(self.microbatch < num_microbatches)]


def cells(op: Op, stages: Ints, microbatches: Ints) -> Cells:
    """Return one op on these stages and microbatches."""
    return Cells(stages, np.full(len(stages), CODE[op]), microbatches)


def run(op: Op, stage: int, count: int) -> Cells:
    """Return one op of a stage on microbatches 0 to count - 1."""
    return cells(op, np.full(count, stage), np.arange(count))


def joined(parts: Iterable[Cells]) -> Cells:
    """Return the parts one after the other."""
    stages, codes, microbatches = zip(*((part.stage, part.code, part.microbatch) for part in parts), strict=True)
    return Cells(np.concatenate(stages), np.concatenate(codes), np.concatenate(microbatches))


class Turns:
    """Builds a row of patterns that repeat; each op of a stage takes its microbatches in order.

    >>> list(Turns().add(1, (0, Op.FORWARD)).add(2, (0, Op.FORWARD), (0, Op.BACKWARD)).cells())
    [0F0, 0F1, 0B0, 0F2, 0B1]
    """

    def __init__(self) -> None:
        self._parts: list[Cells] = []
        self._taken = defaultdict[tuple[int, Op], int](int)

    def add(self, count: int, *pattern: tuple[int, Op]) -> Turns:
        """Repeat a pattern of different ops and stages so many times."""
        if count > 0:
            first = np.array([self._taken[pair] for pair in pattern])
            stages, codes = np.array([stage for stage, _ in pattern]), np.array([CODE[op] for _, op in pattern])
            microbatches = (first + np.arange(count)[:, None]).ravel()
            self._parts.append(Cells(np.tile(stages, count), np.tile(codes, count), microbatches))
            for pair in pattern:
                self._taken[pair] += count
        return self

    def cells(self) -> Cells:
        """Return the row."""
        return joined(self._parts)
