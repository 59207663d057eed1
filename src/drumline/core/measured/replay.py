"""A step that ran, once more in the simulator: every action takes the seconds that it was measured to take.

    measured    F0 . F1  .  B0- . B1-      what the ranks did
    replayed    F0 F1 B0- B1-              the same seconds, every action as soon as its inputs allow

Messages take what those of their edge took in the middle. What is left between the two is the executor's own time, and
messages that took longer than others.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.measured.costs import latencies
from drumline.core.simulate.graph import Floats
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.timeline import Timeline

_UNITS: dict[str, Any] = dict.fromkeys(("forward", "backward_input", "backward_weight", "backward", "update"), 1.0)
_NOT_WORK = (Op.UNSHARD, Op.RESHARD)


def replay(timeline: Timeline, *, transfers: bool = True) -> Simulation:
    r"""Return a step as the simulator has it, with the seconds of every action as they were.

    Without `transfers` messages take no time.

    >>> from drumline.core.program import Program
    >>> from drumline.core.measured.measured import Measured
    >>> from drumline.core.measured.record import Record
    >>> step = Measured(Program.parse("0F0,0B0"), (Record(0, starts=[0, 5], ends=[3, 9]),))
    >>> round(step.makespan * 1e9, 6), round(replay(step).makespan * 1e9, 6)
    (9.0, 7.0)
    >>> apart = simulate(Program.parse("0F0,0B0\n1F0,1B0"), Costs(comm=0.5))
    >>> apart.makespan, replay(apart).makespan, replay(apart, transfers=False).makespan
    (7.0, 7.0, 6.0)
    """
    costs = Costs(**_UNITS)
    if transfers:
        costs = replace(costs, edges=latencies([timeline]), message_bytes=_message_bytes(timeline))
    found = simulate(timeline.program, costs, factors=_action_seconds(timeline))
    return replace(found, weighed=timeline.memory)  # the same actions in the same order hold the same


def _message_bytes(timeline: Timeline) -> list[float]:
    """Return the bytes that cross the boundary behind each stage, in the middle of its messages."""
    found: dict[int, list[float]] = defaultdict(list)
    for one in timeline.transfers:
        found[one.action.stage - (one.action.op is Op.SEND_B)].append(one.num_bytes)
    return [median(found.get(stage, [0.0])) for stage in range(timeline.program.num_stages)]


def _action_seconds(timeline: Timeline) -> Floats:
    """Return the seconds of every action, row by row; the halves of an overlapped pair get half of it each."""
    found = []
    for track in timeline.tracks:
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
            if action.op not in _NOT_WORK:
                found += [(end - start) / len(action.work)] * len(action.work)
    return np.array(found)
