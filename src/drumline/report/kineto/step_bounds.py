"""Where one step ends and the next begins: at the profiler's marks, or at each turn of a labelled schedule.

If neither the profiler nor labels show it, a step ends where the pipeline is empty:

    rank 0   F F B F B F B B │ F F B B          a step ends once every rank has run as many backwards as forwards,
    rank 1     F B F B F B F B │ F B F B        and all ranks the same number: here after 4, and after 6

The last rank is empty after every backward, so one rank alone is not enough. Between two steps, sends belong to the
earlier one; the first receive, or else the next action, begins the later one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.errors import TraceError
from drumline.core.memory import holdings
from drumline.core.program import Program
from drumline.report.kineto.actions import LabelledAction, numbered, numbered_on, spelled, unlabelled, until_the_end
from drumline.report.kineto.calls import MessageEnd
from drumline.report.kineto.members import ONE_RUN
from drumline.report.kineto.recording import RankTrace

_SPELLED, _NUMBERED = LABELS = ("labels PP:", "labels Forward and Backward")
_FRAMES, _LINKS = "Python frames", "autograd's links"


class HostStep(NamedTuple):
    """A step of one rank as the host saw it: its actions and interval."""

    labelled: list[LabelledAction]
    start: int
    end: int


def found_by(recordings: Sequence[RankTrace]) -> str:
    """Return how the actions of these traces are identified; ranks without labels need not agree about frames."""
    kinds = {}
    for recording in recordings:
        kind = _kind(recording)
        if kind is None:
            names = [mark.name for mark in recording.others][:3]
            raise TraceError(
                f"{recording.path} contains no pipeline: neither labels like PP:0F0 or Forward 0, nor forwards that "
                "autograd links to backwards between sends and receives"
                + (f"; its labels are {', '.join(names)}" if names else ""),
                expected="a trace of torch.distributed.pipelining or torchtitan that covers a step",
                fix="call schedule.step() while the profiler records, on every rank",
            )
        if recording.calls and not recording.has_device and all(call.done is None for call in recording.calls):
            raise TraceError(
                f"{recording.path} has sends and receives of a device, but no device was recorded",
                expected="a trace with the kernels of the device that computes, because the host only launches them",
                fix="profile with activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], or without activities=",
            )
        kinds[recording.path] = kind
    if (kinds_found := set(kinds.values())) == {_FRAMES, _LINKS}:
        return _FRAMES
    if len(kinds_found) > 1:
        said = "; ".join(f"{path}: {kind}" for path, kind in kinds.items())
        raise TraceError(f"the ranks' actions are identified in different ways ({said})", expected=ONE_RUN)
    return kinds_found.pop()


def _kind(recording: RankTrace) -> str | None:
    if spelled(recording.actions):
        return _SPELLED
    if recording.actions:
        return _NUMBERED
    if recording.frames:
        return _FRAMES
    return _LINKS if recording.calls and len(recording.links.pairs) else None


def steps_of(recordings: Sequence[RankTrace], known_by: str) -> tuple[list[dict[int, HostStep]], bool]:
    """Return the steps of every rank by number, and whether only the empty pipeline separates them."""
    if known_by not in LABELS and not any(recording.steps for recording in recordings):
        rows = [until_the_end(recording, place) for place, recording in enumerate(recordings)]
        counts = sorted(set.intersection(*map(_empty_after, rows)))
        if counts:
            return [_cut(row, counts, r.calls, r.bounds) for row, r in zip(rows, recordings, strict=True)], True
    return [_marked(recording, place, known_by) for place, recording in enumerate(recordings)], False


def _marked(recording: RankTrace, place: int, known_by: str) -> dict[int, HostStep]:
    """Return the steps of a rank by number: the profiler's, or else one per turn of the schedule."""
    bounds = {int(mark.name.partition("#")[2]): (mark.start, mark.end) for mark in recording.steps}
    if not bounds:
        starts = _turns(recording) if known_by in LABELS else [recording.bounds[0]]
        bounds = dict(enumerate(pairwise([*starts, recording.bounds[1] + 1])))
    marks = {}
    for number, (start, end) in bounds.items():
        labelled = numbered_on(_labelled(recording, place, known_by, start, end))
        if any(action.action.is_compute for action in labelled):
            marks[number] = HostStep(labelled, start, end)
    return marks


def _turns(recording: RankTrace) -> list[int]:
    """Return when each turn of the schedule begins: at the first label that repeats."""
    seen_counts: Counter[str] = Counter()
    starts: list[int] = []
    for mark in recording.actions:
        if seen_counts[mark.name] == len(starts):
            starts.append(mark.start)
        seen_counts[mark.name] += 1
    return starts


def _labelled(recording: RankTrace, place: int, known_by: str, start: int, end: int) -> list[LabelledAction]:
    if known_by not in LABELS:
        return unlabelled(recording, place, start, end)
    inside = [mark for mark in recording.actions if start <= mark.start < end]
    return spelled(inside) if known_by == _SPELLED else numbered(inside, place)


def _empty_after(row: Sequence[LabelledAction]) -> set[int]:
    """Return after how many microbatches a rank had run every backward; `row` holds its forwards and backwards."""
    num_held, done, empty = 0, 0, set[int]()
    for action in row:
        forward = action.action.op is Op.FORWARD
        num_held, done = num_held + (1 if forward else -1), done + (not forward)
        if num_held == 0:
            empty.add(done)
    return empty


def _cut(
    row: Sequence[LabelledAction], counts: Sequence[int], calls: Sequence[MessageEnd], bounds: tuple[int, int]
) -> dict[int, HostStep]:
    """Return a rank's steps, with microbatches renumbered in each; after the last flush there may be a partial one."""
    receives = sorted(call.start for call in calls if not call.sends)
    steps: dict[int, HostStep] = {}
    first, start, last = 0, bounds[0], bounds[1] + 1
    for number, (before, count) in enumerate(pairwise([0, *counts, len(row)])):
        behind = 2 * count if number < len(counts) else len(row)
        if first == behind:
            break
        after = [row[behind].start] if behind < len(row) else []
        after += receives[bisect_left(receives, row[behind - 1].end) :][:1]
        end = min([*after, last])
        step = [action._replace(action=action.action.later(-before)) for action in row[first:behind]]
        steps[number] = HostStep(step, start, end)
        first, start = behind, end
    return steps


def num_flushes(program: Program) -> int:
    r"""Return how often all ranks hold nothing at the same point of their rows, including the end.

    >>> once, twice = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1", "0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1"
    >>> num_flushes(Program.parse(once)), num_flushes(Program.parse(twice))
    (1, 2)
    """
    if not program.has_backward:
        return 1
    flushes = []
    for row, holding in zip(program.rows, holdings(program, Costs()), strict=True):
        started = [sum(part.op is Op.FORWARD for part in action.work) for action in row if action.is_compute]
        total, done, empty = sum(started), 0, set[Fraction]()
        for forwards, (_, after) in zip(started, holding.pairs, strict=True):
            done += forwards
            if after == 0 and total:
                empty.add(Fraction(done, total))
        flushes.append(empty)
    return max(len(set.intersection(*flushes)), 1)
