"""A timeline as a standalone SVG, for papers and READMEs.

Attributes only, no style sheet, no ids and no script: converters draw it alike, and several fit into one page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice

from drumline.core.action import Action, Op
from drumline.core.timeline.timeline import Timeline
from drumline.report.draw.palette import INK, MUTED, PAPER, RULE, SHADES, TRACK, fill
from drumline.report.draw.scene import OPS, further, ticks

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"
_LEFT, _RIGHT, _TOP = 64, 132, 64
_DIGIT = 6.3  # width of a digit at the labels' size
_TITLES_UP_TO = 4000  # boxes; more would double the file for tooltips nobody can aim at


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where ranks and times lie on the sheet."""

    width: float
    num_ranks: int
    start: float
    makespan: float

    @property
    def row(self) -> float:
        return 26.0 if self.num_ranks <= 16 else 16.0

    @property
    def bottom(self) -> float:
        return _TOP + self.num_ranks * (self.row + 6) - 6

    @property
    def room(self) -> float:
        return self.width - _LEFT - _RIGHT

    def x(self, time: float) -> float:
        return _LEFT + (time - self.start) * self.room / (self.makespan or 1.0)

    def y(self, rank: int) -> float:
        return _TOP + rank * (self.row + 6)


def svg(timeline: Timeline, *, width: int = 1000, title: str | None = None) -> str:
    r"""Return the timeline as an SVG document: a row per rank, a box per timed action, idle share and peak behind.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> picture = svg(simulate(Program.parse("0F0,0B0\n1F0,1B0", name="tiny")))
    >>> picture.count('class="box"'), "bubble 50%" in picture
    (4, True)
    """
    name = timeline.program.name if title is None else title
    layout = _Layout(max(width, 320), timeline.num_ranks, timeline.start, timeline.makespan)
    legend, legend_rows = _legend(timeline, layout)
    height = layout.bottom + 46 + 20 * legend_rows
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_n(layout.width)}" height="{_n(height)}" '
        f'viewBox="0 0 {_n(layout.width)} {_n(height)}" role="img" aria-label="{_safe(_described(timeline, name))}" '
        f'font-family="{_safe(FONT)}" font-size="11" fill="{INK}">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        *_header(timeline, name, layout),
        *_axis(layout),
    ]
    for rank in range(timeline.num_ranks):
        lines += _row(timeline, rank, layout)
    return "\n".join([*lines, *legend, "</svg>", ""])


def _described(timeline: Timeline, name: str) -> str:
    program = timeline.program
    return (
        f"{name}: {program.num_ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches, "
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.3g}"
    )


def _header(timeline: Timeline, name: str, layout: _Layout) -> Iterator[str]:
    program = timeline.program
    facts = (
        f"{program.num_ranks} ranks · {program.num_stages} stages · {program.num_microbatches} microbatches · "
        f"makespan {timeline.makespan:g} · bubble {_percent(timeline.bubble)}"
    )
    yield f'<text x="16" y="26" font-size="15" font-weight="600">{_safe(name)}</text>'
    yield f'<text x="16" y="44" fill="{MUTED}">{_safe(facts)}</text>'
    for column, at in (("idle", 76), ("peak", 16)):
        yield f'<text x="{_n(layout.width - at)}" y="{_TOP - 7}" text-anchor="end" fill="{MUTED}">{column}</text>'


def _axis(layout: _Layout) -> Iterator[str]:
    marks = ticks(layout.makespan, most=max(2, int(layout.room / 70)))
    for mark in marks:
        x = _n(layout.x(layout.start + mark))
        yield f'<path d="M{x} {_TOP - 3}V{_n(layout.bottom + 5)}" stroke="{RULE}"/>'
        label = f"{mark:g}"
        yield f'<text x="{x}" y="{_n(layout.bottom + 18)}" text-anchor="middle" fill="{MUTED}">{label}</text>'


def _row(timeline: Timeline, rank: int, layout: _Layout) -> Iterator[str]:
    y, middle = layout.y(rank), _n(layout.y(rank) + layout.row / 2 + 4)
    share = timeline.idle[rank] / timeline.makespan if timeline.makespan > 0 else 0.0
    yield f'<text x="16" y="{middle}">rank {rank}</text>'
    yield f'<text x="{_n(layout.width - 76)}" y="{middle}" text-anchor="end">{_percent(share)}</text>'
    yield f'<text x="{_n(layout.width - 16)}" y="{middle}" text-anchor="end">{_safe(_peak(timeline, rank))}</text>'
    yield f'<rect x="{_LEFT}" y="{_n(y)}" width="{_n(layout.room)}" height="{_n(layout.row)}" rx="2" fill="{TRACK}"/>'
    track, columns = timeline.tracks[rank], timeline.columns
    here = columns.rank == rank
    local = iter(further(timeline.program.placement, columns.stage[here], columns.microbatch[here]).tolist())
    titled = timeline.program.num_actions <= _TITLES_UP_TO
    yield '<g text-anchor="middle">'
    later = []
    for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
        note = f"<title>{_safe(f'{action}: {start:g} to {end:g}')}</title>" if titled else ""
        bands = list(islice(local, len(action.work)))
        box = f'<g class="box">{note}{"".join(_box(action, layout.x(start), layout.x(end), y, layout, bands))}</g>'
        if end > start:
            yield box
        else:
            later.append(box)  # an action of no length is a mark on top of what follows it
    yield from later
    for span in timeline.exchanges:
        if span.rank == rank and span.end > span.start:
            yield _rect(layout.x(span.start), y + layout.row + 1, layout.x(span.end), 3, fill(span.action.op, 0))
    yield "</g>"


