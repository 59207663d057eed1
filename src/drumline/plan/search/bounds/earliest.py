"""Times before which actions cannot start, based on what must have run on their rank by then.

What must come before the m-th action of a (stage, op) on its rank is a count per (stage, op) of that rank, because
equal microbatches pass in order. With room for K pairs:

    before F5 of a stage:   F0 .. F4     I0 .. I(5-K)     and enough W to make room for F5

Their work has to fit between the head of any action and the next. So heads push each other up, sweep by sweep, along
the ranks and back. Every sweep is its own proof.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from drumline.core.graph import Floats, Ints
from drumline.plan.search.bounds.instance import F, I, StageLane, W
from drumline.plan.search.bounds.relaxed import Key, Relaxation

_SWEEPS = 40
_ROUNDING = 1e-11  # sums of sizes are rounded: an excess smaller than this does not count

Heads = dict[tuple[int, Key], Floats]  # by (rank, (stage, op)): one number per microbatch of that lane


def latest(relaxed: Relaxation, *, only_first: bool, is_late: Callable[[], bool] = lambda: False) -> float:
    """Return the largest head plus what must follow it, over all actions or only those of the rank of stage 0.

    If `is_late`, it ends with the sweeps so far; 0 before the first.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> from drumline.plan.search.bounds.instance import Instance
    >>> latest(Relaxation(Instance(Costs(comm=0.5), Placement.linear(3), 1)), only_first=False)
    9.0
    """
    ranks = []
    for lanes in relaxed.instance.lanes:
        if is_late():
            return 0.0
        ranks.append(_RankLanes(relaxed, lanes))
    heads: Heads = {(rank.number, key): np.zeros(rank.counts[key]) for rank in ranks for key in rank.counts}
    for _ in range(_SWEEPS):
        if is_late():
            break
        before = {key: head.copy() for key, head in heads.items()}
        for rank in [*ranks, *reversed(ranks)]:
            rank.tighten(heads)
        if all(np.array_equal(before[key], head) for key, head in heads.items()):
            break
    first = relaxed.instance.placement.rank_of(0, 0)
    return max(rank.end(heads, only_first, first) for rank in ranks)


class _RankLanes:
    """One rank: its lanes, what must come before each action, and how much can come before its first I."""

    def __init__(self, relaxed: Relaxation, lanes: Sequence[StageLane]) -> None:
        self.relaxed, self.lanes = relaxed, lanes
        self.number = lanes[0].rank
        self.stages = [lane.stage for lane in lanes]
        self.counts: dict[Key, int] = {(lane.stage, op): len(lane.microbatches) for lane in lanes for op in (F, I, W)}
        self.seconds = {key: relaxed.seconds[key] for key in self.counts}
        resources = relaxed.instance.resources
        self.rooms = [(index, resource.most - resource.always[self.number]) for index, resource in enumerate(resources)]
        self.pairs = {stage: self._most_pairs(at) for at, stage in enumerate(self.stages)}
        self.owed = {stage: self._most_owed(at) for at, stage in enumerate(self.stages)}
        self.begun: dict[Key, dict[int, Ints]] = {}
        self.before = {key: self._before(key) for key in self.counts}
        self.early = self._most_early_forwards()
        self.work = {key: self._all_work(key, 0.0) for key in self.counts}
        self.since = {stage: self._since_first_backward(stage) for stage in self.stages}

    def _below(self, at: int) -> Sequence[int]:
        """Return the stages of this rank that a microbatch at the lane `at` has passed, including that lane."""
        return self.stages[: at + 1] if self.relaxed.linked else self.stages[at : at + 1]

    def _most_pairs(self, at: int) -> int:
        """Return how many microbatches of the lane can be between F and I at once."""
        most = self.counts[self.stages[at], F]
        for number, room in self.rooms:
            size = sum(self.relaxed.sizes(stage, number)[0] for stage in self._below(at))
            if size > 0:
                most = min(most, int(room / size * (1 + _ROUNDING)))
        return max(most, 1)

    def _most_owed(self, at: int) -> int:
        """Return how many W of the lane can be pending while another of its microbatches begins."""
        most = self.counts[self.stages[at], F]
        for number, room in self.rooms:
            left = room - sum(self.relaxed.sizes(stage, number)[0] for stage in self._below(at))
            size = self.relaxed.sizes(self.stages[at], number)[1]
            if size > 0:
                most = min(most, int(max(left, 0.0) / size * (1 + _ROUNDING)))
        return most

    def _before(self, key: Key) -> dict[Key, Ints]:
        """Return how many of every (stage, op) must come before the m-th of `key`, for all m."""
        stage, op = key
        turn = np.arange(self.counts[key])
        counts = {other: np.zeros_like(turn) for other in self.counts}
        counts[key] = turn
        begun = {number: np.zeros_like(turn) for number in self.stages}  # forwards that had room, including this one
        if op == F:
            begun[stage] = turn + 1
        else:
            counts[stage, F if op == I else I] = turn + 1
        linked = self.relaxed.linked
        for _ in range(2 * len(self.stages) + 2):
            for at, number in enumerate(self.stages):
                forwards, firsts, seconds = counts[number, F], counts[number, I], counts[number, W]
                begun[number] = np.maximum(begun[number], forwards)
                np.maximum(seconds, begun[number] - 1 - self.owed[number], out=seconds)
                np.maximum(firsts, np.maximum(seconds, begun[number] - self.pairs[number]), out=firsts)
                np.maximum(forwards, firsts, out=forwards)
                if linked:
                    for lower in self.stages[:at]:
                        np.maximum(counts[lower, F], begun[number], out=counts[lower, F])
                        np.maximum(firsts, counts[lower, I] + (op == I and lower == stage), out=firsts)
        for other in counts:
            np.minimum(counts[other], self.counts[other], out=counts[other])
        counts[key] = turn
        self.begun[key] = begun
        return counts

    def _work(self, before: dict[Key, Ints], leaving_out: dict[Key, int] | None = None) -> Floats:
        """Return the seconds of what is counted, without the first few of each."""
        total: Floats = np.zeros(len(next(iter(before.values()))))
        for key, count in before.items():
            less = 0 if leaving_out is None else leaving_out[key]
            total += np.maximum(count - less, 0) * self.seconds[key]
        return total

    def _most_early_forwards(self) -> float:
        """Return the most seconds of forwards that can run before the first I, given the room."""
        most = sum(self.counts[stage, F] * self.seconds[stage, F] for stage in self.stages)
        for number, room in self.rooms:
            sizes = {stage: self.relaxed.sizes(stage, number)[0] for stage in self.stages}
            if min(sizes.values()) > 0:
                most = min(most, room * max(self.seconds[stage, F] / sizes[stage] for stage in self.stages))
        return most * (1 + _ROUNDING)

    def _all_work(self, key: Key, early: float) -> Floats:
        """Return the work before the m-th of `key`, minus `early` seconds of forwards; freeing room counts."""
        before = self.before[key]
        forwards = self._work({(stage, F): before[stage, F] for stage in self.stages})
        backwards = self._work({other: count for other, count in before.items() if other[1] != F})
        freeing: Floats = np.maximum(forwards - early, 0.0) + np.maximum(backwards, self._freeing(self.begun[key]))
        return freeing

    def _freeing(self, begun: dict[int, Ints]) -> Floats:
        """Return the fewest seconds of I and W that make room for this many forwards, over all lanes.

        An I of a lane frees what it holds minus what stays for W; an I with its W frees all of it. The bound uses the
        one that frees most per second.
        """
        longest: Floats = np.zeros(len(begun[self.stages[0]]))
        for number, room in self.rooms:
            over = np.full(len(longest), -room * (1 + _ROUNDING))
            rate = 0.0
            for stage in self.stages:
                full, rest = self.relaxed.sizes(stage, number)
                first, both = self.seconds[stage, I], self.seconds[stage, I] + self.seconds[stage, W]
                over += begun[stage] * full
                rate = max(rate, (full - rest) / first if first > 0 else np.inf, full / both if both > 0 else np.inf)
            if 0 < rate < np.inf:
                np.maximum(longest, over / rate, out=longest)
        return longest

    def _since_first_backward(self, stage: int) -> dict[Key, Floats]:
        """Return, for every action, the work that must lie between the start of the stage's first I and that action."""
        most: dict[Key, int] = {}
        for other in self.stages:
            passed = other <= stage or not self.relaxed.linked
            early = self.pairs[other] if passed else self.pairs[stage]
            most[other, F] = early
            most[other, I] = most[other, W] = 0 if passed else early
        if not self.relaxed.linked:
            for other in self.stages:
                if other != stage:  # for the other direction, nothing is known
                    most.update({(other, op): self.counts[other, op] for op in (F, I, W)})
        since = {key: self._work(self.before[key], most) for key in self.counts}
        if self.relaxed.linked and stage == self.stages[-1]:
            # No I of this rank comes before this one, so everything freed was freed since.
            for key in since:
                np.maximum(since[key], self._all_work(key, self.early), out=since[key])
        return since

    def tighten(self, heads: Heads) -> None:
        """Raise the heads of this rank's actions."""
        for lane in self.lanes:
            for op in (F, I, W):
                self._tighten(heads, lane, op)

    def _tighten(self, heads: Heads, lane: StageLane, op: int) -> None:
        stage, relaxed = lane.stage, self.relaxed
        key = (stage, op)
        head = heads[self.number, key]
        needed = relaxed.instance.inputs.get(key)
        if needed is not None:
            source = relaxed.instance.placement.rank_of(needed[0], lane.microbatches[0])
            ready = heads[source, needed] + relaxed.seconds[needed]
            np.maximum(head, ready + relaxed.latency(*needed) if source != self.number else ready, out=head)
        if relaxed.linked:
            begin = heads[self.number, (self.stages[0], F)][0]
            np.maximum(head, begin + self.work[key], out=head)
        for number in self.stages:
            since = self.since[number][key]
            np.maximum(head, np.where(since > 0, heads[self.number, (number, I)][0] + since, 0.0), out=head)
        self._after_releases(heads, head, stage, op)
        rising = np.arange(len(head)) * self.seconds[key]
        head[:] = np.maximum.accumulate(head - rising) + rising

    def _after_releases(self, heads: Heads, head: Floats, stage: int, op: int) -> None:
        """Make the m-th F wait for the I and the W that make room for it."""
        if op != F:
            return
        for freed, behind in ((I, self.pairs[stage]), (W, self.owed[stage] + 1)):
            if behind < len(head):
                ended = heads[self.number, (stage, freed)][: len(head) - behind] + self.seconds[stage, freed]
                np.maximum(head[behind:], ended, out=head[behind:])

    def end(self, heads: Heads, only_first: bool, first: int) -> float:
        """Return the largest head of an action of this rank plus what must follow it."""
        relaxed, best = self.relaxed, 0.0
        out = relaxed.to_first if only_first else relaxed.way_out
        for key, count in self.counts.items():
            stage, op = key
            head = heads[self.number, key] + self.seconds[key]
            tail = np.zeros(count)
            if op == F:
                tail += relaxed.way_back[stage] - self.seconds[key] + out[stage]
            elif op == I:
                tail += out[stage]
            if not only_first or self.number == first:
                np.maximum(tail, self._work_after(key), out=tail)
            elif op == W:
                continue
            best = max(best, float((head + tail).max()))
        return best

    def _work_after(self, key: Key) -> Floats:
        """Return the seconds of what must come after the m-th of `key` on this rank, for all m."""
        total: Floats = np.zeros(self.counts[key])
        turn = np.arange(self.counts[key])
        for other, count in self.counts.items():
            first = np.searchsorted(self.before[other][key], turn + 1)
            if other == key:
                first = turn + 1
            total += (count - first) * self.seconds[other]
        if self.relaxed.linked and key == (self.stages[-1], I):
            everything = sum(count * self.seconds[other] for other, count in self.counts.items())
            total[0] = max(total[0], everything - self.early - self.seconds[key])
        return total
