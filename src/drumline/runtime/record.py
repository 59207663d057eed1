"""What a rank measured in one step, and the timeline that all ranks' records make.

Every rank notes when each action started and ended, when it waited and for which message, and when each message that it
took up was made, on its way, and consumed. Records are arrays of whole numbers, so they are small and travel well.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from typing import Any

from drumline.core import rules
from drumline.core.action import TIMED_OPS, Action, Op
from drumline.core.costs import Costs
from drumline.core.memory import Holding, holdings
from drumline.core.timeline import Lane, Span, Timeline, Track, Transfer

NANO = 1e-9


@dataclass(frozen=True, slots=True)
class Waited:
    """A time in which a rank had nothing to do: it was at `action` and waited for `receive` of `source`."""

    rank: int
    action: Action
    receive: Action
    source: int
    start: float
    end: float


def _numbers() -> array[int]:
    return array("q")


@dataclass(slots=True)
class Record:
    """One rank's step, in nanoseconds of a clock that all ranks share; rows of several numbers are laid out flat."""

    rank: int
    begin_ns: int = 0
    end_ns: int = 0
    starts: array[int] = field(default_factory=_numbers)  # of each timed action
    ends: array[int] = field(default_factory=_numbers)
    held: array[int] = field(default_factory=_numbers)  # pairs held once it has ended
    stash: array[int] = field(default_factory=_numbers)  # bytes held once it has ended, where they were weighed
    peak_stash: int = 0  # the most bytes held at once, between the two of an overlapped pair too
    waits: array[int] = field(default_factory=_numbers)  # index of the action, message, source, from, to
    messages: array[int] = field(default_factory=_numbers)  # message, source, made, sent, consumed, bytes
    exchanges: array[int] = field(default_factory=_numbers)  # stage, from, to
    waited_ns: int = 0  # in exchanges, for other ranks' gradients

    def waited(self, index: int, receive: Action, source: int, start: int, end: int) -> None:
        """Note a wait before the timed action `index`."""
        self.waits.extend((index, *_coded(receive), source, start, end))

    def took(self, receive: Action, source: int, made: int, sent: int, consumed: int, num_bytes: int) -> None:
        """Note a message that was taken up."""
        self.messages.extend((*_coded(receive), source, made, sent, consumed, num_bytes))


def _coded(receive: Action) -> tuple[int, int, int]:
    return receive.stage, int(receive.op is Op.RECV_B), -1 if receive.microbatch is None else receive.microbatch


def _decoded(stage: int, backward: int, microbatch: int) -> Action:
    return Action(stage, Op.RECV_B if backward else Op.RECV_F, microbatch)


def _rows(flat: array[int], width: int) -> Iterator[Sequence[int]]:
    return (flat[at : at + width] for at in range(0, len(flat), width))


