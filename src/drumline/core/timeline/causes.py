"""The causes of idle time as arrays: what `attribute` finds, for all gaps at once.

    gap of a rank    low ──────── balanced ──────── arrived ──────── high
                      fill or wait        imbalance         transfer

It covers rows whose ranks compute all the time: no exchanges that take time, no messages that occupy a rank, no limit.
`attribute` takes whatever else there is, one action at a time, and gives the same intervals.

An overlapped pair is one action. It waits for the input that comes last, of either half.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, overload

import numpy as np

from drumline.core.action import Action, overlap
from drumline.core.graph import OPS, Columns, Floats, Ints, Number
from drumline.core.kernel.library import Kernel, kernel
from drumline.core.timeline.idle import Cause, Idle

CAUSES = tuple(Cause)
_FILL, _WAIT, _DRAIN, _IMBALANCE, _TRANSFER = (
    CAUSES.index(cause) for cause in (Cause.FILL, Cause.WAIT, Cause.DRAIN, Cause.IMBALANCE, Cause.TRANSFER)
)
_CODES = np.array([_FILL, _WAIT, _DRAIN, _IMBALANCE, _TRANSFER], dtype=Number)


@dataclass(frozen=True, eq=False, repr=False)
class Causes(Sequence[Idle]):
    """Idle intervals with their causes, rank by rank in time order; each is made when somebody looks at it.

    `before` and `waits_for` are numbers of plain actions, -1 for none. `before` is the first half of a pair; what
    drains waits for an action, and all else for one of its halves.
    """

    work: Columns
    rank: Ints
    start: Floats
    end: Floats
    cause: Ints
    before: Ints
    waits_for: Ints

    def __len__(self) -> int:
        return len(self.rank)

    @overload
    def __getitem__(self, index: int) -> Idle: ...

    @overload
    def __getitem__(self, index: slice) -> tuple[Idle, ...]: ...

    def __getitem__(self, index: int | slice) -> Idle | tuple[Idle, ...]:
        if isinstance(index, slice):
            return tuple(self[number] for number in range(*index.indices(len(self))))
        before, waits_for = int(self.before[index]), int(self.waits_for[index])
        return Idle(
            int(self.rank[index]),
            float(self.start[index]),
            float(self.end[index]),
            CAUSES[self.cause[index]],
            self._action(before, whole=True),
            self._action(waits_for, whole=before < 0),
            int(self.work.rank[waits_for]) if waits_for >= 0 else None,
        )

    def __iter__(self) -> Iterator[Idle]:
        return map(self.__getitem__, range(len(self)))

    def seconds(self, num_ranks: int) -> dict[Cause, list[float]]:
        """Return the idle seconds of every rank, by cause."""
        place = self.cause * num_ranks + self.rank
        total = np.bincount(place, self.end - self.start, len(CAUSES) * num_ranks).reshape(-1, num_ranks)
        present = np.flatnonzero(np.bincount(self.cause)).tolist()
        return {CAUSES[number]: total[number].tolist() for number in present}

    def _action(self, number: int, *, whole: bool) -> Action | None:
        if number < 0:
            return None
        work = self.work
        (microbatch,) = work.numbers(work.microbatch[number : number + 1])
        action = Action(int(work.stage[number]), OPS[work.code[number]], microbatch)
        if whole and work.paired[number]:
            second = self._action(number + 1, whole=False)
            assert second is not None
            return overlap(action, second)
        return action


def causes_of(work: Columns, times: Times, arrivals: Arrivals, twin: Times | None) -> Causes:
    """Return every idle interval with its cause; `twin` are the times with all stages and microbatches alike."""
    if not work.paired.any():
        return _of_plain(work, times, arrivals, twin)
    heads = np.flatnonzero(work.heads)
    firsts = Columns.plain(work.lengths, work.stage[heads], work.code[heads], work.microbatch[heads])
    latest = _latest_makers(work, times, arrivals.maker)
    cells = Arrivals(np.where(latest < 0, Number(-1), work.cell[latest]), arrivals.last)
    found_causes = _of_plain(firsts, times, cells, twin)
    drains = found_causes.before < 0
    before = np.where(drains, -1, heads[found_causes.before])
    waits_for = np.where(drains, heads[found_causes.waits_for], latest[found_causes.before])
    return replace(found_causes, work=work, before=before.astype(Number), waits_for=waits_for.astype(Number))


def _latest_makers(work: Columns, times: Times, maker: Ints) -> Ints:
    """Return, per action, the plain action that makes its latest input; -1 for none.

    Of two that end together the one on the later rank counts, or later in its row; of a pair's two, the first.
    """
    takers = np.flatnonzero(maker >= 0)
    makers = maker[takers]
    order = np.lexsort((-makers, work.cell[makers], times.ends[work.cell[makers]]))
    latest = np.full(sum(work.lengths), -1, dtype=Number)
    latest[work.cell[takers[order]]] = makers[order]  # the last one written counts
    return latest


def _of_plain(work: Columns, times: Times, arrivals: Arrivals, twin: Times | None) -> Causes:
    library = kernel()
    if library is not None:
        return _by_kernel(library, work, times, arrivals, twin)
    gaps = _Gaps.of(work, times)
    low, high = gaps.low, gaps.high
    excess = np.zeros(len(low)) if twin is None else high - low - _twin_gaps(gaps, twin)
    maker = np.append(arrivals.maker, -1)[gaps.before]
    ready = np.where(maker < 0, low, times.ends[maker])
    drains = gaps.before < 0
    arrived = np.where(drains, high, np.minimum(np.maximum(ready, low), high))
    balanced = arrived - np.minimum(np.maximum(excess, 0.0), arrived - low)
    bounds = np.stack((low, balanced, arrived, high), axis=1)
    starts, ends = bounds[:, :-1], bounds[:, 1:]
    shown = ends > starts
    cause = np.stack((gaps.waiting, np.full(len(low), _IMBALANCE), np.full(len(low), _TRANSFER)), axis=1)
    which = np.broadcast_to(np.arange(len(low))[:, None], shown.shape)[shown]
    waits_for = np.where(drains, arrivals.last, maker)
    numbers = (gaps.rank[which], cause[shown], gaps.before[which], waits_for[which])
    rank, causes, before, waits = (column.astype(Number) for column in numbers)
    return Causes(work, rank, starts[shown], ends[shown], causes, before, waits)


def _by_kernel(library: Kernel, work: Columns, times: Times, arrivals: Arrivals, twin: Times | None) -> Causes:
    lengths = np.array(work.lengths, dtype=np.int64)
    last = np.cumsum(lengths)
    room = 3 * (len(times.ends) + len(lengths))
    rank, cause, before, waits_for = np.empty((4, room), dtype=Number)
    start, end = np.empty((2, room))
    bounds, span = np.stack((last - lengths, last), axis=1), np.array([times.start, times.end])
    twins = (None, None, None) if twin is None else (twin.starts, twin.ends, np.array([twin.start, twin.end]))
    places = len(lengths), bounds, arrivals.maker, times.starts, times.ends, span, *twins, arrivals.last, _CODES
    count = library.causes(*places, rank, start, end, cause, before, waits_for)
    rank, cause, before, waits_for = (column[:count].copy() for column in (rank, cause, before, waits_for))
    return Causes(work, rank, start[:count].copy(), end[:count].copy(), cause, before, waits_for)


class Times(NamedTuple):
    """The starts and ends of all timed actions, row by row, and of the whole."""

    starts: Floats
    ends: Floats
    start: float
    end: float


class Arrivals(NamedTuple):
    """Per plain action, the plain action of another rank that made its input, or -1; and the action that ends last."""

    maker: Ints
    last: int


class _Gaps(NamedTuple):
    """Idle intervals, rank by rank: the action after each (-1: it is the last), and fill, wait or drain."""

    rank: Ints
    low: Floats
    high: Floats
    before: Ints
    follows: Ints
    waiting: Ints

    @staticmethod
    def of(work: Columns, times: Times) -> _Gaps:
        lengths = np.array(work.lengths, dtype=np.int64)
        last = np.cumsum(lengths)
        first = last - lengths
        free = np.empty(len(times.ends))
        free[1:] = times.ends[:-1]
        free[first] = times.start
        inside = np.flatnonzero(times.starts > free)
        # A rank waits, instead of filling, once one of its actions has taken time.
        works = np.append(np.flatnonzero(times.ends > times.starts), len(times.ends))
        first_work = works[np.searchsorted(works, first)]
        rank = work.rank[inside]
        waiting = np.where(inside > first_work[rank], _WAIT, _FILL)
        final = times.ends[last - 1]
        draining = np.flatnonzero(times.end > final)
        # A rank's drain comes after its other gaps.
        order = np.argsort(np.concatenate((2 * inside, 2 * last[draining] - 1)), kind="stable")
        return _Gaps(
            np.concatenate((rank, draining))[order],
            np.concatenate((free[inside], final[draining]))[order],
            np.concatenate((times.starts[inside], np.full(len(draining), times.end)))[order],
            np.concatenate((inside, np.full(len(draining), -1)))[order],
            np.concatenate((np.where(inside == first[rank], -1, inside - 1), last[draining] - 1))[order],
            np.concatenate((waiting, np.full(len(draining), _DRAIN)))[order],
        )


def _twin_gaps(gaps: _Gaps, twin: Times) -> Floats:
    """Return how long the balanced twin idles at the same places."""
    free = np.where(gaps.follows < 0, twin.start, twin.ends[gaps.follows])
    idles: Floats = np.where(gaps.before < 0, twin.end, twin.starts[gaps.before]) - free
    return idles
