"""A recorded step of another framework, as the same timeline; and why each idle second of it was idle.

None of our code runs while the trace is recorded, and nothing is guessed: causes are what the trace proves, and time
that it does not explain is called unexplained.

    before 1F3   ├──── wait ─────┤ overhead ├─ transfer ─┤ overhead │ unexplained ┤ 1F3
                 0F3 is computed │ not sent │ on its way │ named    │ not named   │

    fill, wait    until another rank's action made the input that the action waited for
    transfer      from when both ends could move the message to its arrival; or the rank waited for a send or a gradient
                  exchange, according to a WAIT label (torch 2.15) or to the time at which a send was done
    overhead      something else with a name: the message was made but not sent, or a label, a call or an annotation
                  occupied the rank's host, or kernels of no action its device
    unexplained   the rest; after the rank's last action it is drain instead
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from drumline.core import rules
from drumline.core.action import AWAITED, SEND_OPS, WAIT_OPS, Action
from drumline.core.costs import Costs
from drumline.core.memory import Holding, holdings
from drumline.core.program import Program
from drumline.core.timeline.idle import Cause, Idle
from drumline.core.timeline.spans import Track, Transfer, on_top
from drumline.core.timeline.timeline import Timeline
from drumline.report.kineto.calls import MessageEnd
from drumline.report.kineto.rank import RankStep
from drumline.report.kineto.step_bounds import num_flushes

NANO = 1e-9


@dataclass(frozen=True, slots=True)
class NamedIdle(Idle):
    """An idle interval in which something named (`kind`) kept the rank busy, or its input was made but not sent."""

    @property
    def why(self) -> str:
        """The cause in words."""
        if self.waits_for is not None:
            return f"{self.waits_for} of rank {self.on_rank} is done, but its output is not yet sent to {self.before}"
        behind = f"; {self.before} comes after it" if self.before is not None else ""
        return f"the rank is busy with {self.kind}{behind}"


@dataclass(frozen=True, eq=False, repr=False)
class TracedStep(Timeline):
    """The timeline of one recorded step, in seconds from its first action.

    `program` is the compute that ran, `ran` includes everything labelled: messages, parameters, gradients. `shifts` are
    nanoseconds to add to each rank's clock to get the common clock.
    """

    ran: Program
    step: int
    ranks: tuple[RankStep, ...]
    shifts: tuple[int, ...]

    @cached_property
    def zero(self) -> int:
        """The nanosecond, by the common clock, at which the first action started."""
        return min(rank.ran[0].start + shift for rank, shift in zip(self.ranks, self.shifts, strict=True))

    def seconds(self, rank: int, moment: int) -> float:
        """Convert a moment of a rank's clock to seconds of this timeline."""
        return (moment + self.shifts[rank] - self.zero) * NANO

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The nanoseconds, by the common clock, at which each rank began and ended the step."""
        return [(rank.start + shift, rank.end + shift) for rank, shift in zip(self.ranks, self.shifts, strict=True)]

    @cached_property
    def tracks(self) -> Sequence[Track]:
        """Every rank's actions."""
        return [
            Track(
                tuple(execution.action for execution in step.ran),
                [self.seconds(rank, execution.start) for execution in step.ran],
                [self.seconds(rank, execution.end) for execution in step.ran],
            )
            for rank, step in enumerate(self.ranks)
        ]

    @cached_property
    def memory(self) -> Sequence[Holding]:
        """Per rank, the pairs it holds after each start and end, according to the rows; a trace has no bytes."""
        return holdings(self.program, Costs())

    @cached_property
    def num_flushes(self) -> int:
        """How often the pipeline runs empty in the step: more than once if gradients are accumulated."""
        return num_flushes(self.program)

    @property
    def step_seconds(self) -> float:
        """From the first rank's start of the step to the last one's end, including the optimizer and all else."""
        return (max(end for _, end in self.bounds) - min(start for start, _ in self.bounds)) * NANO

    @property
    def kernel_seconds(self) -> tuple[float, ...] | None:
        """Per rank, how long kernels ran within its actions; None without a device."""
        if not all(rank.has_device for rank in self.ranks):
            return None
        return tuple(sum(execution.kernel_ns for execution in rank.ran) * NANO for rank in self.ranks)

    @cached_property
    def causes(self) -> tuple[Idle, ...]:
        """Every idle interval with its cause, rank by rank in time order; they sum to `idle`."""
        return tuple(idle for rank in range(self.num_ranks) for idle in _IdleWalk(self, rank).intervals())

    @cached_property
    def messages(self) -> Mapping[Action, tuple[int, int, MessageEnd, MessageEnd]]:
        """By send: source and target rank of every message, and its two ends."""
        receives = {action: (rank, half) for rank, s in enumerate(self.ranks) for action, half in s.halves.items()}
        messages = {}
        for source, rank in enumerate(self.ranks):
            for send, half in rank.halves.items():
                message = rules.message_of(send)
                if message.send == send and message.recv in receives:
                    target, other = receives[message.recv]
                    messages[send] = (source, target, half, other)
        return messages

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """The messages between ranks: on their way once both ends could move them."""
        transfers = []
        for send, (source, target, sent, received) in self.messages.items():
            ready, taken = self._ready_time(send), self._taken(send)
            if ready is None or taken is None:
                continue
            end = taken
            if received.done is not None:
                end = _within(self.seconds(target, received.done), ready, max(taken, ready))
            start = min(max(ready, self.seconds(source, sent.begun), self.seconds(target, received.begun)), end)
            size = sent.num_bytes if sent.num_bytes is not None else received.num_bytes
            transfers.append(Transfer(send, source, target, ready, start, end, max(taken, end), size or 0.0))
        return sorted(transfers, key=lambda transfer: (transfer.source, transfer.start))

    def _ready_time(self, send: Action) -> float | None:
        """Return when what `send` carries was made."""
        places = (self.located.get(producer[:3]) for producer in rules.producers(send))
        return next((self.tracks[rank].ends[at] for rank, at in filter(None, places)), None)

    def _taken(self, send: Action) -> float | None:
        """Return when what `send` carries was used."""
        places = (self.located.get(consumer[:3]) for consumer in rules.consumers(rules.message_of(send).recv))
        return next((self.tracks[rank].starts[at] for rank, at in filter(None, places)), None)


