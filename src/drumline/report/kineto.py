"""Somebody else's run, as the same timeline: traces of PyTorch's profiler, one per rank, put together.

    rank0.json ──► recording ──► labelled actions ──► steps ─┐
    rank1.json ──► recording ──► labelled actions ──► steps ─┼─► one clock ──► Traced, a Timeline, of one step
    ...                                                      ┘

Nothing of ours runs while they are recorded. What a trace cannot tell is not guessed: time that nothing in it explains
is called unexplained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import NamedTuple

from drumline.core import rules
from drumline.core.action import Action
from drumline.core.costs import Costs
from drumline.core.errors import TraceError, counted
from drumline.core.idle import Idle
from drumline.core.memory import Holding, holdings
from drumline.core.program import Program
from drumline.core.timeline import Timeline, Track, Transfer
from drumline.report.kineto_clocks import Alignment, align
from drumline.report.kineto_idle import causes
from drumline.report.kineto_labels import Labelled, numbered, numbered_on, spelled
from drumline.report.kineto_members import Crew, crew_of, trace_files
from drumline.report.kineto_rank import Half, RankStep, rank_step
from drumline.report.kineto_recording import Recording, read
from drumline.report.kineto_unlabelled import unlabelled
from drumline.report.recipes import recipe_of

NANO = 1e-9


@dataclass(frozen=True, eq=False, repr=False)
class Traced(Timeline):
    """The timeline of one recorded step, in seconds from its first action.

    `program` is the compute that ran, `ran` the same with all that was labelled: messages, parameters, gradients.
    """

    ran: Program
    step: int
    ranks: tuple[RankStep, ...]

    @cached_property
    def zero(self) -> int:
        """The nanosecond, by the common clock, at which the first action started."""
        return min(one.ran[0].start for one in self.ranks)

    def seconds(self, moment: int) -> float:
        """Return a moment of the common clock in seconds of this timeline."""
        return (moment - self.zero) * NANO

    @cached_property
    def tracks(self) -> Sequence[Track]:
        """Every rank's actions."""
        return [
            Track(
                tuple(one.action for one in rank.ran),
                [self.seconds(one.start) for one in rank.ran],
                [self.seconds(one.end) for one in rank.ran],
            )
            for rank in self.ranks
        ]

    @cached_property
    def memory(self) -> Sequence[Holding]:
        """Per rank, the pairs it holds after each start and end, as the rows say; a trace knows no bytes."""
        return holdings(self.program, Costs())

    @property
    def step_seconds(self) -> float:
        """From the first rank's begin of the step to the last one's end: the optimizer and all else included."""
        return (max(one.end for one in self.ranks) - min(one.start for one in self.ranks)) * NANO

    @property
    def kernel_seconds(self) -> tuple[float, ...] | None:
        """Per rank, how long kernels ran within its actions; None without a device."""
        if not all(one.has_device for one in self.ranks):
            return None
        return tuple(sum(one.kernel_ns for one in rank.ran) * NANO for rank in self.ranks)

    @cached_property
    def causes(self) -> tuple[Idle, ...]:
        """Every idle interval with its cause; they sum to `idle`."""
        return tuple(causes(self))

    @cached_property
    def messages(self) -> Mapping[Action, tuple[int, int, Half, Half]]:
        """By their sends: source and target rank of every message, and its two ends."""
        receives = {action: (rank, half) for rank, one in enumerate(self.ranks) for action, half in one.halves.items()}
        found = {}
        for source, one in enumerate(self.ranks):
            for send, half in one.halves.items():
                message = rules.message_of(send)
                if message.send == send and message.recv in receives:
                    target, other = receives[message.recv]
                    found[send] = (source, target, half, other)
        return found

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """The messages between ranks: on their way once both ends could move them."""
        found = []
        for send, (source, target, sent, received) in self.messages.items():
            made, taken = self._made(send), self._taken(send)
            if made is None or taken is None:
                continue
            end = taken if received.done is None else min(max(self.seconds(received.done), made), max(taken, made))
            start = min(max(made, self.seconds(max(sent.begun, received.begun))), end)
            size = sent.num_bytes if sent.num_bytes is not None else received.num_bytes
            found.append(Transfer(send, source, target, made, start, end, max(taken, end), size or 0.0))
        return sorted(found, key=lambda one: (one.source, one.start))

    def _made(self, send: Action) -> float | None:
        """Return when what `send` carries was made."""
        places = (self.located.get(one[:3]) for one in rules.producers(send))
        return next((self.tracks[rank].ends[at] for rank, at in filter(None, places)), None)

    def _taken(self, send: Action) -> float | None:
        """Return when what `send` carries was taken up."""
        places = (self.located.get(one[:3]) for one in rules.consumers(rules.message_of(send).recv))
        return next((self.tracks[rank].starts[at] for rank, at in filter(None, places)), None)


