"""Find which action each interval of the host's time was.

    written by                                     label                            says
    schedules of several stages, from torch 2.9    PP:2F0, PP:(0F5;1B2)OVERLAP_F_B  stage, op and microbatch
    ScheduleGPipe                                  Forward 3, Backward 3            op, microbatch of the rank's stage
    Schedule1F1B                                   none                             see below

A step may run its schedule several times (gradient accumulation); then microbatch numbers continue.

Schedule1F1B has one stage on every rank. If Python's frames were recorded (with_stack), they name each forward and
backward of a microbatch. If not, every trace still contains autograd's own links, from each forward op to its step in a
backward.

    ops of rank 0    f f f  s  f f f  s r  b b b  f f f  s r  b b b ...    f: forward op with a backward, b: that
                     └ F0 ┘    └ F1 ┘      └ B0 ┘ └ F2 ┘      └ B1 ┘       s, r: a message is sent, received

A run of one kind, without a message in between, belongs to one microbatch. This is verified: every link must lead from
the n-th forward to the n-th backward; otherwise the trace is rejected.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from drumline.core.action import Action, Op
from drumline.core.errors import ProgramError, TraceError
from drumline.core.graph import Ints
from drumline.report.kineto.calls import MessageEnd
from drumline.report.kineto.recording import Mark, RankTrace

Stretches = list[tuple[int, int]]  # (start, end)

_NUMBERED = re.compile(r"(Forward|Backward) (\d{1,9})")
_OPS = {"Forward": Op.FORWARD, "Backward": Op.BACKWARD}
_EXPECTED = "a schedule whose actions are labelled, or PyTorch's Schedule1F1B with one stage on every rank"
_FIX = (
    "record with PyTorch 2.9 or newer, which labels schedules of several stages on a rank, or label the actions of a "
    'pipeline of your own: with record_function("PP:0F0")'
)


class LabelledAction(NamedTuple):
    """An action, and the interval in which the host was in it."""

    action: Action
    start: int
    end: int


def spelled(marks: Iterable[Mark]) -> list[LabelledAction]:
    """Return the actions in full labels; other text after PP: is not an action.

    >>> spelled([Mark("PP:2F0", 0, 5), Mark("PP:warmup", 5, 6)])
    [LabelledAction(action=2F0, start=0, end=5)]
    """
    actions = []
    for name, start, end in marks:
        if name.startswith("PP:"):
            try:
                actions.append(LabelledAction(Action.parse(name.removeprefix("PP:")), start, end))
            except ProgramError:
                continue
    return actions


def numbered(marks: Iterable[Mark], stage: int) -> list[LabelledAction]:
    """Return the actions of labels with only op and microbatch; `stage` is the rank's one stage.

    >>> numbered([Mark("Backward 3", 0, 5)], stage=1)
    [LabelledAction(action=1B3, start=0, end=5)]
    """
    matches = ((_NUMBERED.fullmatch(name), start, end) for name, start, end in marks)
    return [
        LabelledAction(Action(stage, _OPS[match[1]], int(match[2])), start, end)
        for match, start, end in matches
        if match
    ]


def numbered_on(labelled: Sequence[LabelledAction]) -> list[LabelledAction]:
    """Return the same with continued microbatch numbers if a step runs its schedule more than once.

    >>> twice = [LabelledAction(Action.parse(text), at, at + 1) for at, text in enumerate(["0F0", "0B0", "0F0", "0B0"])]
    >>> [value.action for value in numbered_on(twice)]
    [0F0, 0B0, 0F1, 0B1]
    """
    parts = (part.microbatch for action in labelled for part in action.action.work)
    count = 1 + max((number for number in parts if number is not None), default=-1)
    seen_counts: Counter[Action] = Counter()
    actions = []
    for action in labelled:
        actions.append(action._replace(action=action.action.later(seen_counts[action.action] * count)))
        seen_counts[action.action] += 1
    return actions


def unlabelled(recording: RankTrace, stage: int, start: int, end: int) -> list[LabelledAction]:
    """Return the forwards and backwards that a rank with only the stage `stage` ran from `start` to `end`."""
    forwards, backwards = _intervals(recording, start, end)
    if backwards and len(forwards) != len(backwards):
        error = f"{recording.path} has {len(forwards)} forwards and {len(backwards)} backwards, but no labels"
        raise TraceError(error, expected=_EXPECTED, fix=_FIX)
    return _in_order(recording, stage, forwards, backwards)


def until_the_end(recording: RankTrace, stage: int) -> list[LabelledAction]:
    """Return the same for a whole trace, which may end within a step; for stage 0, also unfinished forwards."""
    start, end = recording.bounds
    forwards, backwards = _intervals(recording, start, end + 1)
    if stage == 0 and not recording.frames:
        forwards = [*forwards, *_under_way(recording)]
    return _in_order(recording, stage, forwards, backwards)


def _under_way(recording: RankTrace) -> Stretches:
    """Return the forwards after the last one with a link: each is a run of ops followed by a send.

    The trace ended before their backwards, so autograd has no link for them. The first stage sends only what its
    forwards made; on others a send may follow a backward.
    """
    links = recording.links
    linked = links.forward[np.isin(links.forward[:, 0], links.pairs[:, 0])]
    after = int(linked[:, 0].max(initial=0))
    ops = links.forward[(links.forward[:, 0] > after) & ~_covered(links.forward[:, 0], links.backward)]
    runs = _runs(ops, links.backward, [call for call in recording.calls if call.start > after])
    sends = [at for at, (_, _, kind) in enumerate(runs) if kind == "s"]
    # The first send follows the last forward with a link, whose own last ops may have none.
    return [runs[at - 1][:2] for at in sends[1:] if runs[at - 1][2] == "F"]


def _in_order(recording: RankTrace, stage: int, forwards: Stretches, backwards: Stretches) -> list[LabelledAction]:
    """Return forwards and backwards as actions in order; reject a trace whose links contradict this."""
    _check_links(recording, forwards, backwards)
    actions = [
        LabelledAction(Action(stage, op, number), *stretch)
        for op, stretches in ((Op.FORWARD, forwards), (Op.BACKWARD, backwards))
        for number, stretch in enumerate(stretches)
    ]
    return sorted(actions, key=lambda action: action.start)


def _intervals(recording: RankTrace, start: int, end: int) -> tuple[Stretches, Stretches]:
    """Return the intervals of forwards and backwards; reject a trace that begins with a backward."""
    forwards, backwards = _sought(recording, start, end)
    if backwards and (not forwards or backwards[0] < forwards[0]):
        raise TraceError(
            f"{recording.path} begins in the middle of a step: its first backward comes before any forward",
            expected="a trace that begins between two steps",
            fix="start the profiler before schedule.step(), or call its step() after every step",
        )
    return forwards, backwards


def _sought(recording: RankTrace, start: int, end: int) -> tuple[Stretches, Stretches]:
    frames = [mark for mark in recording.frames if start <= mark.start < end]
    if frames:
        if any("backward_weight" in mark.name for mark in frames):
            raise TraceError(f"{recording.path} has split backwards without labels", expected=_EXPECTED, fix=_FIX)
        forwards = [(frame.start, frame.end) for frame in frames if ": forward" in frame.name]
        return forwards, [(frame.start, frame.end) for frame in frames if ": backward" in frame.name]
    links = recording.links
    engine = links.backward[(links.backward[:, 0] >= start) & (links.backward[:, 0] < end)]
    linked = np.unique(links.pairs[:, 0])
    ops = links.forward[np.isin(links.forward[:, 0], linked)]
    ops = ops[(ops[:, 0] >= start) & (ops[:, 0] < end) & ~_covered(ops[:, 0], engine)]
    runs = _runs(ops, engine, [call for call in recording.calls if start <= call.start < end])
    return [run[:2] for run in runs if run[2] == "F"], [run[:2] for run in runs if run[2] == "B"]


def _runs(forward: Ints, backward: Ints, calls: Iterable[MessageEnd]) -> list[tuple[int, int, str]]:
    """Return the unbroken runs of forward ops (F) and of backward steps (B), and messages (s, r)."""
    tokens = [(*number, "F") for number in forward.tolist()] + [(*number, "B") for number in backward.tolist()]
    runs: list[tuple[int, int, str]] = []
    for low, high, kind in sorted(tokens + [(call.start, call.start, "s" if call.sends else "r") for call in calls]):
        if runs and kind in ("F", "B") and kind == runs[-1][2]:
            runs[-1] = (runs[-1][0], max(runs[-1][1], high), kind)
        else:
            runs.append((low, high, kind))
    return runs


def _covered(moments: Ints, stretches: Ints) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which moments lie in one of these intervals: forwards that run again inside a backward."""
    if not len(stretches):
        return np.zeros(len(moments), dtype=bool)
    latest = np.maximum.accumulate(stretches[:, 1])
    at = np.searchsorted(stretches[:, 0], moments, side="right") - 1
    covered: np.ndarray[tuple[int], np.dtype[np.bool_]] = (at >= 0) & (latest[np.maximum(at, 0)] > moments)
    return covered


def _check_links(recording: RankTrace, forwards: Stretches, backwards: Stretches) -> None:
    """Reject a trace whose n-th backward does not belong to its n-th forward."""
    actions_made, used = recording.links.pairs.T
    ahead, behind = _places(forwards, actions_made), _places(backwards, used)
    crossed = np.flatnonzero((ahead >= 0) & (behind >= 0) & (ahead != behind))
    if len(crossed):
        error = f"{recording.path}: backward {behind[crossed[0]]} belongs to forward {ahead[crossed[0]]}"
        raise TraceError(f"{error}, but there are no labels", expected=_EXPECTED, fix=_FIX)


def _places(stretches: Stretches, moments: Ints) -> Ints:
    """Return the interval of each moment, or -1."""
    if not stretches:
        return np.full(len(moments), -1)
    bounds = np.array(stretches, dtype=np.int64)
    at = np.searchsorted(bounds[:, 0], moments, side="right") - 1
    return np.where((at >= 0) & (moments <= bounds[np.maximum(at, 0), 1]), at, -1)