def _box(action: Action, left: float, right: float, y: float, layout: _Layout, bands: Sequence[int]) -> Iterator[str]:
    parts = action.work
    height = layout.row / len(parts)
    if right - left < 1.5:
        right = left + (1.5 if right == left else right - left)
    elif right - left > 4:
        right -= 1
    for at, part in enumerate(parts):
        top, shades = y + at * height, SHADES[part.op]
        yield _rect(left, top, right, height, fill(part.op, part.microbatch), rounded=right - left > 6)
        if band := min(bands[at], 3) * 2.5:
            yield _rect(left, top + height - band, right, band, shades.edge)
        label = "" if part.microbatch is None else str(part.microbatch)
        roomy = len(parts) == 1 and layout.row > 20 and right - left >= _DIGIT * len(label) + 3
        size = 11 if roomy else 9
        if label and right - left >= _DIGIT * size / 11 * len(label) + 1:
            x, baseline = _n((left + right) / 2), _n(top + height / 2 + size * 0.36 - band / 3)
            yield f'<text x="{x}" y="{baseline}" font-size="{size}" fill="{shades.ink}">{label}</text>'


def _rect(left: float, top: float, right: float, height: float, colour: str, *, rounded: bool = False) -> str:
    corner = ' rx="2"' if rounded else ""
    return (
        f'<rect x="{_n(left)}" y="{_n(top)}" width="{_n(right - left)}" height="{_n(height)}"{corner} fill="{colour}"/>'
    )


def _legend(timeline: Timeline, layout: _Layout) -> tuple[list[str], int]:
    """Return the legend's lines, and how many rows it takes."""
    lines, x, row = [], float(_LEFT), 0
    for swatch, name in _entries(timeline):
        length = 24 + 6.2 * len(name)
        if x > _LEFT and x + length > layout.width - 16:
            x, row = float(_LEFT), row + 1
        y = layout.bottom + 48 + 20 * row
        lines += [_rect(x + at, y - 9 + top, x + at + wide, high, colour) for at, top, wide, high, colour in swatch]
        lines.append(f'<text x="{_n(x + 24)}" y="{_n(y)}" fill="{MUTED}">{name}</text>')
        x += length + 18
    return lines, row + 1


def _entries(timeline: Timeline) -> Iterator[tuple[list[tuple[float, float, float, float, str]], str]]:
    """Yield what the legend explains: rectangles as (left, top, width, height, colour), and their name."""
    actions = [action for track in timeline.tracks for action in track.actions]
    ops = {part.op for action in actions for part in action.work}
    ops |= {span.action.op for span in timeline.exchanges if span.end > span.start}
    for op in (op for op in OPS if op in ops):
        yield [(0, 0, 9, 11, SHADES[op].even), (9, 0, 9, 11, SHADES[op].odd)], OPS[op].name
    forward, backward, placement = SHADES[Op.FORWARD], SHADES[Op.BACKWARD], timeline.program.placement
    if placement.mirrored or any(len(placement.stages_of(rank)) > 1 for rank in range(timeline.num_ranks)):
        note = "second copy" if placement.mirrored else "further stage of the rank"
        yield [(0, 0, 18, 11, forward.even), (0, 8.5, 18, 2.5, forward.edge)], note
    if any(action.parts for action in actions):
        yield [(0, 0, 18, 5.5, forward.even), (0, 5.5, 18, 5.5, backward.even)], "overlapped pair"


def _peak(timeline: Timeline, rank: int) -> str:
    if timeline.peak_bytes is None:
        return str(timeline.peak_activations[rank])
    return size_text(timeline.peak_bytes[rank])


def size_text(num_bytes: float) -> str:
    """Return a size for people.

    >>> size_text(512), size_text(3.25 * 2**30)
    ('512 B', '3.25 GiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def _percent(share: float) -> str:
    return f"{100 * share:.3g}%" if share >= 0.00005 else "0%"


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _safe(text: str) -> str:
    """Escape text, and drop the control characters that XML cannot carry."""
    return escape("".join(c for c in text if c >= " " and c not in "\ufffe\uffff" and not "\ud800" <= c <= "\udfff"))
