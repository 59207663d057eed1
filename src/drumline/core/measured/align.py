"""Align the clocks of different ranks: find each clock's offset and drift from messages that went both ways.

    clock of j
    minus      u   u       u        a message from i to j cannot arrive before it left:     the line lies below u
    clock of i ──────────────────   the line between them: offset, and drift as its slope
                 l     l      l     the same holds from j to i, the other way round:        the line lies above l
               ─────────────────► clock of i

1. Between two clocks, take the line with the most room on both sides. The fastest messages determine it; all others lie
   farther out. The range of slopes that leave any room shows how well the drift is known.
2. After removing drift, each message bounds the difference of two offsets. Shortest paths tighten all of these bounds,
   also through third clocks. With d(a, b) the length of a path, every clock's offset lies between -d(n, 0) and d(0, n).
   Take the middle: it keeps all messages in order, whichever ranks they connect, because
   d(0, j) <= d(0, i) + d(i, j) and d(i, 0) <= d(i, j) + d(j, 0). Half the distance is the error.

Ranks with the same clock number share a clock. Common time is that of rank 0's clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from drumline.core.graph import Floats
from drumline.core.measured.record import Record

_MOST_DRIFT = 1e-3  # more than any clock has, and twenty times that of a good one
_NANOSECOND = 1.0


@dataclass(frozen=True, slots=True)
class Dial:
    """How to read a rank's clock: it showed `own_ns` when rank 0's showed `common_ns`, and runs `rate` times as fast.

    `error_ns` bounds the error of that reading.

    >>> dial = Dial(own_ns=5000, common_ns=1000, rate=1.001, error_ns=20.0)
    >>> dial.common(6001), dial.own_time(2000)
    (2000, 6001)
    """

    own_ns: int = 0
    common_ns: int = 0
    rate: float = 1.0
    error_ns: float = 0.0

    def common(self, moment: int) -> int:
        """Return what rank 0's clock showed at a moment of this one."""
        if self.rate == 1.0:
            return moment - self.own_ns + self.common_ns
        return self.common_ns + round((moment - self.own_ns) / self.rate)

    def own_time(self, moment: int) -> int:
        """Return what this clock showed at a moment of rank 0's."""
        if self.rate == 1.0:
            return moment - self.common_ns + self.own_ns
        return self.own_ns + round((moment - self.common_ns) * self.rate)


def align(steps: Sequence[Sequence[Record]], at: int = -1) -> tuple[Dial, ...]:
    """Return how to read each rank's clock in the step at index `at`; messages of the other steps improve the drift.

    >>> here = Record(0, clock=1, heard=[1, 1_010_000, 20_000, 1, 1_910_000, 920_000])
    >>> there = Record(1, clock=2, heard=[0, 7_000, 1_012_000, 0, 907_000, 1_912_000])
    >>> dial = align([[here, there]])[1]  # the messages show that it is 990 to 1005 microseconds ahead
    >>> dial.common(1_000_000), round(dial.error_ns)
    (2500, 8413)
    """
    numbers = [record.clock for record in steps[at]]
    clocks = list(dict.fromkeys(numbers))
    if len(clocks) == 1:
        return (Dial(),) * len(numbers)
    whole = [message for records in steps for message in _messages(records, clocks)]
    lines = _tree(whole, len(clocks))
    begin = next(record.begin_ns for record in steps[at] if record.clock == clocks[0])
    length = max(record.end_ns - record.begin_ns for record in steps[at])
    # More messages narrow the offset, except for the unknown drift during their time. The step's own messages come
    # first: they must be in order.
    messages = [message for message in _messages(steps[at], clocks) if not message.is_word]
    offsets = [_offsets(each, lines, begin, length) for each in (messages, list(_messages(steps[at], clocks)), whole)]
    if all(disagree > 0 for _, disagree in offsets):
        # Drift from other steps does not fit this one, for example after a clock was set: use only its own messages.
        lines = _tree(messages, len(clocks))
        if all(math.isfinite(line.room_ns) for line in lines):
            offsets.append(_offsets(messages, lines, begin, length))
    dials, _ = min(offsets, key=lambda each: (each[1] > 0, max(dial.error_ns for dial in each[0])))
    return tuple(dials[clocks.index(number)] for number in numbers)


@dataclass(frozen=True, slots=True)
class _Message:
    """Something that left one clock and reached another: a message of the step, or a packet since the last step."""

    source: int
    target: int
    left_ns: int
    came_ns: int
    is_word: bool = False


def _messages(records: Iterable[Record], clocks: Sequence[int]) -> Iterator[_Message]:
    """Yield what travelled between two clocks in a step."""
    by_rank = {record.rank: clocks.index(record.clock) for record in records if record.clock in clocks}
    for record in records:
        target = by_rank.get(record.rank)
        for _, _, _, _, rank, ready, _, arrived, start, _, _ in record.rows("messages"):
            if target is not None and by_rank.get(rank, target) != target:
                yield _Message(by_rank[rank], target, ready, min(arrived, start))
        for rank, left, came in record.rows("heard"):
            if target is not None and by_rank.get(rank, target) != target:
                yield _Message(by_rank[rank], target, left, came, is_word=True)


@dataclass(frozen=True, slots=True)
class _Line:
    """One clock against another: it shows `own_ns` when the other shows `other_ns`, and runs `rate` times as fast."""

    own_ns: float
    other_ns: float
    rate: float
    room_ns: float
    rate_error: float