@dataclass(frozen=True, eq=False, repr=False)
class Measured(Timeline):
    """The timeline of a step that ran, in seconds from its first action.

    Beyond what every timeline has: `waits`, the waiting of each rank by what it waited for, and `overhead`, the seconds
    of each rank's step that were neither compute nor waiting.
    """

    records: tuple[Record, ...]
    costs: Costs = field(default_factory=Costs)

    @cached_property
    def _zero(self) -> int:
        return min((record.starts[0] for record in self.records if record.starts), default=0)

    def _seconds(self, moment: int) -> float:
        return (moment - self._zero) * NANO

    @cached_property
    def tracks(self) -> Sequence[Track]:
        """Every rank's timed actions."""
        found = []
        for row, record in zip(self.program.rows, self.records, strict=True):
            actions = tuple(action for action in row if action.op in TIMED_OPS)
            found.append(
                Track(actions, [self._seconds(at) for at in record.starts], [self._seconds(at) for at in record.ends])
            )
        return found

    @cached_property
    def memory(self) -> Sequence[Holding]:
        """Per rank, what it holds after each start and end, as the rows say; `held` is what was counted."""
        return holdings(self.program, self.costs)

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the (stage, microbatch) pairs that were really held once each action had ended."""
        return tuple(tuple(record.held) for record in self.records)

    @property
    def stash(self) -> tuple[tuple[int, ...], ...] | None:
        """Per rank, the activation bytes that were really held once each action had ended; None if not weighed."""
        if not all(record.stash for record in self.records):
            return None
        return tuple(tuple(record.stash) for record in self.records)

    @property
    def peak_stash(self) -> tuple[int, ...] | None:
        """Per rank, the most activation bytes that were really held at once; None if not weighed."""
        return None if self.stash is None else tuple(record.peak_stash for record in self.records)

    @cached_property
    def exchanges(self) -> Sequence[Span]:
        """The gradient exchanges."""
        return [
            Span(record.rank, Action(stage, Op.REDUCE_GRAD), self._seconds(start), self._seconds(end), Lane.EXCHANGE)
            for record in self.records
            for stage, start, end in _rows(record.exchanges, 3)
        ]

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """The messages between ranks, transfer and waiting apart."""
        found = []
        for record in self.records:
            for *coded, source, made, sent, consumed, num_bytes in _rows(record.messages, 8):
                send = rules.message_of(_decoded(*coded)).send
                start, end, taken = (self._seconds(one) for one in (made, min(sent, consumed), consumed))
                found.append(Transfer(send, source, record.rank, start, start, end, taken, float(num_bytes)))
        return found

    @cached_property
    def waits(self) -> tuple[Waited, ...]:
        """Every time a rank waited, and for what."""
        return tuple(
            Waited(record.rank, track.actions[at], _decoded(*coded), source, self._seconds(start), self._seconds(end))
            for track, record in zip(self.tracks, self.records, strict=True)
            for at, *coded, source, start, end in _rows(record.waits, 7)
        )

    @cached_property
    def overhead(self) -> tuple[float, ...]:
        """Seconds of each rank's step that were neither compute nor waiting: the executor's own."""
        return tuple(
            (record.end_ns - record.begin_ns - sum(record.ends) + sum(record.starts)) * NANO
            - (record.waited_ns + sum(end - start for *_, start, end in _rows(record.waits, 7))) * NANO
            for record in self.records
        )

    def measured_costs(self) -> Costs:
        """Return the median seconds of each stage and op, and bytes where they were weighed, ready for `simulate`.

        B's seconds stand as backward_input, with a backward_weight of 0, for stages that only ever ran B.
        """
        seconds: dict[tuple[int, Op], list[float]] = {}
        for track in self.tracks:
            for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
                if not action.parts:
                    seconds.setdefault((action.stage, action.op), []).append(end - start)
        stages = range(self.program.num_stages)
        of = {key: median(values) for key, values in seconds.items()}
        weight = [of.get((stage, Op.BACKWARD_WEIGHT), 0.0) for stage in stages]
        whole = [of.get((stage, Op.BACKWARD)) for stage in stages]
        split = [of.get((stage, Op.BACKWARD_INPUT)) for stage in stages]
        return Costs(
            forward=[of.get((stage, Op.FORWARD), 0.0) for stage in stages],
            backward_input=[
                alone if alone is not None else max((full or 0.0) - later, 0.0)
                for alone, full, later in zip(split, whole, weight, strict=True)
            ],
            backward_weight=weight,
            **self._measured_bytes(),
        )

    def _measured_bytes(self) -> dict[str, Any]:
        """Return what a microbatch holds from F, and from I to W, per stage."""
        if self.stash is None:
            return {}
        changes: dict[tuple[int, Op], list[int]] = {}
        for track, weights in zip(self.tracks, self.stash, strict=True):
            for action, before, after in zip(track.actions, (0, *weights), weights, strict=False):
                changes.setdefault((action.stage, action.op), []).append(after - before)
        stages = range(self.program.num_stages)
        full = [float(median(changes[stage, Op.FORWARD])) for stage in stages]
        freed = [float(median(changes.get((stage, Op.BACKWARD_INPUT), [0]))) for stage in stages]
        return {
            "activation_bytes": full,
            "held_until_weight_bytes": [held + less for held, less in zip(full, freed, strict=True)],
        }
