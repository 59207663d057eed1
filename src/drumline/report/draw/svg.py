"""A timeline as a standalone SVG, for papers and READMEs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from drumline.core.action import Action, Op
from drumline.core.timeline.idle import Cause, Idle
from drumline.core.timeline.timeline import Timeline
from drumline.core.units import number, percent, size_text
from drumline.report.draw.palette import IDLE, MUTED, SHADES, TRACK, Hatch, fill
from drumline.report.draw.scene import OPS, further
from drumline.report.draw.sheet import APART, Axis, hatched, px, rect, sheet, text, upright, xml_text

_LEFT, _RIGHT, _TOP = 64, 132, 64
_DIGIT = 6.3  # width of a digit at the label size
_TINT, _NARROW = 0.12, 0.8  # opacity of idle time under its lines, and where it is too narrow for lines
_TITLES_UP_TO = 4000  # boxes; more would double the file for tooltips that nobody can hit


class _RankRows:
    """Positions of ranks and times on the sheet."""

    def __init__(self, timeline: Timeline, width: float) -> None:
        self.width = width
        self.row = 26.0 if timeline.num_ranks <= 16 else 16.0
        self.bottom = _TOP + timeline.num_ranks * (self.row + 6) - 6
        self.room = width - _LEFT - _RIGHT
        self.start, self.makespan = timeline.start, timeline.makespan

    def x(self, time: float) -> float:
        return _LEFT + (time - self.start) * self.room / (self.makespan or 1.0)

    def y(self, rank: int) -> float:
        return _TOP + rank * (self.row + 6)


def svg(timeline: Timeline, *, width: int = 1000, title: str | None = None) -> str:
    r"""Return the timeline as an SVG document: a row per rank, a box per timed action, then idle share and peak.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> picture = svg(simulate(Program.parse("0F0,0B0\n1F0,1B0", name="tiny")))
    >>> picture.count('class="box"'), "bubble 50%" in picture
    (4, True)
    """
    name = timeline.program.name if title is None else title
    layout = _RankRows(timeline, max(width, 320))
    axis = Axis(0, timeline.makespan, _LEFT, _LEFT + layout.room)
    legend, legend_rows = _legend(timeline, layout)
    lines = [
        text(layout.width - 76, _TOP - 7, "idle", anchor="end", fill=MUTED),
        text(layout.width - 16, _TOP - 7, "peak", anchor="end", fill=MUTED),
        *upright(axis, _TOP - 3, layout.bottom + 5, most=max(2, int(layout.room / 70))),
        *(line for rank in range(timeline.num_ranks) for line in _row(timeline, rank, layout)),
        *legend,
    ]
    program = timeline.program
    slices = f" in {program.num_slices} slices" if program.num_slices > 1 else ""
    microbatches = f"{program.num_microbatches} microbatches{slices}"
    sizes = (f"{program.num_ranks} ranks", f"{program.num_stages} stages", microbatches)
    facts = (*sizes, f"makespan {number(timeline.makespan)}")
    return sheet(
        lines,
        width=layout.width,
        height=layout.bottom + 46 + 20 * legend_rows,
        title=name,
        about=" · ".join([*facts, f"bubble {_percent(timeline.bubble)}"]),
        described=f"{name}: {', '.join(facts)}, bubble {percent(timeline.bubble)}",
    )


def _row(timeline: Timeline, rank: int, layout: _RankRows) -> Iterator[str]:
    y, middle = layout.y(rank), layout.y(rank) + layout.row / 2 + 4
    share = timeline.idle[rank] / timeline.makespan if timeline.makespan > 0 else 0.0
    yield text(16, middle, f"rank {rank}")
    yield text(layout.width - 76, middle, _percent(share), anchor="end")
    yield text(layout.width - 16, middle, _peak(timeline, rank), anchor="end")
    yield rect(_LEFT, y, layout.room, layout.row, TRACK, corner=2)
    yield from _idle(timeline.causes_by_rank[rank], y, layout, titled=timeline.program.num_actions <= _TITLES_UP_TO)
    track, columns = timeline.tracks[rank], timeline.columns
    here = columns.rank == rank
    local = iter(further(timeline.program.placement, columns.stage[here], columns.microbatch[here]).tolist())
    titled = timeline.program.num_actions <= _TITLES_UP_TO
    yield '<g text-anchor="middle">'
    later = []
    for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
        note = f"<title>{xml_text(f'{action}: {number(start)} to {number(end)}')}</title>" if titled else ""
        bands = list(islice(local, len(action.work)))
        box = f'<g class="box">{note}{"".join(_box(action, layout.x(start), layout.x(end), y, layout, bands))}</g>'
        if end > start:
            yield box
        else:
            later.append(box)  # an action of no length is a mark on top of what follows it
    yield from later
    for span in timeline.exchanges:
        if span.rank == rank and span.end > span.start:
            left, right = layout.x(span.start), layout.x(span.end)
            yield rect(left, y + layout.row + 1, right - left, 3, fill(span.action.op, 0))
    yield "</g>"


def _idle(idle: Sequence[Idle], y: float, layout: _RankRows, *, titled: bool) -> Iterator[str]:
    """Yield a rank's idle time: hatched by cause, one path each, and invisible boxes with the reason as tooltip."""
    paths: dict[Cause, str] = {}
    for gap in idle:
        left, width = layout.x(gap.start), layout.x(gap.end) - layout.x(gap.start)
        paths[gap.cause] = paths.get(gap.cause, "") + hatched(left, y, width, layout.row, IDLE[gap.cause].lines)
        note = f"{gap.cause}: {gap.why}" if titled else ""
        tint = _NARROW if width < APART else _TINT
        yield rect(left, y, width, layout.row, IDLE[gap.cause].light, note=note, opacity=tint)
    for cause, path in paths.items():
        yield f'<path class="idle {cause}" d="{path}" stroke="{IDLE[cause].light}" fill="none" pointer-events="none"/>'


