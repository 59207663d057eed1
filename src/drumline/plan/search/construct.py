"""Build a program in one pass: whenever a rank is free, it takes the cheapest available action.

    rank 0 free at t = 7:    I3 arrives at 7.4      F6 is ready     W1 is ready
                             7.4 + 0                7 + 1.2         7 + 0.9       the cheapest: wait for I3

Every candidate has a price: the time it could start, plus a penalty for its op on this rank. A large penalty for W
makes a rank wait for an I that is about to arrive; a small one fills the gap. Waiting uses up the rank's idle budget;
after that, the rank takes whatever is ready. So a few numbers per rank cover the hand-made programs of the literature,
and everything in between.

F is not a candidate if the rank could not hold its pair, or could then not finish a started microbatch. Later stages of
the same rank keep room for one.

The kernel builds the same programs, with the same bits (construct.c).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from drumline.core.graph import Floats, Ints
from drumline.core.kernel.library import Kernel, kernel, pointer, slower
from drumline.plan.search.bounds.instance import B, F, I, Instance, Resource, Rows, W
from drumline.plan.search.packed import PackedInstance, record

_UNKNOWN = math.inf
_LOOK = 5000  # choices between two looks at the clock


@dataclass(frozen=True, slots=True)
class LaneRule:
    """The penalties of one lane, how many forwards it may run ahead, and whether it runs whole backwards (`joined`)."""

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    ahead: float = math.inf
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """How one rank chooses: a rule per lane, its idle budget, and extra idle budget after its forwards are done."""

    rules: tuple[LaneRule, ...]
    idle: float = math.inf
    late_idle: float = 0.0


@dataclass(frozen=True, slots=True)
class TimedRows:
    """Rows, with every rank's first start and last end by the clock."""

    rows: Rows
    ends: list[tuple[float, float]]


