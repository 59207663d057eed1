"""What a rank measured in one step, and the timeline that all ranks' records make.

Every rank notes when each action started and ended, when it waited and for which message, and when each message that it
took up was made, on its way, and consumed. Records are plain numbers in program order, so they are small and travel well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from drumline.core import rules
from drumline.core.action import TIMED_OPS, Action, Op
from drumline.core.costs import Costs
from drumline.core.memory import Holding, holdings
from drumline.core.program import Program
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


@dataclass(slots=True)
class Record:
    """One rank's step, in nanoseconds of a clock that all ranks share."""

    rank: int
    begin_ns: int = 0
    end_ns: int = 0
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # pairs held while each timed action ran
    waits: list[tuple[int, Action, int, int, int]] = field(default_factory=list)  # index, receive, source, from, to
    messages: list[tuple[Action, int, int, int, int, int]] = field(default_factory=list)
    exchanges: list[tuple[Action, int, int]] = field(default_factory=list)


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
        """Per rank, the (stage, microbatch) pairs that were really held while each action ran."""
        return tuple(tuple(record.held) for record in self.records)

    @cached_property
    def exchanges(self) -> Sequence[Span]:
        """The gradient exchanges."""
        return [
            Span(record.rank, action, self._seconds(start), self._seconds(end), Lane.EXCHANGE)
            for record in self.records
            for action, start, end in record.exchanges
        ]

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """The messages between ranks, transfer and waiting apart."""
        found = []
        for record in self.records:
            for receive, source, made, sent, consumed, num_bytes in record.messages:
                times = (self._seconds(one) for one in (made, made, min(sent, consumed), consumed))
                found.append(Transfer(rules.message_of(receive).send, source, record.rank, *times, float(num_bytes)))
        return found

    @cached_property
    def waits(self) -> tuple[Waited, ...]:
        """Every time a rank waited, and for what."""
        return tuple(
            Waited(record.rank, track.actions[at], receive, source, self._seconds(start), self._seconds(end))
            for track, record in zip(self.tracks, self.records, strict=True)
            for at, receive, source, start, end in record.waits
        )

    @cached_property
    def overhead(self) -> tuple[float, ...]:
        """Seconds of each rank's step that were neither compute nor waiting: the executor's own."""
        return tuple(
            (record.end_ns - record.begin_ns - sum(record.ends) + sum(record.starts)) * NANO
            - sum(end - start for *_, start, end in record.waits) * NANO
            for record in self.records
        )

    def measured_costs(self) -> Costs:
        """Return the median seconds of each stage and op, ready for `simulate`.

        B's seconds stand as backward_input, with a backward_weight of 0, for stages that only ever ran B.
        """
        from statistics import median

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
        )
