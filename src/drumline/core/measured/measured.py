"""The timeline of a step that ran, assembled from the records of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from typing import Any, ClassVar

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.costs import Costs
from drumline.core.measured.account import NANO, Period, StepParts, account, idle_intervals, summed_parts
from drumline.core.measured.align import Dial, align
from drumline.core.measured.endless import held_in_part, is_part
from drumline.core.measured.record import BETWEEN, OVERHEADS, Record, decoded
from drumline.core.memory import Holding, holdings, stage_bytes, weighed_holdings
from drumline.core.timeline.idle import Idle
from drumline.core.timeline.spans import Span, SpanLane, StepInterval, Track, Transfer
from drumline.core.timeline.timeline import Timeline
from drumline.core.units import duration

_POST = OVERHEADS.index("post")


@dataclass(frozen=True, slots=True)
class WaitInterval:
    """A period in which a rank had nothing to do: at `action`, it waited for `receive` from `source`.

    `action` is None after the end of the row, during the gradient exchange.
    """

    rank: int
    action: Action | None
    receive: Action
    source: int
    start: float
    end: float


@dataclass(frozen=True, eq=False, repr=False)
class Measured(Timeline):
    """The timeline of a step that ran, in seconds from its first action.

    In addition to what every timeline has: `waits` lists what each rank waited for, and `parts` divides each rank's
    step by what it did.
    """

    records: tuple[Record, ...]
    weighed: tuple[Record, ...] = ()  # from another step of the run, for bytes if this step has none
    dials: tuple[Dial, ...] = ()  # how to read the ranks' clocks; found from this step alone unless given
    says_causes: ClassVar[bool] = True

    def __repr__(self) -> str:
        within = f", clocks within {duration(self.clock_error)}" if self.clock_error else ""
        return f"{super().__repr__()[:-1]}{within})"

    @cached_property
    def _dials(self) -> tuple[Dial, ...]:
        return self.dials or align([self.records])

    @cached_property
    def _one_clock(self) -> bool:
        return len({record.clock for record in self.records}) == 1

    @property
    def clock_errors(self) -> tuple[float, ...]:
        """Per rank, how many seconds its aligned clock may differ from rank 0's; 0 on the same host."""
        return tuple(dial.error_ns * NANO for dial in self._dials)

    @property
    def clock_error(self) -> float:
        """The largest clock error of any rank."""
        return max(self.clock_errors)

    def common(self, rank: int, moment: int) -> int:
        """Convert a moment of a rank's clock to common time, which is that of rank 0's clock."""
        return moment if self._one_clock else self._dials[rank].common(moment)

    def here(self, rank: int, other: int, moment: int) -> int:
        """Return what a rank's clock showed at a moment of another rank's clock."""
        return moment if self._one_clock else self._dials[rank].own_time(self._dials[other].common(moment))

    @cached_property
    def _corrected(self) -> tuple[Record, ...]:
        """The records, with each message made only once its device had made it: a host sends before that."""
        if not any(record.on_device for record in self.records):
            return self.records
        return tuple(replace(record, messages=self._made_by_devices(record)) for record in self.records)

    def _made_by_devices(self, record: Record) -> list[int]:
        ranks: list[int] = []
        for action, *coded, source, ready, sent, arrived, start, end, num_bytes in record.rows("messages"):
            receive, device = decoded(*coded), self.records[source]
            if device.on_device and device.ends and receive.op is not Op.REDUCE_GRAD:
                makers = (self.located.get(producer[:3]) for producer in rules.producers(receive))
                ready = max(ready, *(device.ends[place[1]] for place in makers if place is not None))
            ranks += (action, *coded, source, ready, max(sent, ready), arrived, start, end, num_bytes)
        return ranks

    @cached_property
    def zero_ns(self) -> int:
        """When the first action started, in common time."""
        return min((self.common(record.rank, record.starts[0]) for record in self.records if record.starts), default=0)

    def seconds(self, rank: int, moment: int) -> float:
        """Convert a moment of a rank's clock to seconds since the first action."""
        return (self.common(rank, moment) - self.zero_ns) * NANO

    @cached_property
    def tracks(self) -> Sequence[Track]:
        """Every rank's timed actions."""
        return [
            Track(row, *([self.seconds(record.rank, at) for at in each] for each in (record.starts, record.ends)))
            for row, record in zip(self.program.timed_rows, self.records, strict=True)
        ]

    @cached_property
    def memory(self) -> Sequence[Holding]:
        """Per rank, what it holds after each start and end: pairs according to the rows, bytes as measured.

        `held` is the number of pairs counted. Bytes come from this step, or else from the step that was weighed.
        """
        memory = weighed_holdings(self.program, self._weights) if self._weights else holdings(self.program, Costs())
        if self.in_flight is None:
            return memory
        known = held_in_part(self.program, self.in_flight)
        return tuple(
            replace(holding, byte_counts=weighed.byte_counts) for holding, weighed in zip(known, memory, strict=True)
        )

    @cached_property
    def in_flight(self) -> Sequence[int] | None:
        """Per rank, the pairs that it held when the first action began, -1 if it keeps none; None with a flush."""
        if not is_part(self.program) or not all(record.held for record in self.records):
            return None
        return [record.held[0] - 1 for record in self.records]  # rows of a step begin with a forward

    @cached_property
    def _weights(self) -> list[list[tuple[int, int]]]:
        """Per rank, the bytes held while each action ran and after it ended; empty if nothing was weighed."""
        for records in (self.records, self.weighed):
            if records and all(record.is_weighed for record in records):
                return [list(zip(record.peaks, record.stash, strict=True)) for record in records]
        return []

    @property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the (stage, microbatch) pairs that were actually held after each action."""
        return tuple(tuple(record.held) for record in self.records)

    @property
    def stash(self) -> tuple[tuple[int, ...], ...] | None:
        """Per rank, the activation bytes that were actually held after each action; None if not weighed."""
        if not all(record.is_weighed for record in self.records):
            return None
        return tuple(tuple(record.stash) for record in self.records)

    @property
    def peak_stash(self) -> tuple[int, ...] | None:
        """Per rank, the most activation bytes that were actually held at once; None if not weighed."""
        return None if self.stash is None else tuple(max(record.peaks) for record in self.records)

    @cached_property
    def exchanges(self) -> Sequence[Span]:
        """The gradient exchanges, and the gatherings of parameters that lines of a mesh divide."""
        return [
            Span(entry.rank, self._exchanged(entry, stage, end), *self._both(entry.rank, start, end), SpanLane.EXCHANGE)
            for entry in self.records
            for stage, start, end in entry.rows("exchanges")
        ]

    @cached_property
    def packing(self) -> Sequence[Span]:
        """The spans in which copying a stage's gradients together, for their exchange, kept a rank from computing."""
        packing = []
        for entry in self.records:
            posts = [(start, end) for kind, start, end in entry.rows("overheads") if kind == _POST]
            for stage, since, ended in entry.rows("exchanges"):
                action = self._exchanged(entry, stage, ended)
                spans = [(since, end) for start, end in posts if start <= since <= end and action.op is Op.REDUCE_GRAD]
                packing += [
                    Span(entry.rank, action, *self._both(entry.rank, *each), SpanLane.EXCHANGE) for each in spans
                ]
        return packing

    def _exchanged(self, record: Record, stage: int, end: int) -> Action:
        """Return what a rank exchanged for a stage until some moment: parameters before its first compute."""
        row = self.program.timed_rows[record.rank]
        if not any(action.op is Op.UNSHARD and action.stage == stage for action in row):
            return Action(stage, Op.REDUCE_GRAD)
        computes = (at for at, action in enumerate(row) if action.is_compute)
        first = next(at for at in computes if stage in {action.stage for action in row[at].work})
        return Action(stage, Op.UNSHARD if end <= record.starts[first] else Op.REDUCE_GRAD)

    def _both(self, rank: int, start: int, end: int) -> tuple[float, float]:
        return self.seconds(rank, start), self.seconds(rank, end)

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """The messages between ranks, with transfer and waiting separated."""
        transfers = []
        for record in self._corrected:
            for _, *coded, source, ready, sent, arrived, _, consumed, num_bytes in record.rows("messages"):
                receive = decoded(*coded)
                if receive.op is Op.REDUCE_GRAD:
                    continue
                start, taken = self.seconds(source, ready), self.seconds(record.rank, consumed)
                # The sender knows when the message left; otherwise the receiver knows when it arrived.
                there = self.seconds(source, sent) if sent > ready else self.seconds(record.rank, arrived)
                end = max(min(there, taken), start)
                send = rules.message_of(receive).send
                transfers.append(Transfer(send, source, record.rank, start, start, end, taken, float(num_bytes)))
        return transfers

    @cached_property
    def waits(self) -> tuple[WaitInterval, ...]:
        """Every period in which a rank waited, and what it waited for."""
        intervals = []
        for track, record in zip(self.tracks, self.records, strict=True):
            messages = list(record.rows("messages"))
            for message, start, end in record.rows("waits"):
                at, *coded, source = messages[message][:5]
                action = track.actions[at] if at < len(track.actions) else None
                intervals.append(
                    WaitInterval(record.rank, action, decoded(*coded), source, *self._both(record.rank, start, end))
                )
        return tuple(intervals)

    @cached_property
    def between(self) -> tuple[StepInterval, ...]:
        """What happened on each rank between the end of the previous step and this one; the rest is outside."""
        return tuple(
            StepInterval(record.rank, BETWEEN[kind], *self._both(record.rank, start, end))
            for record in self.records
            for kind, start, end in record.rows("between")
        )

    @cached_property
    def parts(self) -> tuple[StepParts, ...]:
        """Per rank, its step divided by what it did."""
        return tuple(summed_parts(record, partial(self.here, record.rank)) for record in self._corrected)

    @cached_property
    def accounts(self) -> tuple[list[Period], ...]:
        """Per rank, its step as pieces without gaps, each with what the rank did."""
        return tuple(account(record, partial(self.here, record.rank)) for record in self._corrected)

    @cached_property
    def causes(self) -> tuple[Idle, ...]:
        """Every idle interval with its cause, as measured by the ranks; they sum to `idle`."""
        ranks = enumerate(self.accounts)
        return tuple(idle for rank, pieces in ranks for idle in idle_intervals(self, rank, pieces, self.seconds))

    def measured_costs(self) -> Costs:
        """Return the median seconds of each stage and op, and bytes if they were weighed, ready for `simulate`.

        If a stage only ran B, its seconds are the backward_input, with a backward_weight of 0. If a backward ran its
        forward again, those seconds are `recompute` and not part of the backward.
        """
        seconds, sizes = self.median_seconds(), stage_bytes(self.program, self._weights) if self._weights else {}
        for stage, recomputes in enumerate(sizes.get("recompute", ())):
            if recomputes:
                less = seconds["backward_input"][stage] - seconds["forward"][stage]
                seconds["backward_input"][stage] = max(less, 0.0)
        return Costs(**seconds, **sizes, **slice_costs([self]))

    def median_seconds(self) -> dict[str, Any]:
        """Return the median forward, backward_input and backward_weight of every stage."""
        whole = self.program.num_slices
        seconds = {key: median(values) * whole for key, values in self.action_seconds().items()}
        return stage_costs(seconds, self.program.num_stages)


