"""Orders of units made by dispatching: each rank runs what is ready, by a few rules, in simulated time.

    a backward is ready              run it, the last slice of a microbatch first
    else a forward is, with room     run it; `ahead` is how many units a rank may hold more than 1f1b in slices,
                                     as far as the limit allows
    else a W waits                   run it, unless an input arrives before a part `patience` of it is done

With whole backwards there is no W. Forwards first where `eager`: then a rank fills its room before it runs backwards.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from drumline.plan.search.bounds.instance import B, F, I, Instance, Rows, W


@dataclass(frozen=True, slots=True)
class DispatchRules:
    """The rules of an order."""

    ahead: int = 0
    patience: float = 0.0
    eager: bool = False
    whole: bool = False


def dispatched(instance: Instance, num_slices: int, rules: DispatchRules) -> Rows:
    """Return the rows that the rules make, for one copy of every stage; none if the limit keeps a backward waiting.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> instance = Instance(Costs(), Placement.linear(2), 4)
    >>> print(instance.program(dispatched(instance, 2, DispatchRules(whole=True))))
    0F0,0F1,0F2,0B1,0B0,0F3,0B3,0B2
    1F0,1F1,1B1,1B0,1F2,1F3,1B3,1B2
    """
    return _Dispatcher(instance, num_slices, rules).run()


class _GrowingRow:
    """A rank while its row grows."""

    def __init__(self, room: int) -> None:
        self.free, self.units, self.room = 0.0, 0, room
        self.stash: list[float] = []  # of every resource
        self.row: list[int] = []
        # What arrives: (when, number), in the order of arrival.
        self.forwards: deque[tuple[float, int]] = deque()
        self.backwards: list[tuple[float, int]] = []
        self.weights: deque[int] = deque()


class _Dispatcher:
    def __init__(self, instance: Instance, num_slices: int, rules: DispatchRules) -> None:
        self._rules, self._slices, self._units = rules, num_slices, instance.num_microbatches
        self._seconds, self._latency = instance.seconds, instance.latency
        self._last, self._instance = instance.num_stages - 1, instance
        self._homes = instance.placement.homes
        num_ranks = instance.num_ranks
        per_rank = instance.num_stages // num_ranks
        self._resources = instance.resources
        more = num_slices - 1 + rules.ahead + (0 if per_rank == 1 else num_ranks * per_rank)
        rooms = (min(per_rank, 2) * (num_ranks - rank) + more for rank in range(num_ranks))
        self._ranks = [_GrowingRow(max(room, num_slices)) for room in rooms]
        for number, rank in enumerate(self._ranks):
            rank.stash = [resource.always[number] for resource in self._resources]
        first = self._ranks[self._homes[0]]
        first.forwards.extend((0.0, instance.number(0, F, unit)) for unit in range(self._units))
        self._back = B if rules.whole else I
        self._gone: set[tuple[int, int]] = set()  # (stage, unit) whose backward has run

    def run(self) -> Rows:
        left = len(self._instance.rank) * (2 if self._rules.whole else 3)
        everywhere = range(len(self._ranks))
        following = [self._next(rank) for rank in everywhere]
        while left:
            start, rank, number = min(following)
            if start == math.inf:  # too little room for the way back to begin
                if all(rank.room > self._units * len(self._homes) for rank in self._ranks):
                    return []
                for each in self._ranks:
                    each.room += 1
                following = [self._next(rank) for rank in everywhere]
                continue
            for changed in {rank, self._run(rank, number, start)}:
                following[changed] = self._next(changed)
            left -= 1
        return [rank.row for rank in self._ranks]

    def _next(self, number: int) -> tuple[float, int, int]:
        """Return when a rank runs its next action, and which; never, if it waits for something that is not known."""
        rank, rules = self._ranks[number], self._rules
        back = self._ready_back(rank)
        forward = rank.forwards[0] if rank.forwards and self._has_room(rank, rank.forwards[0][1]) else None
        options = [entry for entry in (back, forward) if entry is not None]
        soonest = min((max(rank.free, when) for when, _ in options), default=math.inf)
        if rank.weights:
            weight = rank.weights[0]
            if soonest > rank.free + rules.patience * self._seconds[weight]:
                return rank.free, number, weight
        if not options:
            return math.inf, number, -1
        preferred = [forward, back] if rules.eager else [back, forward]
        for entry in preferred:
            if entry is not None and max(rank.free, entry[0]) <= soonest:
                return soonest, number, entry[1]
        raise AssertionError("one of them is the soonest")

    def _has_room(self, rank: _GrowingRow, action: int) -> bool:
        return rank.units < rank.room and all(
            stash + resource.during[action] <= resource.most
            for stash, resource in zip(rank.stash, self._resources, strict=True)
        )

    def _ready_back(self, rank: _GrowingRow) -> tuple[float, int] | None:
        """Return the earliest backward that may run: slices of its microbatch after it have gone back."""
        legal = [entry for entry in rank.backwards if self._may_go_back(entry[1] // 4)]
        return min(legal, default=None)

    def _may_go_back(self, pair: int) -> bool:
        stage, unit = divmod(pair, self._units)
        return unit % self._slices == self._slices - 1 or (stage, unit + 1) in self._gone

    def _run(self, number: int, action: int, start: float) -> int:
        """Run an action, and return the rank that takes its output, or its own."""
        rank = self._ranks[number]
        pair, op = divmod(action, 4)
        stage, unit = divmod(pair, self._units)
        rank.free = start + self._seconds[action]
        arrives = rank.free + self._latency[action]
        rank.row.append(action)
        for place, resource in enumerate(self._resources):
            rank.stash[place] += resource.after[action]
        if op == F:
            rank.forwards.popleft()
            rank.units += 1
            if stage < self._last:
                self._send(self._ranks[self._homes[stage + 1]], arrives, self._instance.number(stage + 1, F, unit))
                return self._homes[stage + 1]
            rank.backwards.append((rank.free, 4 * pair + self._back))
        elif op == W:
            rank.weights.popleft()
            rank.units -= 1
        else:
            rank.backwards = [entry for entry in rank.backwards if entry[1] != action]
            self._gone.add((stage, unit))
            if op == I:
                rank.weights.append(4 * pair + W)
            else:
                rank.units -= 1
            if stage:
                target = self._homes[stage - 1]
                self._ranks[target].backwards.append((arrives, self._instance.number(stage - 1, self._back, unit)))
                return target
        return number

    @staticmethod
    def _send(rank: _GrowingRow, arrives: float, number: int) -> None:
        """Queue a forward by its arrival."""
        if not rank.forwards or rank.forwards[-1][0] <= arrives:
            rank.forwards.append((arrives, number))
        else:
            rank.forwards = deque(sorted([*rank.forwards, (arrives, number)]))


def all_rules(num_slices: int, *, whole: bool, bounded: bool) -> Sequence[DispatchRules]:
    """Return the rules to try; with less room first if memory is limited."""
    aheads = (0, num_slices, -1, -2, -4) if bounded else (0, 1, 2, 4, -1, num_slices, 2 * num_slices)
    patience = (0.0,) if whole else (0.0, 0.5, 1.0)
    return [
        DispatchRules(ahead, wait, eager, whole) for ahead in aheads for eager in (False, True) for wait in patience
    ]