class Builder:
    """Builds programs of one instance; everything independent of the policies is prepared once.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.timeline.idle import Limit
    >>> from drumline.core.placement import Placement
    >>> value = Instance(Costs(), Placement.linear(2), 3, Limit(max_activations=2))
    >>> built = Builder(value).build([Policy((LaneRule(forward=0.2, weight=0.9),))] * 2)
    >>> print(value.program(built.rows))
    0F0,0F1,0I0,0W0,0I1,0F2,0W1,0I2,0W2
    1F0,1I0,1F1,1I1,1W0,1W1,1F2,1I2,1W2
    """

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        size = instance.num_microbatches
        self.lanes = [
            [[4 * (lane.stage * size + m) for m in lane.microbatches] for lane in lanes] for lanes in instance.lanes
        ]
        # Which actions wait for an action's output.
        self.takers = np.where(instance.links >= 0, instance.links % instance.num_ranks, -1).ravel()
        self.room = [
            [[_room(resource, lanes[at:]) for resource in instance.resources] for at in range(len(lanes))]
            for lanes in self.lanes
        ]

    def build(
        self, policies: Sequence[Policy], order: Rows | None = None, *, is_late: Callable[[], bool] = lambda: False
    ) -> TimedRows | None:
        """Build a program with one policy per rank; None if they reach a dead end, or if `is_late` before the end.

        With an `order`, forwards and backwards follow it, and only W is free to fill gaps.
        """
        library = kernel()
        if library is None:
            slower(self.instance.num_actions)
            return _Build(self, policies, order).run(is_late)
        return self._compiled(library, policies, order)

    @cached_property
    def taken_on(self) -> list[int]:
        """The rank that waits for every action's output; -1 if none does."""
        ranks: list[int] = self.takers.tolist()
        return ranks

    @cached_property
    def lane_of(self) -> dict[int, int]:
        """Which of its rank's lanes every F belongs to."""
        return {n: at for lanes in self.lanes for at, lane in enumerate(lanes) for n in lane}

    @cached_property
    def _packed(self) -> tuple[PackedInstance, list[Ints | Floats]]:
        """The instance and the lanes for the kernel."""
        packed, lanes = PackedInstance(self.instance), [lane for lanes in self.lanes for lane in lanes]
        lane_of = np.zeros(self.instance.num_actions // 4, dtype=np.int64)
        for number, lane in enumerate(lanes):
            lane_of[np.array(lane) // 4] = number
        room = [room for rooms in self.room for room in rooms]
        return packed, [
            np.cumsum([0, *map(len, self.lanes)]),
            np.cumsum([0, *map(len, lanes)]),
            np.array([number for lane in lanes for number in lane]),
            lane_of,
            self.takers,
            np.ascontiguousarray(np.array(room, dtype=np.float64).T),
        ]

    def _compiled(self, library: Kernel, policies: Sequence[Policy], order: Rows | None) -> TimedRows | None:
        packed, lanes = self._packed
        rules = [rule for policy in policies for rule in policy.rules]
        each = [[rule.forward, rule.backward, rule.weight, rule.ahead] for rule in rules]
        patience = [[policy.idle, policy.late_idle] for policy in policies]
        orders = (None, None) if order is None else packed.flat([[n for n in row if n & 3 != W] for row in order])
        arrays = [
            *lanes,
            *np.ascontiguousarray(np.array(each, dtype=np.float64).T),
            np.array([int(rule.joined) for rule in rules]),
            *np.ascontiguousarray(np.array(patience, dtype=np.float64).T),
            *orders,
        ]
        plan, ranks = record(*arrays), self.instance.num_ranks
        rows, lengths = np.empty(int(packed.offsets[-1]), dtype=np.int64), np.empty(ranks, dtype=np.int64)
        begun, ended = np.empty((2, ranks))
        done = library.construct(packed.address, *map(pointer, (plan, rows, lengths, begun, ended)))
        if done == Kernel.OUT_OF_MEMORY:
            raise MemoryError(f"no memory to build a program of {self.instance.num_actions} actions")
        ends = list(zip(begun.tolist(), ended.tolist(), strict=True))
        return TimedRows(packed.rows(rows, lengths), ends) if done else None


def _room(resource: Resource, lanes: Sequence[Sequence[int]]) -> float:
    """Return what the F of the first of these lanes takes, plus room for the lanes to finish the largest microbatch."""
    stash = most = 0.0
    path = [(lane, F) for lane in lanes] + [(lane, op) for lane in reversed(lanes) for op in (I, W)]
    for lane, op in path:
        number = max(lane, key=resource.during.__getitem__) + op
        most = max(most, stash + resource.during[number])
        stash += resource.after[number]
    return most


class _Lane:
    """One lane during a build: how far its forwards and backwards are.

    `owed` holds the pending W, in the order of their I: a given order may let microbatches overtake each other.
    """

    __slots__ = ("actions", "backward", "backwards", "count", "forwards", "owed", "room", "rule", "weights")

    def __init__(self, actions: list[int], rule: LaneRule, room: list[float]) -> None:
        self.actions, self.rule, self.room = actions, rule, room
        self.count = len(actions)
        self.backward = B if rule.joined else I
        self.forwards = self.backwards = self.weights = 0
        self.owed: deque[int] = deque()


class _Build:
    """One build: the state of every rank, and a queue of the moments at which a rank must choose."""

    def __init__(self, builder: Builder, policies: Sequence[Policy], order: Rows | None) -> None:
        instance = builder.instance
        self.seconds, self.latency, self.need = instance.seconds, instance.latency, instance.need
        self.taken_on, self.lane_of = builder.taken_on, builder.lane_of
        self.limits = [(device.during, device.after, device.always, device.most) for device in instance.resources]
        self.lanes = [
            [_Lane(*parts) for parts in zip(lanes, policy.rules, room, strict=True)]
            for lanes, policy, room in zip(builder.lanes, policies, builder.room, strict=True)
        ]
        num_ranks = len(self.lanes)
        self.order = None if order is None else [[n for n in row if n & 3 != W] for row in order]
        self.ordered = [0] * num_ranks
        self.rows: Rows = [[] for _ in range(num_ranks)]
        self.begun = [0.0] * num_ranks
        self.stash = [[0.0] * len(self.limits) for _ in range(num_ranks)]
        self.ready = [_UNKNOWN] * instance.num_actions + [0.0]
        self.free, self.wakes = [0.0] * num_ranks, [0.0] * num_ranks
        self.idle = [policy.idle for policy in policies]
        self.late = [policy.late_idle for policy in policies]
        self.forwards_left = [sum(lane.count for lane in lanes) for lanes in self.lanes]
        self.queue = [(0.0, rank) for rank in range(num_ranks)]

    def run(self, is_late: Callable[[], bool]) -> TimedRows | None:
        wakes, queue, pop, push = self.wakes, self.queue, heapq.heappop, heapq.heappush
        turn = 0
        while queue:
            turn += 1
            if turn % _LOOK == 0 and is_late():
                return None
            time, rank = pop(queue)
            if time != wakes[rank]:
                continue  # it was woken earlier
            offer = self._choose(rank, time)
            if offer is None:
                wakes[rank] = _UNKNOWN
            elif offer[1] > time:
                wakes[rank] = offer[1]
                push(queue, (offer[1], rank))
            else:
                self._take(rank, time, offer[2])
        if any(lane.weights < lane.count for lanes in self.lanes for lane in lanes):
            return None
        return TimedRows(self.rows, list(zip(self.begun, self.free, strict=True)))

    def _choose(self, rank: int, time: float) -> tuple[float, float, int] | None:
        """Return (price, start, action) of the rank's next action; None if no action is available yet."""
        offers = self._offers(rank, time) if self.order is None else self._next_offers(rank, time, self.order[rank])
        if not offers:
            return None
        best = min(offers)
        if best[1] > time and best[1] - self.free[rank] > self.idle[rank]:
            # The wait would be too long: take what is ready, if anything.
            best = min((offer for offer in offers if offer[1] == time), default=best)
        return best

    def _offers(self, rank: int, time: float) -> list[tuple[float, float, int]]:
        ready, need, offers = self.ready, self.need, []
        for lane in self.lanes[rank]:
            forwards, backwards, rule = lane.forwards, lane.backwards, lane.rule
            if backwards < forwards:
                number = lane.actions[backwards] + lane.backward
                at = ready[need[number]]
                if at != _UNKNOWN and self._fits(rank, number):
                    at = at if at > time else time
                    offers.append((at + rule.backward, at, number))
            if lane.owed:
                offers.append((time + rule.weight, time, lane.owed[0]))
            if forwards < lane.count and forwards - backwards < rule.ahead:
                number = lane.actions[forwards]
                at = ready[need[number]]
                if at != _UNKNOWN and self._has_room(rank, lane.room):
                    at = at if at > time else time
                    offers.append((at + rule.forward, at, number))
        return offers

    def _next_offers(self, rank: int, time: float, order: list[int]) -> list[tuple[float, float, int]]:
        """Return the next action of the order, if it can run, and every lane's next W."""
        offers = [(time + lane.rule.weight, time, lane.owed[0]) for lane in self.lanes[rank] if lane.owed]
        if self.ordered[rank] < len(order):
            number = order[self.ordered[rank]]
            at = self.ready[self.need[number]]
            if at != _UNKNOWN and self._fits(rank, number):
                at = at if at > time else time
                offers.append((at, at, number))
        return offers

    def _fits(self, rank: int, number: int) -> bool:
        for stash, (during, _, always, most) in zip(self.stash[rank], self.limits, strict=True):
            if always[rank] + (stash + during[number]) > most:
                return False
        return True

    def _has_room(self, rank: int, room: list[float]) -> bool:
        for stash, more, (_, _, always, most) in zip(self.stash[rank], room, self.limits, strict=True):
            if always[rank] + (stash + more) > most:
                return False
        return True

    def _take(self, rank: int, time: float, number: int) -> None:
        op = number & 3
        lane = self.lanes[rank][self.lane_of[number - op]]
        if op == F:
            lane.forwards += 1
            self.forwards_left[rank] -= 1
            if self.forwards_left[rank] == 0:
                self.idle[rank] += self.late[rank]
        elif op == W:
            lane.weights += 1
            lane.owed.popleft()
        else:
            lane.backwards += 1
            if op == B:
                lane.weights += 1
            else:
                lane.owed.append(number - I + W)
        if op != W:
            self.ordered[rank] += 1
        if self.rows[rank]:
            self.idle[rank] -= time - self.free[rank]
        else:
            self.begun[rank] = time
        self.rows[rank].append(number)
        for at, (_, after, _, _) in enumerate(self.limits):
            self.stash[rank][at] += after[number]
        time += self.seconds[number]
        self.free[rank] = self.wakes[rank] = time
        heapq.heappush(self.queue, (time, rank))
        if op != W:
            self._hand_on(number - 2 if op == B else number, time + self.latency[number])

    def _hand_on(self, number: int, arrives: float) -> None:
        """Notify the action that waits for the output of `number` when it arrives."""
        self.ready[number] = arrives
        rank = self.taken_on[number]
        if rank >= 0 and self.wakes[rank] > arrives:
            self.wakes[rank] = max(arrives, self.free[rank])
            heapq.heappush(self.queue, (self.wakes[rank], rank))
