"""From files to steps on one clock: which steps are complete, who sent to whom, and whether it is one run.

    rank0.json ──► recording ──► labelled actions ──► steps ─┐
    rank1.json ──► recording ──► labelled actions ──► steps ─┼─► complete on all ranks ──► one clock ──► timelines
    ...                                                      ┘

The traces are one run if every message has two ends, every rank's step is as long as its longest, and all ran together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import median_low

from drumline.core import rules
from drumline.core.action import TRANSFER_OPS, Action, Op
from drumline.core.errors import TraceError, counted
from drumline.core.program import Program
from drumline.core.units import duration, ms
from drumline.report.kineto.clocks import Alignment, align
from drumline.report.kineto.members import ONE_RUN, Member, check_recorded_together, crew_of, trace_files
from drumline.report.kineto.rank import RankStep, rank_step
from drumline.report.kineto.recording import RankTrace, read
from drumline.report.kineto.step_bounds import LABELS, HostStep, found_by, steps_of
from drumline.report.kineto.timeline import TracedStep
from drumline.schedules.registry import recipe_of


@dataclass(frozen=True, repr=False)
class Traces:
    """The traces of one pipeline: its complete steps, on one clock."""

    members: tuple[Member, ...]
    num_others: int  # other pipelines in the traces
    found_by: str
    alignment: Alignment
    steps: Mapping[int, TracedStep]
    incomplete: tuple[int, ...]
    by_flushes: bool = False  # whether only the empty pipeline separates steps

    def __repr__(self) -> str:
        return f"Traces(steps={list(self.steps)}, found_by={self.found_by!r})"

    def typical(self) -> int:
        """Return the number of the step with the median makespan; the faster one of two."""
        spans = {number: timeline.makespan for number, timeline in self.steps.items()}
        middle = median_low(spans.values())
        return next(number for number, makespan in spans.items() if makespan == middle)

    def step(self, number: int | None = None) -> TracedStep:
        """Return the timeline of a step; the typical one by default."""
        chosen = self.typical() if number is None else number
        if chosen not in self.steps:
            there = ", ".join(map(str, self.steps))
            cut = " is not complete in the traces" if chosen in self.incomplete else " is not in the traces"
            raise TraceError(f"step {chosen}{cut}", expected=f"one of the steps {there}")
        return self.steps[chosen]


def load(paths: Sequence[str | Path], *, progress: Callable[[str], None] | None = None) -> Traces:
    """Return the steps in the traces at `paths`, files or folders; one trace per rank of one pipeline.

    >>> load(["no-such-trace.json"])
    Traceback (most recent call last):
    drumline.core.errors.TraceError: cannot read no-such-trace.json: No such file or directory; ...
    """
    files = trace_files([Path(path) for path in paths])
    if not files:
        raise TraceError("no traces were given", expected="one trace per rank, or a folder of them")
    members, num_others = crew_of(files)
    recordings = []
    for member in members:
        if progress is not None:
            progress(f"reading {member.path}")
        recordings.append(read(member.path))
    check_recorded_together(members, [recording.bounds for recording in recordings])
    known_by = found_by(recordings)
    stretches, by_flushes = steps_of(recordings, known_by)
    complete, incomplete = _complete(_rank_steps(recordings, stretches), labelled=known_by in LABELS)
    _check_messages(members, next(iter(complete.values())))
    timelines = [_timeline(number, steps) for number, steps in complete.items()]
    alignment = _alignment(members, timelines)
    aligned = {timeline.step: replace(timeline, shifts=alignment.shifts) for timeline in timelines}
    for step in aligned.values():
        _check_together(members, step)
    return Traces(tuple(members), num_others, known_by, alignment, aligned, incomplete, by_flushes)


def _rank_steps(
    recordings: Sequence[RankTrace], stretches: Sequence[Mapping[int, HostStep]]
) -> list[dict[int, RankStep]]:
    """Return the steps of every rank, by number."""
    every = [action.action for steps in stretches for step in steps.values() for action in step.labelled]
    _check_numbers(every)
    num_stages = 1 + max((part.stage for action in every for part in action.work), default=-1)
    return [
        {number: rank_step(recording, step, num_stages) for number, step in steps.items()}
        for recording, steps in zip(recordings, stretches, strict=True)
    ]


def _check_numbers(actions: Sequence[Action]) -> None:
    """Reject labels with numbers that are too large for this many actions: tables of all stages would fill memory."""
    most = max(len(actions), _MOST_NUMBERED)
    for action in actions:
        for part in action.work:
            if part.stage >= most or (part.microbatch or 0) >= most:
                raise TraceError(
                    f"a label says {part}, but the traces have only {counted(len(actions), 'action')}",
                    expected="stages and microbatches numbered from 0",
                )


_MOST_NUMBERED = 10_000


def _complete(
    by_rank: Sequence[Mapping[int, RankStep]], *, labelled: bool
) -> tuple[dict[int, list[RankStep]], tuple[int, ...]]:
    """Return the steps that are complete on every rank, and the numbers of the others.

    A labelled step is complete if it is as long as the rank's longest one. Without labels every rank has one stage: a
    step is complete if all ranks have the same number of forwards and, unless nothing trains, of backwards.
    """
    longest = [max((len(step.order) for step in steps.values()), default=0) for steps in by_rank]
    trains = any(_counted(step)[1] for steps in by_rank for step in steps.values())
    numbers = sorted(set().union(*by_rank))
    complete = {}
    for number in numbers:
        ranks = [steps[number] for steps in by_rank if number in steps]
        counts = {_counted(rank) for rank in ranks}
        if labelled:
            whole = [len(rank.order) for rank in ranks] == longest
        else:
            whole = len(counts) == 1 and all(forwards == backwards or not trains for forwards, backwards in counts)
        if whole and len(ranks) == len(by_rank):
            complete[number] = ranks
    if not complete:
        had = "; ".join(f"rank {at}: {', '.join(map(str, steps)) or 'none'}" for at, steps in enumerate(by_rank))
        raise TraceError(
            f"no step is complete on every rank ({had})",
            expected="traces of one run that have a whole step in common",
            fix="record two steps or more with the profiler",
        )
    return complete, tuple(number for number in numbers if number not in complete)


def _counted(step: RankStep) -> tuple[int, int]:
    """Return how many forwards and backwards a step has."""
    forwards = sum(action.op is Op.FORWARD for action in step.order)
    return forwards, len(step.order) - forwards


def _check_messages(members: Sequence[Member], steps: Sequence[RankStep]) -> None:
    """Reject traces in which a labelled message has only one end: a trace is missing, or from another run."""
    there = {action for step in steps for action in step.order}
    for member, step in zip(members, steps, strict=True):
        for action in step.order:
            if action.op in TRANSFER_OPS:
                message = rules.message_of(action)
                other = message.recv if action == message.send else message.send
                if other not in there:
                    raise TraceError(
                        f"{action} of rank {member.rank} has no matching {other} in {counted(len(steps), 'trace')}",
                        expected=ONE_RUN,
                        fix="pass the traces of all ranks of the pipeline, and of no other run",
                    )


def _check_together(members: Sequence[Member], step: TracedStep) -> None:
    """Reject ranks whose steps with the same number did not run at the same time."""
    end, first = min((end, rank) for rank, (_, end) in enumerate(step.bounds))
    start, last = max((start, -rank) for rank, (start, _) in enumerate(step.bounds))
    if end < start:
        raise TraceError(
            f"step {step.step} of rank {members[first].rank} ends {duration((start - end) / 1e9)} before it begins"
            f" on rank {members[-last].rank}",
            expected=ONE_RUN,
        )


_named = lru_cache(maxsize=8)(recipe_of)  # all steps of a run have the same program


def _timeline(number: int, steps: Sequence[RankStep]) -> TracedStep:
    program = _named(Program.of([[execution.action for execution in step.ran] for step in steps], "trace"))
    ran = Program.of([step.order for step in steps], program.name)
    return TracedStep(program, ran, number, tuple(steps), shifts=(0,) * len(steps))


def _alignment(members: Sequence[Member], timelines: Sequence[TracedStep]) -> Alignment:
    """Return what to add to each rank's times; ranks of one host share a clock."""
    names = [member.host if member.host is not None else f"\0{rank}" for rank, member in enumerate(members)]
    clocks = {name: number for number, name in enumerate(dict.fromkeys(names))}
    messages = [
        (clocks[names[source]], clocks[names[target]], sent.begun, received.done)
        for timeline in timelines
        for source, target, sent, received in timeline.messages.values()
        if received.done is not None
    ]
    alignment = align(len(clocks), messages)
    of_rank = [clocks[name] for name in names]
    return Alignment(
        tuple(alignment.shifts[at] for at in of_rank),
        tuple(alignment.errors[index] for index in of_rank),
        alignment.contradiction,
    )


def described(traces: Traces) -> str:
    """Describe what is known about the ranks' clocks."""
    alignment, hosts = traces.alignment, {member.host for member in traces.members}
    if len(traces.members) == 1:
        return "one rank, one clock"
    if alignment.contradiction:
        return f"messages arrive up to {ms(alignment.contradiction / 1e9)} before they are sent: the clocks drift"
    if len(hosts) == 1 and None not in hosts:
        return "one host, one clock"
    worst, shift = max(alignment.errors), max(map(abs, alignment.shifts))
    right = f"accurate to {ms(worst / 1e9)}" if math.isfinite(worst) else "their remaining error is unknown"
    where = "hosts unknown" if None in hosts else counted(len(hosts), "host")
    if shift:
        return f"{where}; shifted by up to {ms(shift / 1e9)}, so that nothing arrives before it is sent; {right}"
    return f"{where}; no message contradicts them; {right}"
