"""Rows as arrays: what recipes make of regular patterns, without an object for every action.

    run(Op.FORWARD, 2, 4)                             2F0 2F1 2F2 2F3
    Turns().add(2, (0, F)).add(3, (0, F), (0, B))     0F0 0F1 | 0F2 0B0 | 0F3 0B1 | 0F4 0B2

Whoever looks at a row sees actions; the registry takes the arrays. The compiled kernel writes rows of patterns, or the
Python form if there is no kernel, which is slower.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

import numpy as np

from drumline.core.action import Action, Op
from drumline.core.graph import CODE, Columns, Flags, Ints, Number
from drumline.core.kernel.library import kernel

_ALL = 2**31 - 1  # more microbatches than there may be


@dataclass(frozen=True, eq=False, repr=False, slots=True)
class Cells(Iterable[Action]):
    """Plain actions of one row; those without a microbatch have -1.

    `overlaps` says which of them overlap the next, so that the two are one action; None if none does.

    >>> list(run(Op.FORWARD, 2, 3))
    [2F0, 2F1, 2F2]
    """

    stage: Ints
    code: Ints
    microbatch: Ints
    overlaps: Flags | None = None

    def __len__(self) -> int:
        return len(self.stage) - (0 if self.overlaps is None else int(np.count_nonzero(self.overlaps)))

    def __iter__(self) -> Iterator[Action]:
        return iter(self.columns([len(self)]).rows()[0])

    def columns(self, lengths: Sequence[int]) -> Columns:
        """Return the arrays of rows of these lengths."""
        if self.overlaps is None:
            return Columns.plain(lengths, self.stage, self.code, self.microbatch)
        second = np.append(False, self.overlaps[:-1])
        cell = np.cumsum(~second, dtype=Number) - Number(1)
        numbers = np.stack((self.stage, self.code, self.microbatch))
        return Columns.spread(lengths, numbers, cell, self.overlaps | second)

    def __getitem__(self, chosen: slice | Ints) -> Cells:
        overlaps = None if self.overlaps is None else self.overlaps[chosen]
        return Cells(self.stage[chosen], self.code[chosen], self.microbatch[chosen], overlaps)

    def rows_of(self, length: int) -> Iterator[Cells]:
        """Yield rows of this length."""
        return (self[low : low + length] for low in range(0, len(self), length))


def cells(op: Op, stages: Ints | Sequence[int], microbatches: Ints | Sequence[int] | int = -1) -> Cells:
    """Return one op on these stages and microbatches; without these, an op that has none.

    >>> list(cells(Op.REDUCE_GRAD, [0, 3]))
    [0REDUCE_GRAD, 3REDUCE_GRAD]
    """
    places = np.asarray(stages, dtype=Number)
    numbers = np.full(len(places), microbatches) if isinstance(microbatches, int) else microbatches
    return Cells(places, np.full(len(places), CODE[op], dtype=Number), np.asarray(numbers, dtype=Number))


def run(op: Op, stage: int, count: int) -> Cells:
    """Return one op of a stage on microbatches 0 to count - 1."""
    return cells(op, np.full(count, stage, dtype=Number), np.arange(count, dtype=Number))


def joined(parts: Iterable[Cells]) -> Cells:
    """Return the parts one after the other."""
    listed = list(parts)
    if len(listed) == 1:
        return listed[0]
    stages, codes, microbatches = zip(*((part.stage, part.code, part.microbatch) for part in listed), strict=True)
    overlaps = None
    if any(part.overlaps is not None for part in listed):
        each = (np.zeros(len(part), dtype=bool) if part.overlaps is None else part.overlaps for part in listed)
        overlaps = np.concatenate(list(each))
    return Cells(np.concatenate(stages), np.concatenate(codes), np.concatenate(microbatches), overlaps)


def blank(count: int) -> Cells:
    """Return room for so many actions."""
    return Cells(*np.empty((3, count), dtype=Number))


class Turns(Iterable[Action]):
    """Builds a row of patterns that repeat; each op of a stage takes its microbatches in order.

    Actions on the microbatch `below` and later ones are left out.

    >>> list(Turns().add(1, (0, Op.FORWARD)).add(2, (0, Op.FORWARD), (0, Op.BACKWARD)))
    [0F0, 0F1, 0B0, 0F2, 0B1]
    """

    __slots__ = ("_below", "_length", "_taken", "num_parts", "parts")

    def __init__(self, *, below: int = _ALL) -> None:
        self._below, self._length, self.num_parts = below, 0, 0
        self.parts: list[int] = []  # as the kernel reads them
        self._taken: dict[tuple[int, Op], int] = {}

    def add(self, count: int, *pattern: tuple[int, Op]) -> Turns:
        """Repeat a pattern of different ops and stages so many times."""
        if count > 0:
            taken, below = self._taken, self._below
            self.num_parts += 1
            self.parts += (count, len(pattern), below)
            for each in pattern:
                first = taken.get(each, 0)
                taken[each] = first + count
                self.parts += (each[0], CODE[each[1]], first)
                self._length += count if first + count <= below else max(below - first, 0)
        return self

    def once(self, stage: int, op: Op, microbatch: int) -> Turns:
        """Add one action, whatever microbatches its op has taken."""
        self.num_parts += 1
        self.parts += (1, 1, self._below, stage, CODE[op], microbatch)
        self._length += microbatch < self._below
        return self

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Action]:
        return iter(written([self]))


def written(rows: Iterable[Turns]) -> Cells:
    """Return the actions of rows, one row after the other; what a row is made of is not kept."""
    listed: list[int] = []
    num_parts = length = 0
    for row in rows:
        listed += row.parts
        num_parts += row.num_parts
        length += len(row)
    parts, library = np.array(listed, dtype=Number), kernel()
    if library is None:
        return joined(_parts_in_python(parts.tolist()))
    every = blank(length)
    library.turns(num_parts, parts, every.stage, every.code, every.microbatch)
    return every


def _parts_in_python(parts: Sequence[int]) -> Iterator[Cells]:
    at = 0
    yield blank(0)
    while at < len(parts):
        count, width, below = parts[at : at + 3]
        end = at + 3 + 3 * width
        stages, codes, first = np.array(parts[at + 3 : end], dtype=Number).reshape(-1, 3).T
        microbatches = (first + np.arange(count, dtype=Number)[:, None]).ravel()
        yield Cells(np.tile(stages, count), np.tile(codes, count), microbatches)[np.flatnonzero(microbatches < below)]
        at = end


class Lanes:
    """What rows take in turn: forwards, backwards, and weight halves, if any. Rows differ in what runs ahead.

    >>> lanes = Lanes(*(run(op, 1, 3) for op in (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)))
    >>> list(lanes.row(ahead=1, delay=2))
    [1F0, 1F1, 1I0, 1F2, 1I1, 1I2, 1W0, 1W1, 1W2]
    """

    def __init__(self, *lanes: Cells) -> None:
        self.lengths = np.array(list(map(len, lanes)), dtype=np.int64)
        self.every = joined(lanes)

    def row(self, *, ahead: int, delay: int = 0, down: int = 0) -> InTurn:
        """Alternate with so many forwards ahead of backwards, weight halves `delay` behind, all stages further down."""
        return InTurn(self, min(ahead, int(self.lengths[0])), delay, down)


class InTurn(Iterable[Action]):
    """A row of lanes: the first forwards, then an action of every lane in each turn."""

    __slots__ = ("ahead", "delay", "down", "lanes")

    def __init__(self, lanes: Lanes, ahead: int, delay: int, down: int) -> None:
        self.lanes, self.ahead, self.delay, self.down = lanes, ahead, delay, down

    def __len__(self) -> int:
        return len(self.lanes.every)

    def __iter__(self) -> Iterator[Action]:
        return iter(alternated([self]))


def alternated(rows: Iterable[InTurn]) -> Cells:
    """Return the actions of rows of lanes, one row after the other."""
    return joined(_of_lanes(lanes, list(group)) for lanes, group in groupby(rows, attrgetter("lanes")))


def _of_lanes(lanes: Lanes, rows: Sequence[InTurn]) -> Cells:
    library, source = kernel(), lanes.every
    if library is None:
        return joined(_turns_in_python(lanes, row) for row in rows)
    every = blank(len(rows) * len(source))
    numbers = np.array([(row.ahead, row.delay, row.down) for row in rows], dtype=np.int64)
    columns = source.stage, source.code, source.microbatch, every.stage, every.code, every.microbatch
    library.lanes(len(lanes.lengths), lanes.lengths, len(rows), numbers, *columns)
    return every


def _turns_in_python(lanes: Lanes, row: InTurn) -> Cells:
    lengths = lanes.lengths - (row.ahead, *[0] * (len(lanes.lengths) - 1))
    begins = np.array((0, 0, row.delay)[: len(lengths)])
    turns = np.full((int((lengths + begins).max()), len(lengths)), -1, dtype=Number)
    number = row.ahead
    for lane, (length, begin) in enumerate(zip(lengths.tolist(), begins.tolist(), strict=True)):
        turns[begin : begin + length, lane] = np.arange(number, number + length, dtype=Number)
        number += length
    chosen = lanes.every[np.concatenate((np.arange(row.ahead, dtype=Number), turns[turns >= 0]))]
    return Cells(chosen.stage + Number(row.down), chosen.code, chosen.microbatch)
