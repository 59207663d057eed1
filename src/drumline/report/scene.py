"""A timeline as drawing data: plain lists that JSON can carry, shared by the SVG and the page.

Boxes are columns, not objects, so that 200,000 of them stay a few megabytes:

    rows[0] = {"start": [0, 1, 4], "seconds": [1, 1, 2], "stage": [0, 0, 0], "op": [0, 0, 1], "microbatch": [0, 1, 0]}

is 0F0, 0F1, 0B0 on rank 0. Times count from the timeline's start, so that several line up. An op is its place in
`OPS`. Of an overlapped pair the columns hold the first half, and `second` the other as [index, stage, op, microbatch,
local]; `local` tells a rank's stages apart, 0 being its first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.core.action import Action, Op
from drumline.core.idle import Cause, Idle
from drumline.core.timeline import Lane, Timeline, Track
from drumline.report.palette import SHADES

Columns = dict[str, Any]
Floats = npt.NDArray[np.float64]


class Words(NamedTuple):
    """How an op is called in a legend, and what one action of it does."""

    name: str
    sentence: str


OPS: dict[Op, Words] = {
    Op.FORWARD: Words("forward", "Forward of stage {stage} on microbatch {microbatch}"),
    Op.BACKWARD: Words("backward", "Backward of stage {stage} on microbatch {microbatch}"),
    Op.BACKWARD_INPUT: Words("input gradient", "Input-gradient half of stage {stage} on microbatch {microbatch}"),
    Op.BACKWARD_WEIGHT: Words("weight gradient", "Weight-gradient half of stage {stage} on microbatch {microbatch}"),
    Op.UPDATE: Words("update", "Optimizer step of stage {stage} after microbatch {microbatch}"),
    Op.UNSHARD: Words("unshard", "Gathering the parameters of stage {stage}"),
    Op.RESHARD: Words("reshard", "Releasing the parameters of stage {stage}"),
    Op.REDUCE_GRAD: Words("gradient exchange", "Exchanging the gradients of stage {stage}"),
}
CODES = {op: code for code, op in enumerate(OPS)}
CAUSES = {cause: code for code, cause in enumerate(Cause)}


def document(
    timelines: Iterable[Timeline],
    *,
    title: str | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    advice: str | None = None,
) -> dict[str, Any]:
    """Return all that a page of timelines shows; `rows` are points of a comparison, as `Row.summary` gives them.

    >>> from drumline.core.simulate import simulate
    >>> from drumline.schedules import generate
    >>> page = document([simulate(generate("1f1b", num_ranks=2, num_microbatches=2))])
    >>> page["title"], len(page["timelines"]), page["points"]
    ('1f1b: 2 ranks, 2 microbatches', 1, [])
    """
    scenes = [scene(timeline) for timeline in timelines]
    if title is None:
        title = _titled(scenes)
    return {
        "title": title,
        "advice": advice or "",
        "ops": [
            {"text": op.value, "name": words.name, "sentence": words.sentence, **SHADES[op]._asdict()}
            for op, words in OPS.items()
        ],
        "causes": [cause.value for cause in CAUSES],
        "points": [_point(row) for row in rows or ()],
        "timelines": scenes,
    }


def scene(timeline: Timeline) -> dict[str, Any]:
    r"""Return one timeline's drawing data.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate import simulate
    >>> drawn = scene(simulate(Program.parse("0F0,0B0\n1F0,1B0", name="tiny")))
    >>> drawn["rows"][1]["start"], drawn["rows"][1]["seconds"], drawn["rows"][1]["idle"]["words"][0]
    ([1, 2], [1, 2], 'the pipeline fills; 1F0 waits for 0F0 of rank 0')
    """
    program = timeline.program
    clock = _Clock.of(timeline)
    causes: list[list[Idle]] = [[] for _ in range(timeline.num_ranks)]
    for idle in timeline.causes:
        causes[idle.rank].append(idle)
    rows = [_row(timeline, rank, causes[rank], clock) for rank in range(timeline.num_ranks)]
    for span in timeline.exchanges:
        if span.end > span.start:
            times = [span.start - clock.origin, span.end - span.start]
            rows[span.rank]["exchanges"].append([*clock.lengths(times), span.action.stage])
    return {
        "name": program.name,
        "stages": program.num_stages,
        "microbatches": program.num_microbatches,
        "placement": program.placement.name,
        "boxes": sum(len(row["start"]) for row in rows),
        "makespan": clock.lengths([timeline.makespan])[0],
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "peak_activations": max(timeline.peak_activations, default=0),
        "peak_bytes": None if timeline.peak_bytes is None else max(timeline.peak_bytes, default=0.0),
        "rows": rows,
        "critical": _critical(timeline),
        "queues": _queues(timeline, clock),
    }


def second_copy(timeline: Timeline, rank: int) -> Callable[[Action], int]:
    """Return the function that tells which of the rank's stages an action belongs to: 0 for its first.

    >>> from drumline.core.simulate import simulate
    >>> from drumline.schedules import generate
    >>> timeline = simulate(generate("zb-v", num_ranks=2, num_microbatches=2))
    >>> [second_copy(timeline, 0)(Action(stage, Op.FORWARD, 0)) for stage in (0, 3)]
    [0, 1]
    """
    placement = timeline.program.placement
    if placement.mirrored:
        return lambda part: int(part.microbatch in placement.mirrored)
    local = {stage: at for at, stage in enumerate(placement.stages_of(rank))}
    return lambda part: local.get(part.stage, 0)


def _row(timeline: Timeline, rank: int, causes: Sequence[Idle], clock: _Clock) -> Columns:
    track = timeline.tracks[rank]
    paired = [(index, action) for index, action in enumerate(track.actions) if action.parts]
    firsts: Sequence[Action] = track.actions
    if paired:
        firsts = [action.parts[0] if action.parts else action for action in track.actions]
    local_of = second_copy(timeline, rank)
    alone = len(timeline.program.placement.stages_of(rank)) == 1
    local = [] if alone else list(map(local_of, firsts))
    needs = [need or (-1, -1) for need in timeline.latest_inputs[rank]]
    stages, ops, microbatches, _ = zip(*firsts, strict=True) if firsts else ((), (), (), ())
    peak_bytes = timeline.peak_bytes
    return {
        "idle_share": timeline.idle[rank] / timeline.makespan if timeline.makespan > 0 else 0.0,
        "peak_activations": timeline.peak_activations[rank],
        "peak_bytes": None if peak_bytes is None else peak_bytes[rank],
        "start": clock.times(track.starts),
        "seconds": clock.lengths(np.asarray(track.ends, float) - np.asarray(track.starts, float)),
        "stage": list(stages),
        "op": [CODES[op] for op in ops],
        "microbatch": [-1 if one is None else one for one in microbatches],
        "local": local if any(local) else [],
        "second": [
            [index, other.stage, CODES[other.op], other.microbatch, local_of(other)]
            for index, action in paired
            for other in action.parts[1:]
        ],
        "need_rank": [rank_needed for rank_needed, _ in needs],
        "need_index": [index_needed for _, index_needed in needs],
        "idle": {
            "start": clock.times([idle.start for idle in causes]),
            "seconds": clock.lengths([idle.seconds for idle in causes]),
            "cause": [CAUSES[idle.cause] for idle in causes],
            "words": [idle.why for idle in causes],
        },
        "exchanges": [],
        "memory": _memory(timeline, rank, clock),
    }


def _memory(timeline: Timeline, rank: int, clock: _Clock) -> Columns:
    """Return what the rank holds from each change on: bytes where they are known, else pairs."""
    track, holding = timeline.tracks[rank], timeline.memory[rank]
    held = holding.pairs if holding.bytes is None else holding.bytes
    before = 0.0 if holding.bytes is None else holding.static_bytes
    times = np.stack([np.asarray(track.starts, float), np.asarray(track.ends, float)], axis=1).ravel()
    return _steps([timeline.start, *times.tolist()], [before, *np.asarray(held, float).ravel().tolist()], clock)


def _queues(timeline: Timeline, clock: _Clock) -> list[Columns]:
    """Return the edges on which a message ever waited, with their depths from each change on."""
    found = []
    for (source, target), curve in timeline.queue_depths.items():
        times, depths = zip(*curve, strict=True)
        if any(depths):
            steps = _steps([timeline.start, *times], [0, *depths], clock)
            found.append({"source": source, "target": target, **steps})
    return found


def _steps(times: Sequence[float], values: Sequence[float], clock: _Clock) -> Columns:
    """Return a step curve without repeated times (the last counts) and without steps of no height."""
    at, value = np.round(np.asarray(times, float) - clock.origin, clock.digits), np.asarray(values, float)
    last = np.append(at[1:] != at[:-1], True)
    at, value = at[last], value[last]
    changes = np.append(True, value[1:] != value[:-1])
    return {"time": _plain(at[changes]), "value": _plain(value[changes])}


def _critical(timeline: Timeline) -> Columns:
    """Return the critical path as ranks and indices of boxes, first to last."""
    ranks: list[int] = []
    indices: list[int] = []
    at = [len(track.actions) for track in timeline.tracks]
    for span in reversed([one for one in timeline.critical_path if one.lane is Lane.COMPUTE]):
        at[span.rank] = _before(timeline.tracks[span.rank], at[span.rank], span.start, span.action)
        ranks.append(span.rank)
        indices.append(at[span.rank])
    return {"rank": ranks[::-1], "index": indices[::-1]}


def _before(track: Track, index: int, start: float, action: Action) -> int:
    index -= 1
    while track.starts[index] != start or track.actions[index] != action:
        index -= 1
    return index


def _titled(scenes: Sequence[dict[str, Any]]) -> str:
    if len(scenes) != 1:
        return f"{len(scenes)} timelines side by side"
    return f"{scenes[0]['name']}: {len(scenes[0]['rows'])} ranks, {scenes[0]['microbatches']} microbatches"


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": str(row["name"]),
        "bubble": float(row["bubble"]),
        "peak_share": float(row["peak_share"]),
        "fits": bool(row.get("fits", True)),
    }


class _Clock(NamedTuple):
    """How times become numbers: from the timeline's start, to a billionth of its makespan."""

    origin: float
    digits: int

    @staticmethod
    def of(timeline: Timeline) -> _Clock:
        makespan = timeline.makespan
        return _Clock(timeline.start, 9 - math.floor(math.log10(makespan)) if makespan > 0 else 9)

    def times(self, values: Sequence[float]) -> list[float]:
        return self.lengths(np.asarray(values, float) - self.origin)

    def lengths(self, values: Sequence[float] | Floats) -> list[float]:
        return _plain(np.round(np.asarray(values, float), self.digits))


def _plain(values: Floats) -> list[float]:
    """Return plain numbers, without a point where all are whole."""
    whole = bool((values == np.floor(values)).all()) and float(np.abs(values).max(initial=0.0)) < 2**53
    numbers: list[float] = (values.astype(np.int64) if whole else values).tolist()
    return numbers


def ticks(extent: float, *, most: int = 10) -> Sequence[float]:
    """Return round times from 0 to `extent`, at most `most` steps of 1, 2 or 5 times a power of ten.

    >>> ticks(33, most=8)
    [0, 5, 10, 15, 20, 25, 30]
    >>> ticks(0.5, most=5)
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    """
    if not extent > 0:
        return [0]
    power = math.floor(math.log10(extent / most))
    step = next(one for one in (1, 2, 5, 10) if one * 10.0**power * most >= extent * (1 - 1e-9))
    count = math.floor(extent / (step * 10.0**power) + 1e-9)
    return _plain(np.round(np.arange(count + 1) * step * 10.0**power, max(0, -power)))
