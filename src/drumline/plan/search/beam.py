"""Beam search: grow programs action by action, a few hundred of the most promising at a time.

The next action always goes to the rank whose earliest candidate ends first; everything that could start there before
that end is tried (Giffler and Thompson's active schedules). Under a limit, skipping a forward that fits is also tried:
a later stage of the same rank may need the room.

    t = 7, rank 1 next:   I2 at 7    F5 at 7.5    W0 at 7       three children; if two states have done the same
                                                                actions, the less promising one is dropped

The promise of a state: for every rank, its time plus its remaining work; for every lane, its time plus the remaining
path of its last microbatch.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from drumline.plan.search.bounds.instance import F, I, Instance, Rows, W
from drumline.plan.search.bounds.relaxed import Relaxation

_UNKNOWN = math.inf


@dataclass(slots=True, eq=False)
class _BeamState:
    """What is done, when every rank is free, what it holds, and how it got there."""

    done: list[int]
    free: list[float]
    stash: list[float]
    ready: list[float]
    passed: frozenset[int]
    parent: _BeamState | None
    last: int
    promise: float = 0.0


class Beam:
    """Beam search over one instance.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.timeline.idle import Limit
    >>> from drumline.core.placement import Placement
    >>> value = Instance(Costs(), Placement.v(2), 2, Limit(max_activations=2))
    >>> rows = Beam(value, random.Random(0)).run(width=20)
    >>> rows is not None and all(value.fits(row, rank) for rank, row in enumerate(rows))
    True
    """

    def __init__(self, instance: Instance, rng: random.Random) -> None:
        self.instance, self.rng = instance, rng
        number = instance.number
        self.lanes = [
            (rank, [number(lane.stage, F, m) for m in lane.microbatches])
            for rank, lanes in enumerate(instance.lanes)
            for lane in lanes
        ]
        self.of_rank: list[list[int]] = [[] for _ in instance.lanes]
        for at, (rank, _) in enumerate(self.lanes):
            self.of_rank[rank].append(at)
        relaxed = Relaxation(instance)
        stages = [lane.stage for lanes in instance.lanes for lane in lanes]
        # The remaining work of a lane after n F, I or W; and the path after its last F and its last I.
        taken = [[[instance.seconds[n + op] for n in actions[::-1]] for op in (F, I, W)] for _, actions in self.lanes]
        self.left = [[list(accumulate(op, initial=0.0))[::-1] for op in ops] for ops in taken]
        self.way_back = [relaxed.way_back[s] - relaxed.seconds[s, F] + relaxed.way_out[s] for s in stages]
        self.way_out = [relaxed.way_out[s] for s in stages]
        self.num_resources = len(instance.resources)

    def run(
        self, *, width: int, noise: float = 0.0, keep_on: Callable[[int], bool] = lambda states: True
    ) -> Rows | None:
        """Return the best rows that a beam of this width finds; None if it reaches only dead ends, or is stopped."""
        ranks, lanes = self.instance.num_ranks, len(self.lanes)
        first = _BeamState(
            [0] * (3 * lanes),
            [0.0] * ranks,
            [0.0] * (ranks * self.num_resources),
            [_UNKNOWN] * self.instance.num_actions + [0.0],
            frozenset(),
            None,
            -1,
        )
        beam = [first]
        for _ in range(sum(3 * len(actions) for _, actions in self.lanes)):
            if not keep_on(len(beam)):
                return None
            best: dict[tuple[int, ...], _BeamState] = {}
            for state in beam:
                for child in self._children(state):
                    child.promise = self._promise(child) * (1 + noise * self.rng.random())
                    key = tuple(child.done)
                    other = best.get(key)
                    if other is None or child.promise < other.promise:
                        best[key] = child
            beam = sorted(best.values(), key=lambda beam_state: beam_state.promise)[:width]
        return self._rows(min(beam, key=lambda beam_state: max(beam_state.free))) if beam else None

    def _children(self, state: _BeamState) -> Iterator[_BeamState]:
        offers, soonest, rank = [], _UNKNOWN, -1
        for lane in range(len(self.lanes)):
            for start, number in self._offers(state, lane):
                end = start + self.instance.seconds[number]
                if end < soonest:
                    soonest, rank = end, self.lanes[lane][0]
                offers.append((lane, start, number))
        rivals = [o for o in offers if self.lanes[o[0]][0] == rank and (o[1] < soonest or o[1] == state.free[rank])]
        for lane, start, number in rivals:
            yield self._after(state, lane, start, number)
        if self.num_resources and rivals and all(number & 3 == F for _, _, number in rivals):
            passed = state.passed | {lane for lane, _, _ in rivals}
            held_back = _BeamState(state.done, state.free, state.stash, state.ready, passed, state.parent, state.last)
            yield from self._children(held_back)

    def _offers(self, state: _BeamState, lane: int) -> Iterator[tuple[float, int]]:
        rank, actions = self.lanes[lane]
        forwards, firsts, seconds = state.done[3 * lane : 3 * lane + 3]
        ready, need, time = state.ready, self.instance.need, state.free[rank]
        if firsts < forwards:
            number = actions[firsts] + I
            at = ready[need[number]]
            if at != _UNKNOWN and self._fits(state, rank, number):
                yield (at if at > time else time), number
        if seconds < firsts:
            yield time, actions[seconds] + W
        if forwards < len(actions) and lane not in state.passed:
            number = actions[forwards]
            at = ready[need[number]]
            if at != _UNKNOWN and self._fits(state, rank, number):
                yield (at if at > time else time), number

    def _fits(self, state: _BeamState, rank: int, number: int) -> bool:
        for at, resource in enumerate(self.instance.resources):
            stash = state.stash[rank * self.num_resources + at]
            if resource.always[rank] + (stash + resource.during[number]) > resource.most:
                return False
        return True

    def _after(self, state: _BeamState, lane: int, start: float, number: int) -> _BeamState:
        rank, op = self.lanes[lane][0], number & 3
        done, free, stash, ready = state.done.copy(), state.free.copy(), state.stash, state.ready.copy()
        done[3 * lane + op] += 1
        free[rank] = end = start + self.instance.seconds[number]
        ready[number] = end + self.instance.latency[number]
        if self.num_resources:
            stash = stash.copy()
            for at, resource in enumerate(self.instance.resources):
                stash[rank * self.num_resources + at] += resource.after[number]
        passed = state.passed and state.passed.difference(self.of_rank[rank])
        return _BeamState(done, free, stash, ready, passed, state, number)

    def _promise(self, state: _BeamState) -> float:
        done, free, left = state.done, state.free, self.left
        worst = total = 0.0
        for rank, lanes in enumerate(self.of_rank):
            time = rest = free[rank]
            for lane in lanes:
                forwards, firsts, seconds = left[lane]
                at = 3 * lane
                ahead, back = forwards[done[at]], firsts[done[at + 1]]
                rest += ahead + back + seconds[done[at + 2]]
                if ahead > 0:
                    worst = max(worst, time + ahead + self.way_back[lane])
                if back > 0:
                    worst = max(worst, time + back + self.way_out[lane])
            worst = max(worst, rest)
            total += rest
        return worst + 0.2 * total / len(free)

    def _rows(self, state: _BeamState | None) -> Rows:
        rows: Rows = [[] for _ in self.of_rank]
        while state is not None and state.last >= 0:
            rows[self.instance.rank[state.last // 4]].append(state.last)
            state = state.parent
        return [row[::-1] for row in rows]