class _IdleWalk:
    """One rank's track, walked once from left to right."""

    def __init__(self, timeline: TracedStep, rank: int) -> None:
        self.timeline = timeline
        self.rank = rank
        self.track = timeline.tracks[rank]
        self.step = timeline.ranks[rank]
        self.awaited = {str(act): act._replace(op=AWAITED[act.op]) for act in self.step.order if act.op in WAIT_OPS}
        seconds = partial(timeline.seconds, rank)
        self.others = [(seconds(start), seconds(end), name) for name, start, end in self.step.others]
        # The start of a long mark does not show whether it reaches into a gap.
        self.longest = max((end - start for start, end, _ in self.others), default=0.0)
        self.sends = sorted(
            (seconds(half.done), seconds(half.start), action)
            for action, half in self.step.halves.items()
            if action.op in SEND_OPS and half.done is not None
        )

    def intervals(self) -> Iterator[Idle]:
        for low, high, index, waiting in self.timeline.gaps(self.rank):
            if waiting is Cause.DRAIN:
                yield from self.named(low, high, None)
            else:
                yield from self.gap(low, high, index, waiting)

    def gap(self, low: float, high: float, index: int, waiting: Cause) -> Iterator[Idle]:
        action = self.track.actions[index]
        latest = self.timeline.latest_input(self.rank, index)
        if latest is None:
            yield from self.named(low, high, action)
            return
        ready, on_rank, needed = latest
        ready = _within(ready, low, high)
        sent, moving, arrived = self.moved(index, needed, ready, high)
        if ready > low:
            yield Idle(self.rank, low, ready, waiting, action, needed, on_rank)
        if sent > ready:
            yield NamedIdle(self.rank, ready, sent, Cause.OVERHEAD, action, needed, on_rank)
        if moving > sent:
            yield from self.named(sent, moving, action)
        if arrived > moving:
            yield Idle(self.rank, moving, arrived, Cause.TRANSFER, action, needed, on_rank)
        if high > arrived:
            yield from self.named(arrived, high, action)

    def moved(self, index: int, needed: Action, ready: float, high: float) -> tuple[float, float, float]:
        """Return when the message from `needed` was sent, when both ends could move it, and when it arrived."""
        message = rules.message(needed, self.timeline.program.num_stages)
        known = None if message is None else self.timeline.messages.get(message.send)
        done = None if known is None else known[3].done
        if known is None or done is None:
            return ready, ready, ready
        (source, target, sending, receiving), seconds = known, self.timeline.seconds
        arrived = _within(seconds(target, done), ready, high)
        sent = _within(seconds(source, sending.begun), ready, arrived)
        taking = max(receiving.begun, self.step.ran[index].waiting)
        return sent, _within(seconds(target, taking), sent, arrived), arrived

    def named(self, low: float, high: float, before: Action | None) -> Iterator[Idle]:
        """Divide an interval by the innermost names in it; unnamed time at the end is drain."""
        near = self.others[bisect_left(self.others, (low - self.longest,)) : bisect_left(self.others, (high,))]
        inside = [(max(start, low), min(end, high), name) for start, end, name in near if end > low]
        marks = [(start, end, (-start, end, name), name) for start, end, name in inside]
        for start, end, name in on_top(marks, low, high):
            if name in self.awaited:
                yield Idle(self.rank, start, end, Cause.TRANSFER, before, self.awaited[name], self.rank)
            elif name:
                yield NamedIdle(self.rank, start, end, Cause.OVERHEAD, before, kind=name)
            elif before is None:
                on_rank, last = self.timeline.last_action
                yield Idle(self.rank, start, end, Cause.DRAIN, None, last, on_rank)
            else:
                yield from self.unnamed(start, end, before)

    def unnamed(self, low: float, high: float, before: Action) -> Iterator[Idle]:
        """Divide an unnamed interval: transfer while the host waited for a send, unexplained after that."""
        for done, posted, action in self.sends[bisect_left(self.sends, (low,)) :]:
            if done > high:
                break
            waited = max(low, posted)
            if done > waited:
                if waited > low:
                    yield Idle(self.rank, low, waited, Cause.UNEXPLAINED, before)
                yield Idle(self.rank, waited, done, Cause.TRANSFER, before, action, self.rank)
                low = done
        if high > low:
            yield Idle(self.rank, low, high, Cause.UNEXPLAINED, before)


def _within(moment: float, low: float, high: float) -> float:
    return min(max(moment, low), high)
