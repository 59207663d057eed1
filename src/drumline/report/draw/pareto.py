"""Bubble against memory as a picture: the searched front as a line, hand-made schedules as dots, the bound dashed.

::

    bubble
    │▒╎●──┐            ○ 1f1b
    │▒╎▒╌╌●────┐  ○ zb-h1
    │▒▒▒▒▒▒▒▒▒╌●──────────        ▒ below the bound, where nothing is possible
    └──────────────────────── memory
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from drumline.core.action import Op
from drumline.core.timeline.idle import Cause
from drumline.core.units import number, size_text
from drumline.plan.search.pareto import Pareto, Point
from drumline.report.draw.html import plain_page
from drumline.report.draw.markup import card, table_html
from drumline.report.draw.palette import IDLE, MUTED, SHADES, TRACK
from drumline.report.draw.sheet import Axis, circle, grouped, level, px, sheet, text, upright
from drumline.report.draw.table import table

_LEFT, _TOP, _RIGHT, _BOTTOM = 64.0, 64.0, 24.0, 56.0
_BROAD, _SLIM = 860, 320  # widths on a page: in a wide window, and in a narrow one
_ABOUT = "line: searched; dots: hand-made schedules; dashed: lower bound, nothing is possible in the shade"
_LINE, _DOT, _LIMIT = SHADES[Op.FORWARD].edge, SHADES[Op.BACKWARD_INPUT].edge, IDLE[Cause.FILL].light


class _Plane(NamedTuple):
    """Maps memory to the horizontal axis, and bubble to the vertical axis."""

    memory: Axis
    bubble: Axis

    def place(self, memory: float, bubble: float) -> tuple[float, float]:
        return self.memory.at(memory), self.bubble.at(min(bubble, self.bubble.high))


def pareto_svg(picture: Pareto, *, width: int = 800, height: int = 420, headed: bool = True) -> str:
    """Return the picture as a standalone SVG, or not `headed` by its title for a page that has it.

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
    corners = _bound(plane, picture)
    lines = [_shade(plane, corners), *_axes(plane, picture.unit), grouped(_drawn_bound(plane, corners, picture))]
    lines.append(grouped(_front(plane, front, picture.unit)))
    dots = [plane.place(point.memory, point.bubble) for point in others]
    labels = _Labels(plane, [*dots, *(plane.place(point.memory, point.bubble) for point in front)])
    (left, down), (right, _) = max(pairwise(corners), key=lambda pair: pair[1][0] - pair[0][0])
    lines += labels.put((left + right) / 2, down, "lower bound")
    notes = (f"{point.name}: {_memory_text(point.memory, picture.unit)}, {point.bubble:.2%}" for point in others)
    lines.append(grouped(circle(*dot, 4, _DOT, note=note) for dot, note in zip(dots, notes, strict=True)))
    for (x, y), point in zip(dots, others, strict=True):
        above = " ↑" if point.bubble > plane.bubble.high else ""
        lines += labels.put(x, y, point.name + above)
    return sheet(lines, width=width, height=height, title=_title(picture), about=_ABOUT, headed=headed)


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
    pictures = "".join(
        f'<div class="drawn {name}">{pareto_svg(picture, width=width, headed=False)}</div>'
        for name, width in (("broad", _BROAD), ("slim", _SLIM))
    )
    header, rows = _listed(picture)
    about = f'<p class="note">{_ABOUT}</p>'
    parts = [
        card("Bubble against memory", about + pictures, wide=True),
        card("The least bubble for each memory", table_html(header, rows, words=(3, 4)), wide=True),
    ]
    return plain_page(_title(picture), "".join(parts))


def pareto_table(picture: Pareto, *, width: int = 120) -> str:
    """Return the front as a table: for each memory, the searched program and the best hand-made one that fits.

    >>> from drumline.core.costs import Costs
    >>> from drumline.plan.search.pareto import pareto
    >>> print(pareto_table(pareto(Costs(), 2, num_microbatches=4, placement="linear", seconds=2)))
    microbatches held  bubble   bound  placement  best hand-made  its bubble
                    1  40.00%  40.00%     linear      one by one      40.00%
                    2   7.69%   7.69%     linear           zb-h1       7.69%
    """
    return table(*_listed(picture), width=width, left=0)


