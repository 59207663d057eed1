"""Which action a stretch of the host's time was.

    written by                                     label                            says
    schedules of several stages, from torch 2.9    PP:2F0, PP:(0F5;1B2)OVERLAP_F_B  stage, op and microbatch
    ScheduleGPipe                                  Forward 3, Backward 3            op, microbatch of the rank's stage
    Schedule1F1B                                   none                             see `kineto_unlabelled`

A step may run its schedule several times (gradient accumulation): microbatches number on then.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from drumline.core.action import Action, Op
from drumline.core.errors import ProgramError
from drumline.report.kineto.recording import Mark

_NUMBERED = re.compile(r"(Forward|Backward) (\d{1,9})")
_OPS = {"Forward": Op.FORWARD, "Backward": Op.BACKWARD}


class Labelled(NamedTuple):
    """An action, and from when to when the host was in it."""

    action: Action
    start: int
    end: int


def spelled(marks: Iterable[Mark]) -> list[Labelled]:
    """Return the actions that labels spell out in full; other text behind PP: is no action.

    >>> spelled([Mark("PP:2F0", 0, 5), Mark("PP:warmup", 5, 6)])
    [Labelled(action=2F0, start=0, end=5)]
    """
    found = []
    for name, start, end in marks:
        if name.startswith("PP:"):
            try:
                found.append(Labelled(Action.parse(name.removeprefix("PP:")), start, end))
            except ProgramError:
                continue
    return found


def numbered(marks: Iterable[Mark], stage: int) -> list[Labelled]:
    """Return the actions of labels that give only op and microbatch; the rank's one stage is `stage`.

    >>> numbered([Mark("Backward 3", 0, 5)], stage=1)
    [Labelled(action=1B3, start=0, end=5)]
    """
    matches = ((_NUMBERED.fullmatch(name), start, end) for name, start, end in marks)
    return [
        Labelled(Action(stage, _OPS[match[1]], int(match[2])), start, end) for match, start, end in matches if match
    ]


def numbered_on(labelled: Sequence[Labelled]) -> list[Labelled]:
    """Return the same with microbatches that number on where a step runs its schedule more than once.

    >>> twice = [Labelled(Action.parse(text), at, at + 1) for at, text in enumerate(["0F0", "0B0", "0F0", "0B0"])]
    >>> [one.action for one in numbered_on(twice)]
    [0F0, 0B0, 0F1, 0B1]
    """
    parts = (part.microbatch for one in labelled for part in one.action.work)
    count = 1 + max((number for number in parts if number is not None), default=-1)
    seen: Counter[Action] = Counter()
    found = []
    for one in labelled:
        turn = seen[one.action]
        seen[one.action] += 1
        found.append(one._replace(action=_later(one.action, turn * count)) if turn else one)
    return found


def _later(action: Action, by: int) -> Action:
    if action.parts:
        return action._replace(parts=tuple(_later(part, by) for part in action.parts))
    return action if action.microbatch is None else action._replace(microbatch=action.microbatch + by)