@dataclass(frozen=True)
class Traces:
    """The traces of one pipeline: its complete steps, on one clock."""

    crew: Crew
    found_by: str
    hosts: tuple[str | None, ...]
    alignment: Alignment
    steps: Mapping[int, Traced]
    incomplete: tuple[int, ...]

    def typical(self) -> int:
        """Return the number of the step with the median makespan; of two the faster one."""
        spans = {number: timeline.makespan for number, timeline in self.steps.items()}
        middle = median_low(spans.values())
        return next(number for number, makespan in spans.items() if makespan == middle)

    def step(self, number: int | None = None) -> Traced:
        """Return the timeline of a step: the one asked for, or the typical one."""
        chosen = self.typical() if number is None else number
        if chosen not in self.steps:
            there = ", ".join(map(str, self.steps))
            cut = " is not complete in the traces" if chosen in self.incomplete else " is not in the traces"
            raise TraceError(f"step {chosen}{cut}", expected=f"one of the steps {there}")
        return self.steps[chosen]


def load(paths: Sequence[str | Path], *, progress: Callable[[str], None] | None = None) -> Traces:
    """Return the steps that the traces at `paths`, files or folders, hold; one trace per rank of one pipeline.

    >>> load(["no-such-trace.json"])
    Traceback (most recent call last):
    drumline.core.errors.TraceError: no-such-trace.json: No such file or directory; ...
    """
    files = trace_files([Path(path) for path in paths])
    recordings = []
    for file in files:
        if progress is not None:
            progress(f"reading {file}")
        recordings.append(read(file))
    if not recordings:
        raise TraceError("no trace given", expected="one trace per rank, or a folder of them")
    crew = crew_of(recordings)
    found_by = _found_by(crew)
    by_rank = _rank_steps(crew, found_by)
    complete, incomplete = _complete(by_rank)
    if not complete:
        pairs = zip(crew.members, by_rank, strict=True)
        numbers = "; ".join(f"rank {one.rank}: {', '.join(map(str, steps)) or 'none'}" for one, steps in pairs)
        raise TraceError(
            f"no step is complete on every rank ({numbers})",
            expected="traces of one run that have a whole step in common",
            fix="let the profiler record two steps or more",
        )
    hosts = tuple(member.host for member in crew.members)
    alignment = _alignment(hosts, [_timeline(number, steps) for number, steps in complete.items()])
    timelines = {
        number: _timeline(number, [one.shifted(by) for one, by in zip(steps, alignment.shifts, strict=True)])
        for number, steps in complete.items()
    }
    return Traces(crew, found_by, hosts, alignment, timelines, incomplete)


def _found_by(crew: Crew) -> str:
    """Return by what the actions of these traces are known; the same on all ranks."""
    kinds = {member.rank: _kind(member.recording) for member in crew.members}
    if None in kinds.values():
        member = next(one for one in crew.members if kinds[one.rank] is None)
        names = [mark.name for mark in member.recording.others][:3]
        raise TraceError(
            f"{member.recording.path}: no pipeline in it: neither labels like PP:0F0 or Forward 0, nor forwards that "
            f"autograd links to backwards between sends and receives"
            + (f"; its labels are {', '.join(names)}" if names else ""),
            expected="a trace of torch.distributed.pipelining or torchtitan that covers a step",
            fix="call schedule.step() while the profiler records, on every rank",
        )
    if len(set(kinds.values())) > 1:
        said = "; ".join(f"rank {rank}: {kind}" for rank, kind in kinds.items())
        raise TraceError(f"the ranks ran different kinds of schedules ({said})", expected="traces of one run")
    return str(kinds[crew.members[0].rank])


_SPELLED, _NUMBERED, _FRAMES, _LINKS = "labels PP:", "labels Forward and Backward", "Python frames", "autograd's links"


def _kind(recording: Recording) -> str | None:
    if spelled(recording.actions):
        return _SPELLED
    if recording.actions:
        return _NUMBERED
    if recording.frames:
        return _FRAMES
    return _LINKS if recording.calls and len(recording.links.pairs) else None


class _Stretch(NamedTuple):
    """A step of one rank as the host saw it: its actions, from when to when."""

    labelled: list[Labelled]
    start: int
    end: int


