"""Charts on a page: curves and points that follow its theme and its width, with a legend in words that wrap.

`chart` draws the same graphs as a standalone SVG. Here widths are shares of the available room, heights are pixels, and
colours are classes, so that text keeps its size in every window.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

from drumline.core.units import number
from drumline.report.draw.chart import Graph, Series
from drumline.report.draw.markup import safe
from drumline.report.draw.palette import run_class
from drumline.report.draw.sheet import Axis, Plane, px

_HEIGHT = 190  # of the plane, as in the style sheet
_MOST = 7  # marks below a chart that a narrow window has room for


def plot(graph: Graph, *, written: Callable[[float], str] = number) -> str:
    """Return a graph as a figure; `written` writes the numbers of the vertical axis. Tooltips show each point's.

    >>> drawn = plot(Graph([Series("M / (M + 1)", [(1, 0.5), (4, 0.8)])], "Bound", "M", "utilisation"))
    >>> drawn.count("<circle cx") - 1, "M / (M + 1): M 4, utilisation 0.8" in drawn
    (1, True)
    """
    graph.check()
    points = [point for curve in graph.series for point in curve.points]
    xs, ys = zip(*points, strict=True)
    first = min(xs) if graph.x_from is None else min(graph.x_from, *xs)
    plane = Plane(Axis(first, max(xs), 0, 100, graph.log_x), Axis(min(0.0, *ys), max(ys), _HEIGHT, 0))
    lines = [*_level(plane, written), *_upright(plane)]
    keys = []
    for at, curve in enumerate(graph.series):
        kind = f'class="series {curve.kind or run_class(at)}"' + (f' data-run="{safe(curve.run)}"' if curve.run else "")
        later = [point for other in graph.series[at + 1 :] if other.marks for point in other.points]
        lines += [f"<g {kind}>", *_drawn(curve, plane, later, graph, written), "</g>"]
        sign = '<circle cx="10" cy="6" r="4.5"/>' if curve.marks else f'<line {_dashes(curve)}x2="20" y1="6" y2="6"/>'
        keys.append(f'<span><svg class="sign"><g {kind}>{sign}</g></svg>{safe(curve.name)}</span>')
    return (
        f'<figure class="graph"><p class="note">{safe(graph.y_label)}</p>'
        f'<svg class="plane" role="img" aria-label="{safe(graph.title)}">{"".join(lines)}</svg>'
        f'<p class="note across">{safe(graph.x_label)}</p><p class="keys">{"".join(keys)}</p></figure>'
    )


def _level(plane: Plane, written: Callable[[float], str]) -> Iterator[str]:
    for mark in plane.y.marks(6):
        y = px(plane.y.at(mark))
        yield f'<line class="rule" x2="100%" y1="{y}" y2="{y}"/>'
        yield f'<text x="-8" y="{px(plane.y.at(mark) + 4)}" text-anchor="end">{safe(written(mark))}</text>'


def _upright(plane: Plane) -> Iterator[str]:
    marks = plane.x.marks(_MOST)
    for mark in marks[:: math.ceil(len(marks) / _MOST)]:
        x = f"{px(plane.x.at(mark))}%"
        yield f'<line class="tick" x1="{x}" x2="{x}" y1="{_HEIGHT}" y2="{_HEIGHT + 4}"/>'
        yield f'<text x="{x}" y="{_HEIGHT + 17}" text-anchor="middle">{number(mark)}</text>'


def _drawn(
    curve: Series, plane: Plane, later: list[tuple[float, float]], graph: Graph, written: Callable[[float], str]
) -> Iterator[str]:
    """Yield a curve or points; a point that a later one lies on is larger, so that both are seen."""
    places = [plane.at(*point) for point in curve.points]
    if not curve.marks:
        for (x, y), (right, down) in pairwise(places):
            yield f'<line {_dashes(curve)}x1="{px(x)}%" x2="{px(right)}%" y1="{px(y)}" y2="{px(down)}"/>'
    covers = [plane.at(*point) for point in later] if curve.marks else []
    for place, (x, y) in zip(places, curve.points, strict=True):
        radius = 4.5 if curve.marks else 2.5
        if any(math.dist(place, cover) < 4.5 for cover in covers):
            radius = 7.5
        words = f"{curve.name}: {graph.x_label} {number(x, 4)}, {graph.y_label} {_exact(y, written)}"
        yield f'<circle cx="{px(place[0])}%" cy="{px(place[1])}" r="{radius}"><title>{safe(words)}</title></circle>'


def _exact(value: float, written: Callable[[float], str]) -> str:
    return number(value, 4) if written is number else written(value)


def _dashes(curve: Series) -> str:
    return 'stroke-dasharray="5 4" ' if curve.dashed else ""
