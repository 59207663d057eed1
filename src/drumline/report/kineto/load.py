"""From files to steps on one clock: what is complete, who sent to whom, and whether it is one run at all.

    rank0.json ──► recording ──► labelled actions ──► steps ─┐
    rank1.json ──► recording ──► labelled actions ──► steps ─┼─► complete on all ranks ──► one clock ──► timelines
    ...                                                      ┘

A run is one run if every message has two ends, every rank's step is as long as its longest, and they ran together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

from drumline.core import rules
from drumline.core.action import TRANSFER_OPS, Action, Op
from drumline.core.errors import TraceError, counted
from drumline.core.program import Program
from drumline.report.kineto.actions import Labelled, numbered, numbered_on, spelled, unlabelled, until_the_end
from drumline.report.kineto.clocks import Alignment, align
from drumline.report.kineto.flushes import Stretch, cut, flush_counts
from drumline.report.kineto.members import ONE_RUN, Member, check_recorded_together, crew_of, trace_files
from drumline.report.kineto.rank import RankStep, rank_step
from drumline.report.kineto.recording import RankTrace, read
from drumline.report.kineto.timeline import Traced
from drumline.report.kineto.traces import Traces
from drumline.report.recipes import recipe_of


def load(paths: Sequence[str | Path], *, progress: Callable[[str], None] | None = None) -> Traces:
    """Return the steps that the traces at `paths`, files or folders, hold; one trace per rank of one pipeline.

    >>> load(["no-such-trace.json"])
    Traceback (most recent call last):
    drumline.core.errors.TraceError: no-such-trace.json cannot be read: No such file or directory; ...
    """
    files = trace_files([Path(path) for path in paths])
    if not files:
        raise TraceError("no trace given", expected="one trace per rank, or a folder of them")
    members, num_others = crew_of(files)
    recordings = []
    for member in members:
        if progress is not None:
            progress(f"reading {member.path}")
        recordings.append(read(member.path))
    check_recorded_together(members, [one.bounds for one in recordings])
    found_by = _found_by(recordings)
    stretches = _flushed(recordings) if _is_unmarked(recordings, found_by) else {}
    by_flushes = bool(stretches)
    if not by_flushes:
        stretches = {place: _stretches(one, place, found_by) for place, one in enumerate(recordings)}
    complete, incomplete = _complete(_rank_steps(recordings, stretches), labelled=found_by in (_SPELLED, _NUMBERED))
    _check_messages(members, next(iter(complete.values())))
    hosts = tuple(member.host for member in members)
    alignment = _alignment(hosts, [_timeline(number, steps) for number, steps in complete.items()])
    timelines = {}
    for number, steps in complete.items():
        on_one_clock = [one.shifted(by) for one, by in zip(steps, alignment.shifts, strict=True)]
        _check_together(members, number, on_one_clock)
        timelines[number] = _timeline(number, on_one_clock)
    paths_read, ranks = tuple(one.path for one in members), tuple(one.rank for one in members)
    return Traces(paths_read, ranks, num_others, found_by, hosts, alignment, timelines, incomplete, by_flushes)


_SPELLED, _NUMBERED = "labels PP:", "labels Forward and Backward"
_FRAMES, _LINKS = "Python frames", "autograd's links"


def _found_by(recordings: Sequence[RankTrace]) -> str:
    """Return by what the actions of these traces are known; ranks without labels need not agree about frames."""
    kinds = {}
    for one in recordings:
        kind = _kind(one)
        if kind is None:
            names = [mark.name for mark in one.others][:3]
            raise TraceError(
                f"{one.path}: no pipeline in it: neither labels like PP:0F0 or Forward 0, nor forwards that autograd "
                "links to backwards between sends and receives"
                + (f"; its labels are {', '.join(names)}" if names else ""),
                expected="a trace of torch.distributed.pipelining or torchtitan that covers a step",
                fix="call schedule.step() while the profiler records, on every rank",
            )
        if one.calls and not one.has_device and all(call.done is None for call in one.calls):
            raise TraceError(
                f"{one.path}: its sends and receives are a device's, and no device was recorded",
                expected="a trace with the kernels of the device that computes: the host only launches them",
                fix="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], or with none given",
            )
        kinds[one.path] = kind
    if (found := set(kinds.values())) == {_FRAMES, _LINKS}:
        return _FRAMES
    if len(found) > 1:
        said = "; ".join(f"{path}: {kind}" for path, kind in kinds.items())
        raise TraceError(f"the ranks' actions are known by different signs ({said})", expected=ONE_RUN)
    return found.pop()


def _kind(recording: RankTrace) -> str | None:
    if spelled(recording.actions):
        return _SPELLED
    if recording.actions:
        return _NUMBERED
    if recording.frames:
        return _FRAMES
    return _LINKS if recording.calls and len(recording.links.pairs) else None


def _stretches(recording: RankTrace, place: int, found_by: str) -> dict[int, Stretch]:
    """Return the steps of a rank by number: the profiler's, or where it has none one for each turn of the schedule."""
    bounds = {int(mark.name.partition("#")[2]): (mark.start, mark.end) for mark in recording.steps}
    if not bounds:
        starts = _turns(recording) if found_by in (_SPELLED, _NUMBERED) else [recording.bounds[0]]
        bounds = dict(enumerate(pairwise([*starts, recording.bounds[1] + 1])))
    found = {}
    for number, (start, end) in bounds.items():
        labelled = numbered_on(_labelled(recording, place, found_by, start, end))
        if any(one.action.is_compute for one in labelled):
            found[number] = Stretch(labelled, start, end)
    return found


