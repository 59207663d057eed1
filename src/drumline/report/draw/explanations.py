"""Why a timeline looks as it does: what each action waited for, idle time, memory, queues, the critical path.

As `packed` columns, beside those of the boxes that `scene` makes; `index` is a box's place in its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from drumline.core.action import Action
from drumline.core.timeline.idle import Cause, Idle
from drumline.core.timeline.timeline import SpanLane, Timeline, Track
from drumline.report.draw.packed import PageTime, packed

# What the page says of an idle interval whose words are empty; `needed` is the latest input of the action behind it.
SENTENCES = {
    Cause.FILL: "the pipeline fills; {before} waits for {needed}",
    Cause.WAIT: "{before} waits for {needed}",
    Cause.TRANSFER: "{needed} is made and on its way to {before}",
    Cause.IMBALANCE: "{before} waits for {needed}, which unequal costs delay",
    Cause.MEMORY: "{before} waits for {needed}, and the memory limit forbids running ahead",
}
_CODES = {cause: code for code, cause in enumerate(Cause)}


def explanations(timeline: Timeline) -> dict[str, Any]:
    r"""Return what explains a timeline's picture.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> explanations(simulate(Program.parse("0F0,0B0\n1F0,1B0")))["critical"] == {
    ...     "rank": packed([0, 1, 1, 0]), "index": packed([0, 0, 1, 1])}
    True
    """
    clock = PageTime.of(timeline)
    causes: list[list[Idle]] = [[] for _ in range(timeline.num_ranks)]
    for idle in timeline.causes:
        causes[idle.rank].append(idle)
    return {
        "rows": [_row(timeline, rank, idle, clock) for rank, idle in enumerate(causes)],
        "critical": _critical(timeline),
        "queues": _queues(timeline, clock),
    }


def _row(timeline: Timeline, rank: int, causes: Sequence[Idle], clock: PageTime) -> dict[str, Any]:
    inputs = timeline.latest_inputs[rank]
    return {
        "need_rank": packed(inputs.ranks),
        "need_index": packed(inputs.indices),
        "idle": {
            "start": clock.times([idle.start for idle in causes]),
            "seconds": clock.lengths([idle.seconds for idle in causes]),
            "cause": packed([_CODES[idle.cause] for idle in causes]),
            "words": [_words(timeline, idle) for idle in causes],
        },
        "memory": _memory(timeline, rank, clock),
    }


def _words(timeline: Timeline, idle: Idle) -> str:
    """Return the cause in words, or nothing where the page says the same by itself; most need no text of their own."""
    template = SENTENCES.get(idle.cause)
    if template is None or idle.before is None:
        return idle.why
    place = timeline.located.get(idle.before[:3])
    needed = None if place is None else timeline.latest_inputs[place[0]].place(place[1])
    if needed is None:
        return idle.why
    action = timeline.tracks[needed[0]].actions[needed[1]]
    said = template.format(before=idle.before, needed=f"{action} of rank {needed[0]}")
    return "" if said == idle.why else idle.why


def _memory(timeline: Timeline, rank: int, clock: PageTime) -> dict[str, Any]:
    """Return what the rank holds from each change on: bytes where they are known, else pairs."""
    track, holding = timeline.tracks[rank], timeline.memory[rank]
    held = holding.pairs if holding.bytes is None else holding.bytes
    before = 0.0 if holding.bytes is None else holding.static_bytes
    times = np.stack([track.starts, track.ends], axis=1)
    return clock.steps(np.append(timeline.start, times), np.append(before, np.asarray(held, float)))


def _queues(timeline: Timeline, clock: PageTime) -> list[dict[str, Any]]:
    """Return the edges on which a message ever waited, with their depths from each change on."""
    found = []
    for (source, target), curve in timeline.queue_depths.items():
        times, depths = zip(*curve, strict=True)
        if any(depths):
            steps = clock.steps([timeline.start, *times], [0, *depths])
            found.append({"source": source, "target": target, **steps})
    return found


def _critical(timeline: Timeline) -> dict[str, Any]:
    """Return the critical path as ranks and indices of boxes, first to last."""
    ranks: list[int] = []
    indices: list[int] = []
    at = [len(track.actions) for track in timeline.tracks]
    for span in reversed([one for one in timeline.critical_path if one.lane is SpanLane.COMPUTE]):
        at[span.rank] = _before(timeline.tracks[span.rank], at[span.rank], span.start, span.action)
        ranks.append(span.rank)
        indices.append(at[span.rank])
    return {"rank": packed(ranks[::-1]), "index": packed(indices[::-1])}


def _before(track: Track, index: int, start: float, action: Action) -> int:
    index -= 1
    while track.starts[index] != start or track.actions[index] != action:
        index -= 1
    return index
