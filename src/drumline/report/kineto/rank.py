"""One step of one rank: what it computed when, its ends of the messages, and what else kept its host busy.

On the host alone, a label covers more than compute: the wait for the input before it, and posting the output after it.
On a device, the kernels launched under the label are the compute, whichever thread launched them (the profiler's own
device annotations leave out those of autograd's threads).

    label      ├── Forward 3 ─────────────────────────┤        ├─ PP:1B3 ─┤
    host       posts, waits      │ computes │ posts            launches
    device                                                          │ k k  k k │
                                  └ 1F3 ────┘                        └ 1B3 ────┘
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drumline.core import rules
from drumline.core.action import TRANSFER_OPS, Action, Op
from drumline.core.errors import TraceError
from drumline.report.kineto.actions import LabelledAction
from drumline.report.kineto.calls import MessageEnd
from drumline.report.kineto.recording import Kernels, Mark, RankTrace
from drumline.report.kineto.step_bounds import HostStep


class Ran(NamedTuple):
    """An action that computed from `start` to `end`; on a device, kernels ran for `kernel_ns` of that.

    `waiting` is when the host began to wait for its input, if its label shows it; 0 otherwise.
    """

    action: Action
    start: int
    end: int
    kernel_ns: int
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class RankStep:
    """One step of one rank. `order` is everything labelled, `others` is everything else with a name, on the host.

    `halves` are the ends of its messages, by send or receive.
    """

    start: int
    end: int
    order: tuple[Action, ...]
    ran: tuple[Ran, ...]
    halves: Mapping[Action, MessageEnd]
    others: tuple[Mark, ...]
    has_device: bool


def rank_step(recording: RankTrace, step: HostStep, num_stages: int) -> RankStep:
    """Return what a rank did in a step."""
    labelled, start, end = step
    computed = [action for action in labelled if action.action.is_compute]
    calls = [call for call in recording.calls if start <= call.start < end]
    spelled = any(action.action.op in TRANSFER_OPS for action in labelled)
    path, device = recording.path, recording.has_device
    halves = dict(_by_label(labelled, calls) if spelled else _by_neighbour(path, computed, calls, num_stages, end))
    ran = _on_device(computed, recording.kernels) if device else _on_host(computed, halves, calls, num_stages)
    return RankStep(
        start,
        end,
        tuple(action.action for action in labelled),
        tuple(_in_turn(ran)),
        halves,
        tuple(sorted(_others(recording, step, calls), key=lambda mark: mark.start)),
        device,
    )


def _by_label(labelled: Sequence[LabelledAction], calls: Sequence[MessageEnd]) -> Iterator[tuple[Action, MessageEnd]]:
    """Yield the messages' ends when sends and receives are labelled: the calls within the label."""
    for action, start, end in labelled:
        if action.op in TRANSFER_OPS:
            sends = action.op in (Op.SEND_F, Op.SEND_B)
            inside = [call for call in calls if start <= call.start <= end and call.sends == sends]
            yield action, _together(inside) if inside else MessageEnd(sends, start, start, start, None, None)


def _by_neighbour(
    path: Path, computed: Sequence[LabelledAction], calls: Sequence[MessageEnd], num_stages: int, end: int
) -> Iterator[tuple[Action, MessageEnd]]:
    """Yield the messages' ends when only compute is labelled: receives go with the next action, sends with the last."""
    receives = [call for call in calls if not call.sends]
    sends = [call for call in calls if call.sends]
    freed = 0
    for action, after in pairwise([*computed, None]):
        assert action is not None
        awaited = [call for call in receives if freed <= call.start < action.end]
        handed = [call for call in sends if action.start <= call.start < (after.start if after else end)]
        need, message = next(_needs(action.action, num_stages), None), rules.message(action.action, num_stages)
        if action.action.op is Op.FORWARD:
            if awaited and need is None:
                raise _no_neighbour(f"{path}: {action.action} receives its input", "before", num_stages)
            if handed and message is None:
                raise _no_neighbour(f"{path}: the output of {action.action} is sent on", "after", num_stages)
        if awaited and need is not None:
            yield need, _together(awaited)
        if handed and message is not None:
            yield message.send, _together(handed)
        freed = action.end


def _no_neighbour(what: str, where: str, num_stages: int) -> TraceError:
    return TraceError(
        f"{what}, but no trace of a rank {where} it was given (stages in the traces: {num_stages})",
        expected="the traces of all ranks of one pipeline, and of no other",
    )


def _together(calls: Sequence[MessageEnd]) -> MessageEnd:
    """Combine several calls for one message, for example one per tensor, into one."""
    dones, sizes = [call.done for call in calls], [call.num_bytes for call in calls]
    return calls[0]._replace(
        start=min(call.start for call in calls),
        begun=max(call.begun for call in calls),
        done=None if None in dones else max(done for done in dones if done is not None),
        num_bytes=None if None in sizes else sum(size for size in sizes if size is not None),
    )