def _is_unmarked(recordings: Sequence[RankTrace], found_by: str) -> bool:
    """Whether nothing in the traces tells one step from the next."""
    return found_by in (_FRAMES, _LINKS) and not any(one.steps for one in recordings)


def _flushed(recordings: Sequence[RankTrace]) -> dict[int, dict[int, Stretch]]:
    """Return the steps of every rank by where the pipeline is empty; nothing where it never is."""
    rows = [until_the_end(recording, place) for place, recording in enumerate(recordings)]
    counts = flush_counts(rows)
    if not counts:
        return {}
    return {
        place: cut(row, counts, recording.calls, recording.bounds)
        for place, (recording, row) in enumerate(zip(recordings, rows, strict=True))
    }


def _turns(recording: RankTrace) -> list[int]:
    """Return when each turn of the schedule begins: with the first label that it repeats."""
    seen: Counter[str] = Counter()
    starts: list[int] = []
    for mark in recording.actions:
        if seen[mark.name] == len(starts):
            starts.append(mark.start)
        seen[mark.name] += 1
    return starts


def _labelled(recording: RankTrace, place: int, found_by: str, start: int, end: int) -> list[Labelled]:
    if found_by in (_FRAMES, _LINKS):
        return unlabelled(recording, place, start, end)
    inside = [mark for mark in recording.actions if start <= mark.start < end]
    return spelled(inside) if found_by == _SPELLED else numbered(inside, place)


def _rank_steps(
    recordings: Sequence[RankTrace], stretches: Mapping[int, Mapping[int, Stretch]]
) -> list[dict[int, RankStep]]:
    """Return the steps of every rank, by number."""
    every = [one.action for steps in stretches.values() for step in steps.values() for one in step.labelled]
    _check_numbers(every)
    num_stages = 1 + max((part.stage for action in every for part in action.work), default=-1)
    return [
        {
            number: rank_step(recording, labelled, num_stages, start=start, end=end)
            for number, (labelled, start, end) in steps.items()
        }
        for recording, steps in zip(recordings, stretches.values(), strict=True)
    ]


def _check_numbers(actions: Sequence[Action]) -> None:
    """Refuse labels with numbers that no run of so many actions has: tables of all stages would fill memory."""
    most = max(len(actions), _MOST_NUMBERED)
    for action in actions:
        for part in action.work:
            if part.stage >= most or (part.microbatch or 0) >= most:
                raise TraceError(
                    f"a label says {part}, in traces of {counted(len(actions), 'action')}",
                    expected="stages and microbatches numbered from 0",
                )


_MOST_NUMBERED = 10_000


def _complete(
    by_rank: Sequence[Mapping[int, RankStep]], *, labelled: bool
) -> tuple[dict[int, list[RankStep]], tuple[int, ...]]:
    """Return the steps that every rank has whole, and the numbers of the others.

    A labelled step is whole if it is as long as the rank's longest one. Without labels every rank has one stage: a step
    is whole if all of them have as many microbatches, each forwards and, unless nothing is trained, backwards.
    """
    longest = [max((len(one.order) for one in steps.values()), default=0) for steps in by_rank]
    trains = any(_counted(one)[1] for steps in by_rank for one in steps.values())
    numbers = sorted(set().union(*by_rank))
    complete = {}
    for number in numbers:
        ranks = [steps[number] for steps in by_rank if number in steps]
        counts = {_counted(one) for one in ranks}
        if labelled:
            whole = [len(one.order) for one in ranks] == longest
        else:
            whole = len(counts) == 1 and all(forwards == backwards or not trains for forwards, backwards in counts)
        if whole and len(ranks) == len(by_rank):
            complete[number] = ranks
    if not complete:
        had = "; ".join(f"rank {at}: {', '.join(map(str, steps)) or 'none'}" for at, steps in enumerate(by_rank))
        raise TraceError(
            f"no step is complete on every rank ({had})",
            expected="traces of one run that have a whole step in common",
            fix="let the profiler record two steps or more",
        )
    return complete, tuple(number for number in numbers if number not in complete)


def _counted(step: RankStep) -> tuple[int, int]:
    """Return how many forwards and backwards a step has."""
    forwards = sum(action.op is Op.FORWARD for action in step.order)
    return forwards, len(step.order) - forwards


def _check_messages(members: Sequence[Member], steps: Sequence[RankStep]) -> None:
    """Refuse traces in which a labelled message has only one end: a rank's trace is missing, or of another run."""
    there = {action for step in steps for action in step.order}
    for member, step in zip(members, steps, strict=True):
        for action in step.order:
            if action.op in TRANSFER_OPS:
                message = rules.message_of(action)
                other = message.recv if action == message.send else message.send
                if other not in there:
                    raise TraceError(
                        f"{action} of rank {member.rank} meets no {other} in {counted(len(steps), 'trace')}",
                        expected=ONE_RUN,
                        fix="give the traces of all ranks of the pipeline, and of no other run",
                    )


def _check_together(members: Sequence[Member], number: int, steps: Sequence[RankStep]) -> None:
    """Refuse ranks whose steps of one number did not run at the same time."""
    first = min(range(len(steps)), key=lambda rank: steps[rank].end)
    last = max(range(len(steps)), key=lambda rank: steps[rank].start)
    if steps[first].end < steps[last].start:
        apart = (steps[last].start - steps[first].end) / 1e9
        raise TraceError(
            f"step {number} of rank {members[first].rank} ends {apart:.3g} s before it begins on rank "
            f"{members[last].rank}",
            expected=ONE_RUN,
        )


_named = lru_cache(maxsize=8)(recipe_of)  # the steps of a run have one program


def _timeline(number: int, steps: Sequence[RankStep]) -> Traced:
    program = _named(Program.of([[one.action for one in step.ran] for step in steps], "trace"))
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
