"""Bubble against memory as a picture: the searched front as a line, hand-made schedules as dots, the bound shaded.

bubble
│ ●──┐            ○ 1f1b
│    ●────┐  ○ zb-h1
│▒▒▒▒▒▒▒▒▒●──────────●        no program can lie in the shaded area
└──────────────────────── memory
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from drumline.core.action import Op
from drumline.plan.search.pareto import Pareto, Point
from drumline.report.draw.palette import MUTED, SHADES, TRACK
from drumline.report.draw.sheet import Axis, circle, level, number, picture_page, sheet, text, upright
from drumline.report.table import table
from drumline.report.units import size_text

_LEFT, _TOP, _RIGHT, _BOTTOM = 64.0, 64.0, 24.0, 56.0
_LINE, _DOT = SHADES[Op.FORWARD].edge, SHADES[Op.BACKWARD_INPUT].odd


class _Plane(NamedTuple):
    """Maps memory to the horizontal axis, and bubble to the vertical axis."""

    memory: Axis
    bubble: Axis

    def place(self, memory: float, bubble: float) -> tuple[float, float]:
        return self.memory.at(memory), self.bubble.at(min(bubble, self.bubble.high))


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
    # Points that idle more than the smallest searched program are off the sheet; they are drawn at its upper edge.
    bubble = Axis(0, max(point.bubble for point in front) * 1.08 or 1.0, height - _BOTTOM, _TOP)
    plane = _Plane(Axis(0, most * 1.08, _LEFT, width - _RIGHT), bubble)
    lines = [*_axes(plane, picture.unit), *_shade(plane, picture), *_front(plane, front)]
    lines += [line for point in others for line in _dot(plane, point)]
    about = "line: searched; dots: hand-made schedules; shaded: below the bound, where no program can lie"
    return sheet(lines, width=width, height=height, title=_title(picture), about=about)


def _title(picture: Pareto) -> str:
    return f"{picture.num_ranks} ranks, {picture.num_microbatches} microbatches: bubble against memory"


def pareto_page(picture: Pareto) -> str:
    """Return the picture as an HTML page that opens from disk, with its numbers below.

    >>> from drumline.core.costs import Costs
    >>> from drumline.plan.search.pareto import pareto
    >>> page = pareto_page(pareto(Costs(), 2, num_microbatches=2, placement="linear", seconds=1))
    >>> page.startswith("<!doctype html>"), "<svg" in page
    (True, True)
    """
    return picture_page(_title(picture), pareto_svg(picture), pareto_table(picture))


def pareto_table(picture: Pareto, *, width: int = 120) -> str:
    """Return the front as a table: for each memory, the searched program and the best hand-made one that fits.

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
        hand_made = [best.name, f"{best.bubble:.2%}"] if best else ["none", ""]
        rows.append([memory, f"{point.bubble:.2%}", f"{point.bound or 0.0:.2%}", point.placement, *hand_made])
    header = [picture.unit, "bubble", "bound", "placement", "best hand-made", "its bubble"]
    return table(header, rows, width=width, left=0)


def _shown(picture: Pareto) -> list[Point]:
    """Return the hand-made schedules to draw; only the first of several at the same place."""
    seen: dict[tuple[float, float], Point] = {}
    for point in picture.hand_made:
        seen.setdefault((round(point.memory, 9), round(point.bubble, 9)), point)
    return list(seen.values())


def _axes(plane: _Plane, unit: str) -> Iterator[str]:
    left, right, bottom = plane.memory.start, plane.memory.end, plane.bubble.start
    written = size_text if unit == "bytes" else "{:g}".format
    yield from upright(plane.memory, plane.bubble.end, bottom + 5, most=10, written=written)
    yield from level(plane.bubble, left, right, most=8, written=lambda mark: f"{100 * mark:.3g}%")
    yield text(right, bottom + 40, f"{unit} held by a rank", anchor="end", fill=MUTED)


def _shade(plane: _Plane, picture: Pareto) -> Iterator[str]:
    """Shade what no program reaches, from the smallest searched limit to the largest."""
    limits = sorted({point.limit or 0.0 for point in picture.searched})
    places = [plane.place(limit, picture.possible(limit)) for limit in limits]
    bottom = number(plane.bubble.start)
    (x, y), *rest = [(number(x), number(y)) for x, y in places]
    path = f"M{x} {bottom}V{y}" + "".join(f"V{y}H{x}" for x, y in rest)
    yield f'<path d="{path}V{bottom}Z" fill="{TRACK}"/>'


def _front(plane: _Plane, front: Sequence[Point]) -> Iterator[str]:
    places = [plane.place(point.memory, point.bubble) for point in front]
    (x, y), *rest = [(number(x), number(y)) for x, y in places]
    path = f"M{x} {y}" + "".join(f"H{x}V{y}" for x, y in rest)
    yield f'<path d="{path}H{number(plane.memory.end)}" fill="none" stroke="{_LINE}" stroke-width="2"/>'
    for place, point in zip(places, front, strict=True):
        yield circle(*place, 4, _LINE, note=f"searched, {point.placement}: {point.memory:g}, {point.bubble:.2%}")


def _dot(plane: _Plane, point: Point) -> Iterator[str]:
    x, y = plane.place(point.memory, point.bubble)
    yield circle(x, y, 4, _DOT, note=f"{point.name}: {point.memory:g}, {point.bubble:.2%}")
    yield text(x + 7, y - 6, point.name, fill=MUTED)
