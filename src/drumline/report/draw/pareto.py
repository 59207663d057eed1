"""Bubble against memory as a picture: the searched front as a line, hand-made schedules as dots, the bound as a shade.

bubble
│ ●──┐            ○ 1f1b
│    ●────┐  ○ zb-h1
│▒▒▒▒▒▒▒▒▒●──────────●        below the shade nothing is possible
└──────────────────────── memory
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from drumline.core.action import Op
from drumline.plan.search.pareto import Pareto, Point
from drumline.report.draw.palette import INK, MUTED, PAPER, RULE, SHADES, TRACK
from drumline.report.draw.scene import ticks
from drumline.report.draw.svg import FONT, size_text
from drumline.report.table import table

_LEFT, _TOP, _RIGHT, _BOTTOM = 64.0, 64.0, 24.0, 56.0
_LINE, _DOT = SHADES[Op.FORWARD].edge, SHADES[Op.BACKWARD_INPUT].odd


@dataclass(frozen=True, slots=True)
class _Sheet:
    """Where memory and bubble lie on it."""

    width: float
    height: float
    memory: float
    bubble: float

    def x(self, memory: float) -> float:
        return _LEFT + (self.width - _LEFT - _RIGHT) * memory / self.memory

    def y(self, bubble: float) -> float:
        return self.height - _BOTTOM - (self.height - _TOP - _BOTTOM) * min(bubble / self.bubble, 1.0)


def pareto_svg(picture: Pareto, *, width: int = 800, height: int = 420) -> str:
    """Return the picture as a standalone SVG.

    >>> from drumline.core.costs import Costs
    >>> from drumline.plan.search.pareto import pareto
    >>> drawn = pareto_svg(pareto(Costs(), 2, num_microbatches=2, placement="linear", seconds=1))
    >>> drawn.startswith("<svg"), "zb-h1" in drawn
    (True, True)
    """
    front, others = picture.front, _shown(picture)
    most = max(*(point.memory for point in (*front, *others)), *(point.limit or 0.0 for point in picture.searched))
    # What idles more than the smallest searched program is off the sheet; dots up there stick to its upper edge.
    sheet = _Sheet(width, height, most * 1.08, max(point.bubble for point in front) * 1.08 or 1.0)
    title = f"{picture.num_ranks} ranks, {picture.num_microbatches} microbatches: bubble against memory"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{escape(title)}" font-family="{escape(FONT)}" font-size="11" fill="{INK}">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        f'<text x="16" y="26" font-size="15" font-weight="600">{escape(title)}</text>',
        f'<text x="16" y="44" fill="{MUTED}">line: searched; dots: hand-made schedules; shade: below the bound, where '
        f"nothing is possible</text>",
        *_axes(sheet, picture.unit),
        *_shade(sheet, picture),
        *_front(sheet, front),
        *(line for point in others for line in _dot(sheet, point)),
        "</svg>",
    ]
    return "\n".join(lines)


def pareto_page(picture: Pareto) -> str:
    """Return the picture as one HTML page that opens from disk, with its numbers below.

    >>> from drumline.core.costs import Costs
    >>> from drumline.plan.search.pareto import pareto
    >>> page = pareto_page(pareto(Costs(), 2, num_microbatches=2, placement="linear", seconds=1))
    >>> page.startswith("<!doctype html>"), "<svg" in page
    (True, True)
    """
    title = f"{picture.num_ranks} ranks, {picture.num_microbatches} microbatches: bubble against memory"
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">',
            f"<title>{escape(title)}</title>\n</head>\n<body>",
            pareto_svg(picture),
            f"<pre>{escape(pareto_table(picture))}</pre>",
            "</body>\n</html>",
        ]
    )


def pareto_table(picture: Pareto, *, width: int = 120) -> str:
    """Return the front as a table: at each memory the best hand-made schedule that fits beside what was searched.

    >>> from drumline.core.costs import Costs
    >>> from drumline.plan.search.pareto import pareto
    >>> print(pareto_table(pareto(Costs(), 2, num_microbatches=4, placement="linear", seconds=2)))
    activations  bubble   bound  placement  best hand-made  its bubble
              1  40.00%  40.00%     linear      one by one      40.00%
              2   7.69%   7.69%     linear           zb-h1       7.69%
    """
    rows = []
    for point in picture.front:
        fitting = [one for one in picture.hand_made if one.memory <= point.memory * (1 + 1e-12)]
        best = min(fitting, key=lambda one: one.bubble, default=None)
        memory = size_text(point.memory) if picture.unit == "bytes" else f"{point.memory:g}"
        rows.append(
            [
                memory,
                f"{point.bubble:.2%}",
                f"{point.bound or 0.0:.2%}",
                point.placement,
                best.name if best else "none",
                f"{best.bubble:.2%}" if best else "",
            ]
        )
    header = [picture.unit, "bubble", "bound", "placement", "best hand-made", "its bubble"]
    return table(header, rows, width=width, left=0)


def _shown(picture: Pareto) -> list[Point]:
    """Return the hand-made schedules to draw: of several in one place only the first."""
    seen: dict[tuple[float, float], Point] = {}
    for point in picture.hand_made:
        seen.setdefault((round(point.memory, 9), round(point.bubble, 9)), point)
    return list(seen.values())


def _axes(sheet: _Sheet, unit: str) -> Iterator[str]:
    bottom = sheet.height - _BOTTOM
    for mark in ticks(sheet.memory, most=10):
        x, label = sheet.x(mark), size_text(mark) if unit == "bytes" else f"{mark:g}"
        yield f'<path d="M{x:.1f} {_TOP:.1f}V{bottom + 5:.1f}" stroke="{RULE}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18:.1f}" text-anchor="middle" fill="{MUTED}">{label}</text>'
    for mark in ticks(sheet.bubble, most=8):
        y = sheet.y(mark)
        yield f'<path d="M{_LEFT - 5:.1f} {y:.1f}H{sheet.width - _RIGHT:.1f}" stroke="{RULE}"/>'
        yield f'<text x="{_LEFT - 8:.1f}" y="{y + 4:.1f}" text-anchor="end" fill="{MUTED}">{100 * mark:.3g}%</text>'
    name = "bytes a rank holds" if unit == "bytes" else "activations a rank holds"
    yield f'<text x="{sheet.width - _RIGHT:.1f}" y="{bottom + 40:.1f}" text-anchor="end" fill="{MUTED}">{name}</text>'


def _shade(sheet: _Sheet, picture: Pareto) -> Iterator[str]:
    """Draw what no program reaches, from the smallest limit that was searched to the largest."""
    limits = sorted({point.limit or 0.0 for point in picture.searched})
    bottom = sheet.height - _BOTTOM
    path = f"M{sheet.x(limits[0]):.1f} {bottom:.1f}V{sheet.y(picture.possible(limits[0])):.1f}"
    for limit in limits[1:]:
        path += f"V{sheet.y(picture.possible(limit)):.1f}H{sheet.x(limit):.1f}"
    yield f'<path d="{path}V{bottom:.1f}Z" fill="{TRACK}"/>'


def _front(sheet: _Sheet, front: Sequence[Point]) -> Iterator[str]:
    path = f"M{sheet.x(front[0].memory):.1f} {sheet.y(front[0].bubble):.1f}"
    for point in front[1:]:
        path += f"H{sheet.x(point.memory):.1f}V{sheet.y(point.bubble):.1f}"
    yield f'<path d="{path}H{sheet.width - _RIGHT:.1f}" fill="none" stroke="{_LINE}" stroke-width="2"/>'
    for point in front:
        note = f"<title>searched, {escape(point.placement)}: {point.memory:g}, {point.bubble:.2%}</title>"
        x, y = sheet.x(point.memory), sheet.y(point.bubble)
        yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_LINE}">{note}</circle>'


def _dot(sheet: _Sheet, point: Point) -> Iterator[str]:
    x, y = sheet.x(point.memory), sheet.y(point.bubble)
    note = f"<title>{escape(point.name)}: {point.memory:g}, {point.bubble:.2%}</title>"
    yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{_DOT}">{note}</circle>'
    yield f'<text x="{x + 7:.1f}" y="{y - 6:.1f}" fill="{MUTED}">{escape(point.name)}</text>'