def slice_costs(steps: Sequence[Timeline]) -> dict[str, Any]:
    """Return the part of each slice in a microbatch's seconds, if there are slices: the same for all stages and ops.

    >>> from drumline.core.program import Program
    >>> slice_costs([Measured(Program.parse("0F0.0,0F0.1"), (Record(0, starts=[0, 5], ends=[1, 8]),))])
    {'slice_factor': [0.25, 0.75]}
    """
    num_slices = steps[0].program.num_slices
    if num_slices == 1:
        return {}
    seconds = [0.0] * num_slices
    for span in (span for step in steps for span in step.spans()):
        if span.action.is_compute and not span.action.parts and span.action.microbatch is not None:
            seconds[span.action.microbatch % num_slices] += span.end - span.start
    return {"slice_factor": [each / (sum(seconds) or 1.0) for each in seconds]}


def stage_costs(seconds: Mapping[tuple[int, Op], float], num_stages: int) -> dict[str, Any]:
    """Return forward, backward_input and backward_weight of every stage; an unsplit B counts as backward_input.

    >>> stage_costs({(0, Op.FORWARD): 1.0, (0, Op.BACKWARD): 2.0}, 1)
    {'forward': [1.0], 'backward_input': [2.0], 'backward_weight': [0.0]}
    """
    stages = range(num_stages)
    weight = [seconds.get((stage, Op.BACKWARD_WEIGHT), 0.0) for stage in stages]
    whole = [seconds.get((stage, Op.BACKWARD)) for stage in stages]
    split = [seconds.get((stage, Op.BACKWARD_INPUT)) for stage in stages]
    return {
        "forward": [seconds.get((stage, Op.FORWARD), 0.0) for stage in stages],
        "backward_input": [
            alone if alone is not None else max((full or 0.0) - later, 0.0)
            for alone, full, later in zip(split, whole, weight, strict=True)
        ],
        "backward_weight": weight,
    }
