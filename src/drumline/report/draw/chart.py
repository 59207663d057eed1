"""Plain charts as a standalone SVG.

::

    chart    curves and points: formulas, simulations and measurements on one sheet
    bars     stacked bars: one bar per row, its parts in the order of the legend
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from drumline.core.errors import UsageError
from drumline.core.units import number
from drumline.report.draw.palette import MUTED, TRACK
from drumline.report.draw.sheet import Axis, Plane, circle, grouped, level, px, rect, sheet, text, upright

# Okabe and Ito's hues at full strength, the light ones darker: lines are thin, and stand out 3:1 on white.
HUES = ("#0072b2", "#d55e00", "#009e73", "#b8608f", "#a87400", "#2b8ab8", "#17212b")
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 54, 46
_ENTRY = 18  # height of a line of the legend
_NAMES, _ABOVE = 190, 60  # most room for the names of bars, and above them
_LONGEST = 28  # letters of a name that fit


@dataclass(frozen=True, slots=True)
class Series:
    """One curve, or with `marks` single points: (x, y) each.

    On a page, `kind` is the class that has its colour, and `run` the name of the run that it shows.
    """

    name: str
    points: Sequence[tuple[float, float]]
    marks: bool = False
    dashed: bool = False
    kind: str = ""
    run: str = ""


@dataclass(frozen=True, slots=True)
class Graph:
    """What a chart shows: all series, and the words around them. `log_x` doubles from mark to mark.

    The x axis begins at the first point, or at `x_from`.
    """

    series: Sequence[Series]
    title: str
    x_label: str
    y_label: str
    log_x: bool = False
    x_from: float | None = None

    def check(self) -> None:
        """Raise an error if it cannot be drawn."""
        points = [point for curve in self.series for point in curve.points]
        if not points or not all(math.isfinite(x) and math.isfinite(y) for x, y in points):
            raise UsageError("the chart has no points, or one that is not finite", expected="finite numbers to draw")
        if self.log_x and min(x for x, _ in points) <= 0:
            raise UsageError(f"x is {number(min(x for x, _ in points))} on a logarithmic axis", expected="x above 0")

    def svg(self, *, width: int = 720, height: int = 400) -> str:
        """Return it as an SVG document."""
        words = {"title": self.title, "x_label": self.x_label, "y_label": self.y_label}
        return chart(self.series, **words, width=width, height=height, log_x=self.log_x, x_from=self.x_from)


def chart(
    series: Sequence[Series],
    *,
    title: str,
    x_label: str,
    y_label: str,
    width: int = 720,
    height: int = 400,
    log_x: bool = False,
    x_from: float | None = None,
) -> str:
    """Return an SVG document with all series; tooltips show each point's numbers. `log_x` doubles from mark to mark.

    The x axis begins at the first point, or at `x_from`. On a page, `plot` follows its theme and its width.

    >>> bound = Series("M / (M + 1)", [(1, 0.5), (4, 0.8)])
    >>> picture = chart([bound], title="Bound", x_label="M", y_label="utilisation")
    >>> picture.count("<polyline"), "utilisation" in picture
    (1, True)
    """
    Graph(series, title, x_label, y_label, log_x, x_from).check()
    points = [point for curve in series for point in curve.points]
    xs, ys = zip(*points, strict=True)
    first = min(xs) if x_from is None else min(x_from, *xs)
    across = Axis(first, max(xs), _LEFT, width - _RIGHT, log_x)
    plane = Plane(across, Axis(min(0.0, *ys), max(ys), height - _BOTTOM, _TOP))
    lines = [*level(plane.y, across.start, across.end, most=6), *_marks(across, plane.y.start)]
    lines.append(text((across.start + across.end) / 2, height - 10, x_label, anchor="middle", fill=MUTED))
    for at, curve in enumerate(series):
        hue = HUES[at % len(HUES)]
        later = {point for other in series[at + 1 :] if other.marks for point in other.points}
        lines.append(grouped(_drawn(curve, hue, plane, later, (x_label, y_label))))
        lines += _entry(curve, hue, height + 12 + at * _ENTRY)
    return sheet(lines, width=width, height=height + 10 + len(series) * _ENTRY, title=title, about=y_label)


def _marks(axis: Axis, bottom: float) -> Iterator[str]:
    for mark in axis.marks(10):
        yield f'<path d="M{px(axis.at(mark))} {px(bottom)}v4" stroke="{MUTED}"/>'
        yield text(axis.at(mark), bottom + 16, number(mark), anchor="middle", fill=MUTED)


def _drawn(
    series: Series, hue: str, plane: Plane, later: Collection[tuple[float, float]], labels: tuple[str, str]
) -> Iterator[str]:
    """Draw a curve or points; a point that a later one lies on is larger, so that both are seen."""
    covers = [plane.at(*point) for point in later] if series.marks else []
    places = [plane.at(*point) for point in series.points]
    if not series.marks:
        corners = " ".join(f"{px(x)},{px(y)}" for x, y in places)
        yield f'<polyline points="{corners}" fill="none" {_stroke(series, hue)}/>'
    for place, (x, y) in zip(places, series.points, strict=True):
        radius = 4.5 if series.marks else 2.5
        if any(math.dist(place, cover) < 4.5 for cover in covers):
            radius = 7.5
        yield circle(*place, radius, hue, note=f"{series.name}: {labels[0]} {number(x, 4)}, {labels[1]} {number(y, 4)}")


def _entry(series: Series, hue: str, y: float) -> Iterator[str]:
    line = f'<path d="M{_LEFT} {y - 4}h20" {_stroke(series, hue)}/>'
    yield circle(_LEFT + 10, y - 4, 4.5, hue) if series.marks else line
    yield text(_LEFT + 28, y, series.name, fill=MUTED)


def _stroke(series: Series, hue: str) -> str:
    return f'stroke="{hue}" stroke-width="2"' + (' stroke-dasharray="5 4"' if series.dashed else "")


@dataclass(frozen=True, slots=True)
class Bar:
    """A row: its name, its parts by the names in the legend, and a note after it."""

    name: str
    parts: Mapping[str, float]
    note: str = ""


def bars(
    rows: Sequence[Bar],
    hues: Mapping[str, str],
    *,
    title: str,
    x_label: str,
    width: int = 900,
    row: int = 30,
    right: int = 90,
    unit: str = "",
) -> str:
    """Draw the bars, `row` pixels each; `hues` are the parts' colours, in drawing order.

    Notes go in the `right` margin; `unit` is the unit of the numbers in tooltips.

    >>> picture = bars([Bar("TP8", {"busy": 2.0, "idle": 1.0}, "3 s")], {"busy": "#009e73", "idle": "#999999"},
    ...                title="A step", x_label="seconds")
    >>> picture.count("<title>"), "3 s" in picture
    (2, True)
    """
    if not rows:
        raise UsageError("there are no bars", expected="something to draw")
    names = min(_NAMES, 30 + 6.5 * max(len(bar.name) for bar in rows))
    axis = Axis(0, max(sum(bar.parts.values()) for bar in rows) or 1.0, names, width - right)
    bottom = _ABOVE + row * len(rows)
    shown = [part for part in hues if any(bar.parts.get(part, 0.0) > 0 for bar in rows)]
    lines = [*upright(axis, _ABOVE - 4, bottom + 3, most=8)]
    for at, bar in enumerate(rows):
        lines.append(grouped(_bar(bar, hues, axis, _ABOVE + at * row, row, unit)))
    for at, part in enumerate(shown):
        x, y = 16 + at % 4 * (width - 32) / 4, bottom + 40 + 20 * (at // 4)
        lines += [rect(x, y - 9, 14, 11, hues[part], corner=2), text(x + 20, y, part, fill=MUTED)]
    height = bottom + 44 + 20 * -(-len(shown) // 4)
    return sheet(lines, width=width, height=height, title=title, about=x_label)


def _bar(bar: Bar, hues: Mapping[str, str], axis: Axis, top: float, row: int, unit: str) -> Iterator[str]:
    thick = round(row * 0.68)
    middle = top + thick / 2 + 7
    label = bar.name if len(bar.name) <= _LONGEST else f"...{bar.name[3 - _LONGEST :]}"
    yield text(axis.start - 10, middle, label, anchor="end")
    yield rect(axis.start, top + 4, axis.at(sum(bar.parts.values())) - axis.start, thick, TRACK)
    drawn = 0.0
    for part in (part for part in hues if bar.parts.get(part, 0.0) > 0):
        x, size = axis.at(drawn), bar.parts[part]
        drawn += size
        yield rect(
            x, top + 4, axis.at(drawn) - x, thick, hues[part], note=f"{bar.name}, {part}: {number(size, 4)}{unit}"
        )
    yield text(axis.at(drawn) + 8, middle, bar.note, fill=MUTED)