def _stretches(recording: Recording, place: int, found_by: str) -> dict[int, _Stretch]:
    """Return the steps of a rank by number: the profiler's, or where it has none one for each turn of the schedule."""
    bounds = {int(mark.name.partition("#")[2]): (mark.start, mark.end) for mark in recording.steps}
    if not bounds:
        starts = _turns(recording) if found_by in (_SPELLED, _NUMBERED) else [recording.bounds[0]]
        bounds = dict(enumerate(pairwise([*starts, recording.bounds[1] + 1])))
    found = {}
    for number, (start, end) in bounds.items():
        labelled = numbered_on(_labelled(recording, place, found_by, start, end))
        if any(one.action.is_compute for one in labelled):
            found[number] = _Stretch(labelled, start, end)
    return found


def _turns(recording: Recording) -> list[int]:
    """Return when each turn of the schedule begins: with the first label that it repeats."""
    seen: Counter[str] = Counter()
    starts: list[int] = []
    for mark in recording.actions:
        if seen[mark.name] == len(starts):
            starts.append(mark.start)
        seen[mark.name] += 1
    return starts


def _labelled(recording: Recording, place: int, found_by: str, start: int, end: int) -> list[Labelled]:
    if found_by in (_FRAMES, _LINKS):
        return unlabelled(recording, place, start, end)
    inside = [mark for mark in recording.actions if start <= mark.start < end]
    return spelled(inside) if found_by == _SPELLED else numbered(inside, place)


def _rank_steps(crew: Crew, found_by: str) -> list[dict[int, RankStep]]:
    """Return the steps of every rank, by number."""
    members = [one.recording for one in crew.members]
    stretches = [_stretches(recording, place, found_by) for place, recording in enumerate(members)]
    every = (one.action for steps in stretches for step in steps.values() for one in step.labelled)
    num_stages = 1 + max((part.stage for action in every for part in action.work), default=-1)
    return [
        {
            number: rank_step(recording, labelled, num_stages, start=start, end=end)
            for number, (labelled, start, end) in steps.items()
        }
        for recording, steps in zip(members, stretches, strict=True)
    ]


def _complete(by_rank: Sequence[Mapping[int, RankStep]]) -> tuple[dict[int, list[RankStep]], tuple[int, ...]]:
    """Return the steps that every rank has as long as its longest one, and the numbers of the others."""
    longest = [max((len(one.order) for one in steps.values()), default=0) for steps in by_rank]
    numbers = sorted(set().union(*by_rank))
    complete = {
        number: [steps[number] for steps in by_rank]
        for number in numbers
        if all(
            number in steps and len(steps[number].order) == most for steps, most in zip(by_rank, longest, strict=True)
        )
    }
    return complete, tuple(number for number in numbers if number not in complete)


def _timeline(number: int, steps: Sequence[RankStep]) -> Traced:
    program = recipe_of(Program.of([[one.action for one in step.ran] for step in steps], "trace"))
    ran = Program.of([step.order for step in steps], program.name)
    return Traced(program, ran, number, tuple(steps))


def _alignment(hosts: Sequence[str | None], timelines: Sequence[Traced]) -> Alignment:
    """Return what to add to each rank's times; ranks of one host share a clock."""
    names = [host if host is not None else f"\0{rank}" for rank, host in enumerate(hosts)]
    clocks = {name: number for number, name in enumerate(dict.fromkeys(names))}
    messages = [
        (clocks[names[source]], clocks[names[target]], sent.begun, received.done)
        for timeline in timelines
        for source, target, sent, received in timeline.messages.values()
        if received.done is not None
    ]
    found = align(len(clocks), messages)
    of_rank = [clocks[name] for name in names]
    return Alignment(
        tuple(found.shifts[one] for one in of_rank), tuple(found.errors[one] for one in of_rank), found.contradiction
    )


def described(traces: Traces) -> str:
    """Return what is known of the ranks' clocks, in words."""
    alignment, hosts = traces.alignment, set(traces.hosts)
    if len(traces.hosts) == 1:
        return "one rank, one clock"
    if alignment.contradiction:
        return f"messages arrive up to {alignment.contradiction / 1e6:.3g} ms before they are sent: the clocks drift"
    worst = max(alignment.errors)
    known = f"known to {worst / 1e6:.3g} ms" if worst != float("inf") else "by how much they are off cannot be known"
    if len(hosts) == 1 and None not in hosts:
        return "one host, one clock"
    shift = max(map(abs, alignment.shifts))
    where = "hosts unknown" if None in hosts else counted(len(hosts), "host")
    if shift:
        return f"{where}; clocks moved by up to {shift / 1e6:.3g} ms so that nothing arrives before it is sent, {known}"
    return f"{where}; the clocks contradict no message, {known}"