def _needs(action: Action, num_stages: int) -> Iterator[Action]:
    """Yield the receives that bring what `action` needs from neighbouring stages."""
    for part in action.work:
        for alternatives in rules.needs(part, num_stages):
            message = rules.message(alternatives[0], num_stages) if alternatives[0].stage != part.stage else None
            if message is not None:
                yield message.recv


def _on_host(
    computed: Sequence[LabelledAction],
    halves: Mapping[Action, MessageEnd],
    calls: Sequence[MessageEnd],
    num_stages: int,
) -> Iterator[Ran]:
    """Yield each action from the arrival of its input to the posting of its output."""
    for action, start, end in computed:
        # In an overlapped pair, only the first half waits at the beginning.
        inputs = (halves.get(need) for need in _needs(action.work[0], num_stages))
        arrivals = [half.done for half in inputs if half is not None and half.done is not None]
        begins = max([start, *(done for done in arrivals if done <= end)])
        ends = min([end, *(call.start for call in calls if call.sends and begins < call.start <= end)])
        yield Ran(action, begins, ends, ends - begins, start if begins > start else 0)


def _on_device(computed: Sequence[LabelledAction], kernels: Kernels) -> Iterator[Ran]:
    """Yield each action from the start of its first kernel to the end of its last; without kernels it takes no time."""
    for action, start, end in computed:
        first, last = np.searchsorted(kernels.launch, (start, end + 1))
        is_own = kernels.moves[first:last] == 0
        starts, ends = kernels.start[first:last][is_own].tolist(), kernels.end[first:last][is_own].tolist()
        yield Ran(action, min(starts, default=start), max(ends, default=start), _union(starts, ends))


def _union(starts: Sequence[int], ends: Sequence[int]) -> int:
    """Return how long at least one of these intervals lasted."""
    total, until = 0, 0
    for start, end in sorted(zip(starts, ends, strict=True)):
        total += max(end - max(start, until), 0)
        until = max(until, end)
    return total


def _in_turn(ran: Iterable[Ran]) -> Iterator[Ran]:
    """Yield the actions without overlaps: an action ends where the next one starts."""
    freed = 0
    for execution in ran:
        start = max(execution.start, freed)
        end = max(execution.end, start)
        yield execution._replace(start=start, end=end, kernel_ns=min(execution.kernel_ns, end - start))
        freed = end


def _others(recording: RankTrace, step: HostStep, calls: Sequence[MessageEnd]) -> Iterator[Mark]:
    """Yield everything with a name that is not compute: labels of messages and state, calls, annotations, launches."""
    labelled, start, end = step
    computed = [action for action in labelled if action.action.is_compute]
    labels = [Mark(str(action.action), action.start, action.end) for action in labelled if not action.action.is_compute]
    named = [mark for mark in recording.others if start <= mark.start < end and not _encloses(mark, computed)]
    yield from (*labels, *named)
    yield from (Mark(f"posting a {'send' if call.sends else 'receive'}", call.start, call.end) for call in calls)
    if recording.has_device:
        yield from (Mark(f"launching {action.action}", action.start, action.end) for action in computed)
        marks = sorted([*labels, *named], key=lambda mark: (mark.start, -mark.end))
        yield from _other_kernels(recording.kernels, computed, marks, start, end)


def _encloses(mark: Mark, computed: Sequence[LabelledAction]) -> bool:
    """Whether a mark contains a whole action: then it names a part of the step, and explains no gap in it."""
    at = bisect_left(computed, mark.start, key=lambda action: action.start)
    return at < len(computed) and computed[at].end <= mark.end


def _other_kernels(
    kernels: Kernels, computed: Sequence[LabelledAction], named: Sequence[Mark], start: int, end: int
) -> Iterator[Mark]:
    """Yield the kernels that no action launched, named after what launched them, if that has a name."""
    first, last = np.searchsorted(kernels.launch, (start, end))
    outside = kernels.moves[first:last] == 0
    for _, low, high in computed:
        outside &= (kernels.launch[first:last] < low) | (kernels.launch[first:last] > high)
    upcoming, open_marks = 0, list[Mark]()
    for at in (np.flatnonzero(outside) + first).tolist():
        launch = int(kernels.launch[at])
        while upcoming < len(named) and named[upcoming].start <= launch:
            open_marks.append(named[upcoming])
            upcoming += 1
        open_marks = [mark for mark in open_marks if mark.end >= launch]
        name = f"kernels of {open_marks[-1].name}" if open_marks else "kernels outside all actions"
        yield Mark(name, int(kernels.start[at]), int(kernels.end[at]))