def _tree(messages: Sequence[_Message], num_clocks: int) -> list[_Line]:
    """Return every clock against the first, along the pairs whose messages leave the least room."""
    pairs = {}
    for clock in range(num_clocks):
        for other in range(num_clocks):
            if clock != other and (line := _fitted(messages, clock, other)) is not None:
                pairs[clock, other] = line
    lines = {0: _Line(0.0, 0.0, 1.0, 0.0, 0.0)}
    while edges := [edge for edge in pairs if edge[0] in lines and edge[1] not in lines]:
        clock, other = min(edges, key=lambda edge: (pairs[edge].room_ns, edge))
        lines[other] = _chained(lines[clock], pairs[clock, other])
    unknown = _Line(0.0, 0.0, 1.0, math.inf, 0.0)
    return [lines.get(clock, unknown) for clock in range(num_clocks)]


def _chained(first: _Line, second: _Line) -> _Line:
    """Return the second clock against the reference of the first."""
    own_ns = second.own_ns + (first.own_ns - second.other_ns) * second.rate
    rate, error = first.rate * second.rate, first.rate_error + second.rate_error
    return _Line(own_ns, first.other_ns, rate, max(first.room_ns, second.room_ns), error)


def _fitted(messages: Sequence[_Message], clock: int, other: int) -> _Line | None:
    """Return the line between all messages in both directions; None if one direction has no messages."""
    forth = [(each.left_ns, each.came_ns) for each in messages if (each.source, each.target) == (clock, other)]
    back = [(each.came_ns, each.left_ns) for each in messages if (each.source, each.target) == (other, clock)]
    if not forth or not back:
        return None
    zero, shown = forth[0]
    upper, lower = (np.array([(t - zero, s - shown - (t - zero)) for t, s in each], float) for each in (forth, back))

    def limits(slope: float) -> tuple[float, float]:
        return float((upper[:, 1] - slope * upper[:, 0]).min()), float((lower[:, 1] - slope * lower[:, 0]).max())

    def room(slope: float) -> float:
        high, low = limits(slope)
        return high - low

    best = _top(room)
    least = room(best) - _NANOSECOND
    flat = _edge(room, best, -_MOST_DRIFT, least), _edge(room, best, _MOST_DRIFT, least)
    known = _edge(room, best, -_MOST_DRIFT, min(0.0, least)), _edge(room, best, _MOST_DRIFT, min(0.0, least))
    slope = sum(flat) / 2
    high, low = limits(slope)
    return _Line(shown + (high + low) / 2, zero, 1.0 + slope, high - low, max(known[1] - slope, slope - known[0]))


def _top(room: Callable[[float], float]) -> float:
    """Return the drift at which a concave function is largest."""
    low, high = -_MOST_DRIFT, _MOST_DRIFT
    for _ in range(80):
        third = (high - low) / 3
        if room(low + third) < room(high - third):
            low += third
        else:
            high -= third
    return (low + high) / 2


def _edge(room: Callable[[float], float], inside: float, outside: float, least: float) -> float:
    """Return how far from `inside` the function stays at `least` or above."""
    if room(outside) >= least:
        return outside
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if room(middle) >= least else (inside, middle)
    return inside


def _offsets(messages: Sequence[_Message], lines: Sequence[_Line], begin: int, length: int) -> tuple[list[Dial], float]:
    """Return the clocks' dials, each offset in the middle of its bounds, and by how much the bounds disagree.

    If they do not disagree, all messages are in order.
    """
    origins = [line.own_ns + (begin - line.other_ns) * line.rate for line in lines]
    flights = np.full((len(lines), len(lines)), math.inf)
    np.fill_diagonal(flights, 0.0)
    moments = [0.0, float(length)]
    for message in messages:
        left = (message.left_ns - origins[message.source]) / lines[message.source].rate
        came = (message.came_ns - origins[message.target]) / lines[message.target].rate
        flights[message.source, message.target] = min(flights[message.source, message.target], came - left)
        moments.append(left)
    reach = max(moments) - min(moments)
    paths, slack = agreed(flights, _NANOSECOND)
    dials = []
    for clock, line in enumerate(lines):
        high, low = float(paths[0, clock]), -float(paths[clock, 0])
        shift = (high + low) / 2 if math.isfinite(high + low) else 0.0
        error = (high - low) / 2 + slack + line.rate_error * reach if clock else 0.0
        dials.append(Dial(round(origins[clock] + shift * line.rate), begin, line.rate, error))
    return dials, slack


def agreed(flights: Floats, tolerance: float = 0.0) -> tuple[Floats, int]:
    """Return the shortest paths, and the smallest time by which all distances must be widened to make them agree.

    `flights[a, b]` is the shortest time a message took from clock a to clock b, as they show it; infinite if none went.

    >>> paths, widened = agreed(np.array([[0.0, 50.0], [-20.0, 0.0]]))
    >>> paths.tolist(), widened
    ([[0.0, 50.0], [-20.0, 0.0]], 0)
    >>> agreed(np.array([[0.0, 50.0], [-60.0, 0.0]]))[1]
    5
    """
    others = ~np.eye(len(flights), dtype=bool)

    def paths(widened: int) -> Floats:
        paths_now: Floats = flights + widened * others
        for middle in range(len(paths_now)):
            paths_now = np.minimum(paths_now, paths_now[:, middle, None] + paths_now[None, middle, :])
        return paths_now

    def agree(widened: int) -> bool:
        return bool(np.diagonal(paths(widened)).min() >= -tolerance)

    low, high = -1, 0
    while not agree(high):
        low, high = high, 2 * high + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if agree(middle) else (middle, high)
    return paths(high), high
