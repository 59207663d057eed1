"""A timeline as drawing data: plain lists for JSON, shared by the SVG and the page.

Boxes are stored as columns, and columns are `packed`, so that 200,000 boxes take a few megabytes:

    rows[0] = {"start": [0, 1, 4], "ticks": [1, 1, 2], "stage": [0, 0, 0], "op": [0, 0, 1], "microbatch": [0, 1, 0]}

is 0F0, 0F1, 0B0 on rank 0. Where microbatches run in `slices`, they are the numbers of these, counted through. Times
count from the timeline's start, so that several line up; those of boxes are whole ticks. An op is its index in `OPS`.
For an overlapped pair the columns hold the first half, and those of `second` the other, with the `index` of the box.
`local` distinguishes a rank's stages; 0 is the first.

`why` explains the picture (what each action waited for, idle time, memory, queues, the critical path), also in packed
columns; `index` is a box's position in its row. It takes longer than the picture, and can be requested later.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from drumline.core.action import Action, Op
from drumline.core.graph import OPS as ALL_OPS
from drumline.core.graph import Columns as ActionColumns
from drumline.core.graph import Flags, Ints
from drumline.core.measured.endless import num_begun
from drumline.core.placement import Placement
from drumline.core.timeline.idle import SENTENCES, Cause, Idle
from drumline.core.timeline.spans import SpanLane, Track
from drumline.core.timeline.timeline import Timeline
from drumline.report.draw.packed import PageTime, packed
from drumline.report.draw.palette import IDLE, SHADES, pale

Columns = dict[str, Any]

# The page's text for an idle interval without words; `needed` is the latest input of the action after it.
_SAID_BY_PAGE = {cause: sentence for cause, sentence in SENTENCES.items() if "{before}" in sentence}
_CODES = {cause: code for code, cause in enumerate(Cause)}


class Words(NamedTuple):
    """The name of an op in a legend, and what one such action does."""

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
_CODE_OF = np.array([list(OPS).index(op) if op in OPS else -1 for op in ALL_OPS])


def document(
    timelines: Iterable[Timeline],
    *,
    title: str | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    advice: str | None = None,
    explained: bool = True,
    names: Sequence[str] | None = None,
    seconds: bool = False,
) -> dict[str, Any]:
    """Return everything that a page of timelines shows; `rows` are points of a comparison, from `Row.summary`.

    If not `explained`, `explanations` returns the rest later. Timelines are named after their programs unless `names`
    is given; if their times are `seconds`, the page adds the unit.

    >>> from drumline.core.simulate.simulate import simulate
    >>> from drumline.schedules import generate
    >>> page = document([simulate(generate("1f1b", num_ranks=2, num_microbatches=2))])
    >>> page["title"], len(page["timelines"]), page["points"]
    ('1f1b: 2 ranks, 2 microbatches', 1, [])
    """
    scenes = [scene(timeline, explained=explained) for timeline in timelines]
    for entry, name in zip(scenes, names or (), strict=names is not None):
        entry["name"] = name
    if title is None:
        title = _titled(scenes)
    return {
        "title": title,
        "advice": advice or "",
        "seconds": seconds,
        "ops": [
            {"text": op.value, "name": words.name, "sentence": words.sentence, **_shades(op)}
            for op, words in OPS.items()
        ],
        "causes": [cause.value for cause in Cause],
        "hatches": {cause.value: hatch.lines for cause, hatch in IDLE.items()},
        "sentences": {cause.value: sentence for cause, sentence in _SAID_BY_PAGE.items()},
        "points": [_point(row) for row in rows or ()],
        "timelines": scenes,
    }


def _shades(op: Op) -> dict[str, str]:
    """Return the colours of an op, also for every second slice of even and odd microbatches."""
    shades = SHADES[op]
    return {**shades._asdict(), "pale_even": pale(shades.even), "pale_odd": pale(shades.odd)}


def scene(timeline: Timeline, *, explained: bool = True) -> dict[str, Any]:
    r"""Return one timeline's drawing data; `why` is None without explanations.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> drawn = scene(simulate(Program.parse("0F0,0B0\n1F0,1B0", name="tiny")))
    >>> drawn["rows"][1]["start"], drawn["why"]["rows"][1]["idle"]["words"][-1]
    ('u1:AQI=', 'the pipeline drains; 0B0 of rank 0 ends last')
    """
    program = timeline.program
    clock = PageTime.of(timeline)
    rows = [{**_figures(timeline, rank, clock), **boxes} for rank, boxes in enumerate(_boxes(timeline))]
    for span in timeline.exchanges:
        if span.end > span.start:
            times = [span.start - clock.origin, span.end - span.start]
            rows[span.rank]["exchanges"].append([*clock.lengths(times), span.action.stage])
    return {
        "name": program.name,
        "stages": program.num_stages,
        "microbatches": num_begun(program),
        "slices": program.num_slices,
        "placement": program.placement.name,
        "boxes": sum(len(track.actions) for track in timeline.tracks),
        "ticks_per_second": clock.ticks_per_second,
        "makespan": clock.lengths([timeline.makespan])[0],
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "peak_activations": max(timeline.peak_activations, default=0),
        "peak_bytes": None if timeline.peak_bytes is None else max(timeline.peak_bytes, default=0.0),
        "rows": rows,
        "why": explanations(timeline) if explained else None,
    }


def further(placement: Placement, stage: Ints, microbatch: Ints) -> Ints:
    """Return which of its rank's stages each (stage, microbatch) belongs to: 0 for the first stage or copy.

    >>> further(Placement.v(num_ranks=2), np.array([0, 3]), np.array([0, 0])).tolist()
    [0, 1]
    """
    if placement.mirrored:
        return np.isin(microbatch, list(placement.mirrored)).astype(np.int64)
    local = np.zeros(placement.num_stages, dtype=np.int64)
    for rank in range(placement.num_ranks):
        stages = placement.stages_of(rank)
        local[list(stages)] = range(len(stages))
    return local[stage]


def _figures(timeline: Timeline, rank: int, clock: PageTime) -> Columns:
    peak_bytes, track = timeline.peak_bytes, timeline.tracks[rank]
    start = clock.ticks(track.starts)
    return {
        "idle_share": timeline.idle[rank] / timeline.makespan if timeline.makespan > 0 else 0.0,
        "peak_activations": timeline.peak_activations[rank],
        "peak_bytes": None if peak_bytes is None else peak_bytes[rank],
        "exchanges": [],
        "start": packed(start),
        "ticks": packed(clock.ticks(track.ends) - start),
    }


def _boxes(timeline: Timeline) -> Iterator[Columns]:
    """Yield the boxes of each rank."""
    columns = timeline.columns
    local = further(timeline.program.placement, columns.stage, columns.microbatch)
    parts = {"stage": columns.stage, "op": _CODE_OF[columns.code], "microbatch": columns.microbatch, "local": local}
    heads = columns.heads
    firsts = _by_rank(parts, heads, columns)
    seconds = _by_rank({"index": columns.position, **parts}, ~heads, columns)
    for first, second in zip(firsts, seconds, strict=True):
        yield {**first, "second": second}


def _by_rank(columns: Mapping[str, Ints], chosen: Flags, of: ActionColumns) -> Iterator[Columns]:
    """Yield the chosen entries of all columns, rank by rank."""
    bounds = np.searchsorted(of.rank[chosen], np.arange(1, of.num_ranks))
    split = [map(packed, np.split(column[chosen], bounds)) for column in columns.values()]
    for texts in zip(*split, strict=True):
        yield dict(zip(columns, texts, strict=True))


def _titled(scenes: Sequence[dict[str, Any]]) -> str:
    if len(scenes) != 1:
        return f"Comparison of {len(scenes)} timelines"
    return f"{scenes[0]['name']}: {len(scenes[0]['rows'])} ranks, {scenes[0]['microbatches']} microbatches"


def _point(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": str(row["name"]),
        "bubble": float(row["bubble"]),
        "peak_share": float(row["peak_share"]),
        "fits": bool(row.get("fits", True)),
    }


def explanations(timeline: Timeline) -> dict[str, Any]:
    r"""Return the explanations of a timeline's picture.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> explanations(simulate(Program.parse("0F0,0B0\n1F0,1B0")))["critical"] == {
    ...     "rank": packed([0, 1, 1, 0]), "index": packed([0, 0, 1, 1])}
    True
    """
    clock = PageTime.of(timeline)
    return {
        "rows": [_row(timeline, rank, idle, clock) for rank, idle in enumerate(timeline.causes_by_rank)],
        "critical": _critical(timeline),
        "queues": _queues(timeline, clock),
    }


def _row(timeline: Timeline, rank: int, causes: Sequence[Idle], clock: PageTime) -> dict[str, Any]:
    inputs = timeline.latest_inputs[rank]
    return {
        "need_rank": packed([rank for rank, _ in inputs]),
        "need_index": packed([index for _, index in inputs]),
        "idle": {
            "start": clock.times([idle.start for idle in causes]),
            "seconds": clock.lengths([idle.seconds for idle in causes]),
            "cause": packed([_CODES[idle.cause] for idle in causes]),
            "words": [_words(timeline, idle) for idle in causes],
        },
        "memory": _memory(timeline, rank, clock),
    }


def _words(timeline: Timeline, idle: Idle) -> str:
    """Return the cause in words, or nothing if the page can generate the same; most need no text of their own."""
    template = _SAID_BY_PAGE.get(idle.cause)
    if template is None or idle.before is None:
        return idle.why
    place = timeline.located.get(idle.before[:3])
    needed = (-1, -1) if place is None else timeline.latest_inputs[place[0]][place[1]]
    if needed[0] < 0:
        return idle.why
    action = timeline.tracks[needed[0]].actions[needed[1]]
    said = template.format(before=idle.before, needed=f"{action} of rank {needed[0]}")
    return "" if said == idle.why else idle.why


def _memory(timeline: Timeline, rank: int, clock: PageTime) -> dict[str, Any]:
    """Return what the rank holds after each change: bytes if known, otherwise pairs."""
    track, holding = timeline.tracks[rank], timeline.memory[rank]
    amounts = holding.pairs if holding.bytes is None else holding.bytes
    in_flight = 0 if timeline.in_flight is None else max(timeline.in_flight[rank], 0)
    before = in_flight if holding.bytes is None else holding.static_bytes
    times = np.stack([track.starts, track.ends], axis=1)
    return clock.steps(np.append(timeline.start, times), np.append(before, np.asarray(amounts, float)))


def _queues(timeline: Timeline, clock: PageTime) -> list[dict[str, Any]]:
    """Return the edges on which a message ever waited, with their depth after each change."""
    queues = []
    for (source, target), curve in timeline.queue_depths.items():
        times, depths = zip(*curve, strict=True)
        if any(depths):
            steps = clock.steps([timeline.start, *times], [0, *depths])
            queues.append({"source": source, "target": target, **steps})
    return queues


def _critical(timeline: Timeline) -> dict[str, Any]:
    """Return the critical path as ranks and indices of boxes, first to last."""
    ranks: list[int] = []
    indices: list[int] = []
    at = [len(track.actions) for track in timeline.tracks]
    for span in reversed([interval for interval in timeline.critical_path if interval.lane is SpanLane.COMPUTE]):
        at[span.rank] = _before(timeline.tracks[span.rank], at[span.rank], span.start, span.action)
        ranks.append(span.rank)
        indices.append(at[span.rank])
    return {"rank": packed(ranks[::-1]), "index": packed(indices[::-1])}


def _before(track: Track, index: int, start: float, action: Action) -> int:
    index -= 1
    while track.starts[index] != start or track.actions[index] != action:
        index -= 1
    return index