def _box(action: Action, left: float, right: float, y: float, layout: _RankRows, bands: Sequence[int]) -> Iterator[str]:
    parts = action.work
    height = layout.row / len(parts)
    if right - left < 1.5:
        right = left + (1.5 if right == left else right - left)
    elif right - left > 4:
        right -= 1
    for at, part in enumerate(parts):
        top, shades = y + at * height, SHADES[part.op]
        width = right - left
        rim, corner = shades.edge if width > 4 else "", 2 if width > 6 else 0
        yield rect(left, top, width, height, fill(part.op, part.microbatch), corner=corner, rim=rim)
        if band := min(bands[at], 3) * 2.5:
            yield rect(left, top + height - band, width, band, shades.edge)
        label = "" if part.microbatch is None else str(part.microbatch)
        roomy = len(parts) == 1 and layout.row > 20 and right - left >= _DIGIT * len(label) + 3
        size = 11 if roomy else 9
        if label and right - left >= _DIGIT * size / 11 * len(label) + 1:
            x, baseline = px((left + right) / 2), px(top + height / 2 + size * 0.36 - band / 3)
            yield f'<text x="{x}" y="{baseline}" font-size="{size}" fill="{shades.ink}">{label}</text>'


def _legend(timeline: Timeline, layout: _RankRows) -> tuple[list[str], int]:
    """Return the lines of the legend, and how many rows it takes."""
    lines, x, row = [], float(_LEFT), 0
    for swatch, name, hatch in _entries(timeline):
        length = 24 + 6.2 * len(name)
        if x > _LEFT and x + length > layout.width - 16:
            x, row = float(_LEFT), row + 1
        y = layout.bottom + 48 + 20 * row
        lines += [rect(x + at, y - 9 + top, wide, high, colour) for at, top, wide, high, colour in swatch]
        if hatch is not None:
            path = hatched(x, y - 9, 18, 11, hatch.lines)
            lines.append(f'<path d="{path}" stroke="{hatch.light}" fill="none"/>')
        lines.append(text(x + 24, y, name, fill=MUTED))
        x += length + 18
    return lines, row + 1


def _entries(timeline: Timeline) -> Iterator[tuple[list[tuple[float, float, float, float, str]], str, Hatch | None]]:
    """Yield the legend's entries: rectangles as (left, top, width, height, colour), their name, and a hatch."""
    actions = [action for track in timeline.tracks for action in track.actions]
    ops = {part.op for action in actions for part in action.work}
    ops |= {span.action.op for span in timeline.exchanges if span.end > span.start}
    for op in (op for op in OPS if op in ops):
        yield [(0, 0, 9, 11, SHADES[op].even), (9, 0, 9, 11, SHADES[op].odd)], OPS[op].name, None
    forward, backward, placement = SHADES[Op.FORWARD], SHADES[Op.BACKWARD], timeline.program.placement
    if placement.mirrored or any(len(placement.stages_of(rank)) > 1 for rank in range(timeline.num_ranks)):
        note = "second copy" if placement.mirrored else "further stage of the rank"
        yield [(0, 0, 18, 11, forward.even), (0, 8.5, 18, 2.5, forward.edge)], note, None
    if any(action.parts for action in actions):
        yield [(0, 0, 18, 5.5, forward.even), (0, 5.5, 18, 5.5, backward.even)], "overlapped pair", None
    present = {idle.cause for idle in timeline.causes}
    for cause, hatch in IDLE.items():
        if cause in present:
            yield [(0, 0, 18, 11, TRACK)], f"idle: {cause}", hatch


def _peak(timeline: Timeline, rank: int) -> str:
    if timeline.peak_bytes is None:
        return str(timeline.peak_activations[rank])
    return size_text(timeline.peak_bytes[rank])


def _percent(share: float) -> str:
    return f"{number(100 * share, 3)}%" if share >= 0.00005 else "0%"