def _listed(picture: Pareto) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the table."""
    rows = []
    for point in picture.front:
        fitting = [other for other in picture.hand_made if other.memory <= point.memory * (1 + 1e-12)]
        best = min(fitting, key=lambda other: other.bubble, default=None)
        memory = size_text(point.memory) if picture.unit == "bytes" else number(point.memory)
        hand_made = [best.name, f"{best.bubble:.2%}"] if best else ["none", ""]
        rows.append([memory, f"{point.bubble:.2%}", f"{point.bound or 0.0:.2%}", point.placement, *hand_made])
    header = [f"{picture.unit} held", "bubble", "bound", "placement", "best hand-made", "its bubble"]
    return header, rows


def _shown(picture: Pareto) -> list[Point]:
    """Return the hand-made schedules to draw; only the first of several at the same place."""
    seen_points: dict[tuple[float, float], Point] = {}
    for point in picture.hand_made:
        seen_points.setdefault((round(point.memory, 9), round(point.bubble, 9)), point)
    return list(seen_points.values())


def _axes(plane: _Plane, unit: str) -> Iterator[str]:
    left, right, bottom = plane.memory.start, plane.memory.end, plane.bubble.start
    size, name = 1.0, ""
    if unit == "bytes":  # round numbers of a unit, not of bytes
        name = size_text(plane.memory.high).split()[1]
        size = 1024.0 ** ("B", "KiB", "MiB", "GiB", "TiB").index(name)
    memory = replace(plane.memory, high=plane.memory.high / size)
    yield from upright(
        memory,
        plane.bubble.end,
        bottom + 5,
        most=min(10, int((right - left) / 58)),
        written=lambda mark: f"{number(mark)} {name}".rstrip(),
    )
    yield from level(plane.bubble, left, right, most=8, written=lambda mark: f"{number(100 * mark, 3)}%")
    yield text(right, bottom + 40, f"{unit} a rank holds", anchor="end", fill=MUTED)


def _bound(plane: _Plane, picture: Pareto) -> list[tuple[float, float]]:
    """Return the corners of the bound from the left: steps at its values, each from one limit up to the next.

    Less memory than the smallest limit holds not even one microbatch, so there the bound goes straight up.
    """
    limits = sorted({point.limit or 0.0 for point in picture.searched})
    places = [plane.place(limit, picture.possible(limit)) for limit in limits]
    x, y = places[0]
    corners = [(x, plane.bubble.end), (x, y)]
    for x, y in places[1:]:
        corners += [(corners[-1][0], y), (x, y)]
    return [*corners, (plane.memory.end, y)]


def _shade(plane: _Plane, corners: Sequence[tuple[float, float]]) -> str:
    """Draw a shade over what no program reaches."""
    left, bottom, top = px(plane.memory.start), px(plane.bubble.start), px(plane.bubble.end)
    return f'<path d="{_path(corners)}V{bottom}H{left}V{top}Z" fill="{TRACK}"/>'


def _drawn_bound(plane: _Plane, corners: Sequence[tuple[float, float]], picture: Pareto) -> Iterator[str]:
    """Draw the bound as a dashed line, with a mark at each limit that says its value."""
    yield f'<path d="{_path(corners)}" fill="none" stroke="{_LIMIT}" stroke-width="1.5" stroke-dasharray="5 4"/>'
    for limit in sorted({point.limit or 0.0 for point in picture.searched}):
        least = picture.possible(limit)
        note = f"lower bound: within {_memory_text(limit, picture.unit)}, no program idles less than {least:.2%}"
        yield circle(*plane.place(limit, least), 2.5, _LIMIT, note=note)


def _path(corners: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{px(x)} {px(y)}" for x, y in corners)


def _front(plane: _Plane, front: Sequence[Point], unit: str) -> Iterator[str]:
    places = [plane.place(point.memory, point.bubble) for point in front]
    (x, y), *rest = [(px(x), px(y)) for x, y in places]
    path = f"M{x} {y}" + "".join(f"H{x}V{y}" for x, y in rest)
    yield f'<path d="{path}H{px(plane.memory.end)}" fill="none" stroke="{_LINE}" stroke-width="2"/>'
    for place, point in zip(places, front, strict=True):
        yield circle(
            *place,
            4,
            _LINE,
            note=f"searched, {point.placement}: {_memory_text(point.memory, unit)}, {point.bubble:.2%}",
        )


def _memory_text(memory: float, unit: str) -> str:
    return size_text(memory) if unit == "bytes" else f"{number(memory)} microbatches"


class _Labels:
    """Words beside places, each on the first side where it covers neither a dot nor other words."""

    def __init__(self, plane: _Plane, dots: Sequence[tuple[float, float]]) -> None:
        self._plane = plane
        self._taken = [(x - 6, y - 6, x + 6, y + 6) for x, y in dots]

    def put(self, x: float, y: float, words: str) -> Iterator[str]:
        """Yield the words, unless there is no room for them anywhere."""
        wide = 6.2 * len(words)
        sides = ((8, -5), (8, 13), (-8 - wide, -5), (-8 - wide, 13), (-wide / 2, -11), (-wide / 2, 20))
        for right, down in sides:
            left, base = x + right, y + down
            box = (left, base - 9, left + wide, base + 3)
            inside = box[0] >= self._plane.memory.start and box[2] <= self._plane.memory.end + _RIGHT
            if inside and box[3] < self._plane.bubble.start and not any(_meet(box, entry) for entry in self._taken):
                self._taken.append(box)
                yield text(left, base, words, fill=MUTED)
                return


def _meet(entry: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return entry[0] < other[2] and entry[2] > other[0] and entry[1] < other[3] and entry[3] > other[1]
