"""What happened or would happen: spans on ranks, messages between them, and the metrics of both.

Both the simulator and the executor produce timelines, so every consumer is written once.

    makespan       first start to last end over all ranks
    bubble         1 - busy / (ranks x makespan)
    span_bubble    the same with the longest rank's own span instead of the makespan (as in the zero-bubble papers)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import ClassVar

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.graph import Columns
from drumline.core.memory import Holding
from drumline.core.program import Program
from drumline.core.timeline.idle import Cause, Idle
from drumline.core.timeline.spans import Span, StepInterval, Track, Transfer


@dataclass(frozen=True, eq=False, repr=False)
class Timeline(ABC):
    r"""The tracks of all ranks. Subclasses may override what they know better: messages, memory, a balanced twin.

    >>> from drumline.core.simulate.simulate import simulate
    >>> timeline = simulate(Program.parse("0F0,0B0\n1F0,1B0"))
    >>> timeline.makespan, timeline.bubble, timeline.peak_activations
    (6.0, 0.5, (1, 1))
    """

    program: Program
    says_causes: ClassVar[bool] = False  # whether ranks noted why they were idle, so that it need not be inferred

    @property
    @abstractmethod
    def tracks(self) -> Sequence[Track]:
        """Every rank's timed actions."""

    @property
    @abstractmethod
    def memory(self) -> Sequence[Holding]:
        """Per rank, what it holds after each start and end."""

    @property
    @abstractmethod
    def causes(self) -> Sequence[Idle]:
        """Every idle interval with its cause; they sum to `idle`."""

    @cached_property
    def causes_by_rank(self) -> tuple[tuple[Idle, ...], ...]:
        """The idle intervals and causes of each rank."""
        each: list[list[Idle]] = [[] for _ in range(self.num_ranks)]
        for idle in self.causes:
            each[idle.rank].append(idle)
        return tuple(map(tuple, each))

    @cached_property
    def columns(self) -> Columns:
        """The tracks' actions as arrays."""
        return Columns.of([track.actions for track in self.tracks])

    @property
    def exchanges(self) -> Sequence[Span]:
        """The gradient exchanges."""
        return ()

    @property
    def between(self) -> Sequence[StepInterval]:
        """What ranks did since the previous step, if known."""
        return ()

    def __repr__(self) -> str:
        return f"Timeline({self.program.name!r}, makespan={self.makespan:g}, bubble={self.bubble:.4f})"

    @property
    def transfers(self) -> Sequence[Transfer]:
        """The messages between ranks."""
        return ()

    @property
    def packing(self) -> Sequence[Span]:
        """The spans in which copying a stage's gradients together, for their exchange, kept a rank from computing."""
        return ()

    @property
    def occupied(self) -> Sequence[Sequence[Span]]:
        """Per rank, the spans in which moving a message kept it from computing."""
        return [()] * self.num_ranks

    @property
    def balanced(self) -> Timeline | None:
        """The same program as if all stages and microbatches cost the same; None if they do."""
        return None

    @property
    def in_flight(self) -> Sequence[int] | None:
        """Per rank, the pairs that it held when the first action began, -1 if it keeps none; None with a flush."""
        return None

    @property
    def clock_error(self) -> float:
        """How far apart the ranks' clocks may be, if several clocks measured them."""
        return 0.0

    @property
    def num_ranks(self) -> int:
        """How many ranks took part."""
        return self.program.num_ranks

    def spans(self) -> Iterator[Span]:
        """Yield every span of every rank, rank by rank in time order; gradient exchanges come last."""
        for rank, track in enumerate(self.tracks):
            for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
                yield Span(rank, action, start, end)
        yield from self.exchanges

    def action_seconds(self, *, halves: bool = False) -> dict[tuple[int, Op], list[float]]:
        """Return the seconds of all actions by stage and op; overlapped pairs are left out, or count half for each."""
        seconds: dict[tuple[int, Op], list[float]] = {}
        for track in self.tracks:
            for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
                for part in action.work if halves or not action.parts else ():
                    seconds.setdefault((part.stage, part.op), []).append((end - start) / len(action.work))
        return seconds

    @cached_property
    def start(self) -> float:
        """When the first action starts."""
        return min((track.starts[0] for track in self.tracks if track.starts), default=0.0)

    @cached_property
    def end(self) -> float:
        """When the last action or exchange ends."""
        last = (track.ends[-1] for track in self.tracks if track.ends)
        return max((*last, *(span.end for span in self.exchanges)), default=0.0)

    @property
    def makespan(self) -> float:
        """First start to last end over all ranks."""
        return self.end - self.start

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds each rank computed."""
        return tuple(math.fsum(track.ends) - math.fsum(track.starts) for track in self.tracks)

    @cached_property
    def idle(self) -> tuple[float, ...]:
        """Seconds of the makespan in which each rank did not compute."""
        return tuple(self.makespan - busy for busy in self.busy)

    @cached_property
    def span(self) -> float:
        """The longest rank's own first start to last end."""
        return max((track.span for track in self.tracks), default=0.0)

    @property
    def bubble(self) -> float:
        """Idle share of the makespan over all ranks."""
        return self._idle_share(self.makespan)

    @property
    def span_bubble(self) -> float:
        """Idle share of the longest rank's span, as reported in the zero-bubble papers."""
        return self._idle_share(self.span)

    def _idle_share(self, seconds: float) -> float:
        return 1.0 - math.fsum(self.busy) / (self.num_ranks * seconds) if seconds > 0 else 0.0

    @cached_property
    def peak_activations(self) -> tuple[int, ...]:
        """The most (stage, microbatch) pairs each rank held at once."""
        return tuple(holding.peak_pairs for holding in self.memory)

    @cached_property
    def peak_bytes(self) -> tuple[float, ...] | None:
        """The most bytes each rank held at once: weights, gradients, optimizer and stash; None if unknown."""
        if any(holding.peak_bytes is None for holding in self.memory):
            return None
        return tuple(holding.peak_bytes or 0.0 for holding in self.memory)

    @cached_property
    def peak_receive_bytes(self) -> tuple[float, ...]:
        """The most message bytes each rank had arriving or waiting, in addition to what it holds."""
        changes: list[list[tuple[float, float]]] = [[] for _ in range(self.num_ranks)]
        for transfer in self.transfers:
            changes[transfer.target] += [(transfer.start, transfer.num_bytes), (transfer.consumed, -transfer.num_bytes)]
        # A message that arrives at the moment another is used needs its own space.
        ordered = (sorted(events, key=lambda event: (event[0], -event[1])) for events in changes)
        return tuple(max(accumulate(change for _, change in events), default=0.0) for events in ordered)

    @cached_property
    def queue_depths(self) -> dict[tuple[int, int], list[tuple[float, int]]]:
        """Per edge, how many messages were made and not yet used, as (time, depth) at each change."""
        changes: dict[tuple[int, int], list[tuple[float, int]]] = defaultdict(list)
        for transfer in self.transfers:
            changes[transfer.source, transfer.target] += [(transfer.made, +1), (transfer.consumed, -1)]
        depths: dict[tuple[int, int], list[tuple[float, int]]] = {}
        for edge, events in sorted(changes.items()):
            depth = 0
            curve: dict[float, int] = {}
            for time, change in sorted(events):
                depth += change
                curve[time] = depth
            depths[edge] = list(curve.items())
        return depths

    @cached_property
    def peak_queues(self) -> dict[tuple[int, int], int]:
        """Per edge, how many messages were made and not yet used at once."""
        return {edge: max(depth for _, depth in curve) for edge, curve in self.queue_depths.items()}

    @cached_property
    def latest_inputs(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Per rank, where the latest input of each timed action ran: (rank, index there), both -1 if it had none.

        Only inputs from other ranks count.
        """
        return [
            [(self.inputs(rank, action) or [(0.0, -1, -1, action)])[-1][1:3] for action in track.actions]
            for rank, track in enumerate(self.tracks)
        ]

    @cached_property
    def located(self) -> dict[tuple[int, Op, int | None], tuple[int, int]]:
        """Where each plain action ran, as (rank, index in its track), by (stage, op, microbatch)."""
        where: dict[tuple[int, Op, int | None], tuple[int, int]] = {}
        for rank, track in enumerate(self.tracks):
            for index, action in enumerate(track.actions):
                for part in action.parts or (action,):
                    where[part[:3]] = (rank, index)
        return where

    def gaps(self, rank: int) -> Iterator[tuple[float, float, int, Cause]]:
        """Yield a rank's idle intervals: start, end, the index of the action after it, and fill, wait or drain.

        After the last action, the index is one past it. A zero-time action, like a free gather, does not end the fill.
        """
        track, free, waiting = self.tracks[rank], self.start, Cause.FILL
        for index, start in enumerate(track.starts):
            if start > free:
                yield free, start, index, waiting
            free = track.ends[index]
            if free > start:
                waiting = Cause.WAIT
        if self.end > free:
            yield free, self.end, len(track.starts), Cause.DRAIN

    def latest_input(self, rank: int, index: int) -> tuple[float, int, Action] | None:
        """Return when, on which rank and by which plain action the last input from another rank was made, if any."""
        place = self.latest_inputs[rank][index]
        if place[0] < 0:
            return None
        track, action = self.tracks[place[0]], self.tracks[rank].actions[index]
        part = track.actions[place[1]]
        if part.parts:
            stages = self.program.num_stages
            wanted = {other for part in action.work for some in rules.needs(part, stages) for other in some}
            part = next(part for part in part.parts if part in wanted)
        return track.ends[place[1]], place[0], part

    @cached_property
    def last_action(self) -> tuple[int, Action]:
        """The rank and the action or exchange that ends last."""
        place = self._last()
        assert place is not None, "a program has actions"
        return (place.rank, place.action) if isinstance(place, Span) else (place[0], self.tracks[place[0]].actions[-1])

    def inputs(self, rank: int, action: Action) -> list[tuple[float, int, int, Action]]:
        """Return what `action` needed from other ranks, as (end, rank, index, action), the latest last."""
        inputs = []
        for part in action.work:
            for alternatives in rules.needs(part, self.program.num_stages):
                for alternative in alternatives:
                    place = self.located.get(alternative[:3])
                    if place is not None and place[0] != rank:
                        inputs.append((self.tracks[place[0]].ends[place[1]], *place, alternative))
        return sorted(inputs, key=lambda entry: entry[:3])

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        r"""The chain of spans that determines the makespan, in order: to shorten the step, shorten one of them.

        >>> from drumline.core.simulate.simulate import simulate
        >>> [span.action for span in simulate(Program.parse("0F0,0B0\n1F0,1B0")).critical_path]
        [0F0, 1F0, 1B0, 0B0]
        """
        path: list[Span] = []
        place = self._last()
        while place is not None:
            if isinstance(place, Span):
                path.append(place)
                place = self._before_awaited(place)
                continue
            rank, index = place
            track = self.tracks[rank]
            path.append(Span(rank, track.actions[index], track.starts[index], track.ends[index]))
            place = self._before(rank, index)
        return tuple(reversed(path))

    def _last(self) -> tuple[int, int] | Span | None:
        """Return what ends last: a timed action as (rank, index), or an exchange."""
        ranks = [rank for rank, track in enumerate(self.tracks) if track.ends]
        exchange = max(self.exchanges, key=lambda span: span.end, default=None)
        if not ranks:
            return exchange
        rank = max(ranks, key=lambda number: self.tracks[number].ends[-1])
        if exchange is not None and exchange.end > self.tracks[rank].ends[-1]:
            return exchange
        return rank, len(self.tracks[rank].ends) - 1

    def _before(self, rank: int, index: int) -> tuple[int, int] | Span | None:
        """Return what the action at (rank, index) started right after."""
        track = self.tracks[rank]
        if index and track.ends[index - 1] >= track.starts[index]:
            return rank, index - 1
        awaited = self.awaited_before(rank, index)
        if awaited is not None:
            return awaited
        latest = self.latest_inputs[rank][index]
        return latest if latest[0] >= 0 else ((rank, index - 1) if index else None)

    def _before_awaited(self, awaited: Span) -> tuple[int, int] | None:
        """Return the action, on either rank involved, that an exchange or message started right after."""
        waits = []
        for rank in self._between(awaited.action):
            index = bisect_right(self.tracks[rank].ends, awaited.start) - 1
            if index >= 0:
                waits.append((self.tracks[rank].ends[index], rank, index))
        return max(waits)[1:] if waits else None

    def _between(self, awaited: Action) -> tuple[int, ...]:
        """Return the ranks involved in an exchange or a message."""
        placement = self.program.placement
        if awaited.microbatch is None:
            return placement.ranks_of(awaited.stage)
        message = rules.message_of(awaited)
        return tuple(placement.rank_of(end.stage, awaited.microbatch) for end in (message.send, message.recv))

    def awaited_before(self, rank: int, index: int) -> Span | None:
        """Return the exchange that an UPDATE at (rank, index) waited for, if any."""
        action = self.tracks[rank].actions[index]
        if not self.exchanges or action.op is not Op.UPDATE:
            return None
        start = self.tracks[rank].starts[index]
        own_spans = (span for span in self.exchanges if span.rank == rank and span.action.stage == action.stage)
        return max((span for span in own_spans if span.end <= start), key=lambda span: span.end, default=None)
