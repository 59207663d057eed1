"""Small pictures as markup, without script or inline style: stacked bars and curves that follow the theme.

Widths are shares of the available room, and colours are classes, so that one page suits every window and both themes.
Tooltips explain each part, and the page's script shows them to the keyboard, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from drumline.report.draw.palette import run_class
from drumline.report.draw.sheet import Axis, Plane

_POINTS = 400  # of a curve; more steps than that share one
_WIDTH, _HEIGHT = 1000, 100


class BarPart(NamedTuple):
    """A part of a bar: its class, its size, and its tooltip."""

    kind: str
    size: float
    title: str


def safe(text: object) -> str:
    """Escape text for markup.

    >>> safe("a < b")
    'a &lt; b'
    """
    return escape(str(text).encode("utf-8", "replace").decode())


def bar_row(
    name: str, parts: Sequence[BarPart], whole: float, value: str, *, about: str = "", kind: str = "", sign: str = ""
) -> str:
    """Return a stacked bar between its name and its total; `kind` holds classes of the row.

    Tooltips and the description for screen readers begin with `about`, or with the name. `sign` is markup before it.

    >>> bar_row("rank 0", [BarPart("busy", 1, "busy 1 s")], 2, "1 s").count('aria-label="rank 0: busy 1 s"')
    1
    """
    about, rects, at = safe(about or name), [], 0.0
    for part in parts:
        share = 100 * part.size / whole if whole > 0 else 0.0
        if share > 0:
            place, title = f'x="{at:.3f}%" width="{share:.3f}%"', f"<title>{about}: {safe(part.title)}</title>"
            rects.append(f'<rect {place} height="100%" class="part {part.kind}">{title}</rect>')
        at += share
    said = safe(", ".join(part.title for part in parts))
    picture = f'<svg class="bar" role="img" aria-label="{about}: {said}">{"".join(rects)}</svg>'
    words = f"<span>{sign}{safe(name)}</span>"
    return f'<div class="row {kind}">{words}{picture}<span class="value">{safe(value)}</span></div>'


def bar_rows(rows: Iterable[str]) -> str:
    """Return rows of bars as one picture: the page's script lets the keyboard go from part to part.

    >>> bar_rows([bar_row("rank 0", [BarPart("busy", 1, "busy 1 s")], 2, "1 s")]).startswith('<div class="bars">')
    True
    """
    return f'<div class="bars">{"".join(rows)}</div>'


def legend_html(kinds: Iterable[tuple[str, str]]) -> str:
    """Return a legend for the classes of bars or curves, given as (class, name).

    >>> legend_html([("busy", "busy")]).count("swatch")
    1
    """
    entries = (
        f'<span><svg class="swatch"><rect class="part {kind}"/></svg>{safe(name)}</span>' for kind, name in kinds
    )
    return f'<p class="keys">{"".join(entries)}</p>'


def run_sign(order: int, name: str) -> str:
    """Return the square that has a run's colour, wherever the run is named.

    >>> run_sign(1, "first")
    '<svg class="swatch"><rect class="part run-1" data-run="first"/></svg> '
    """
    return f'<svg class="swatch"><rect class="part {run_class(order)}" data-run="{safe(name)}"/></svg> '


def run_legend(names: Sequence[str]) -> str:
    """Return the legend of several runs, in their order.

    >>> run_legend(["first", "second"]).count("swatch")
    2
    """
    return f'<p class="keys">{"".join(f"<span>{run_sign(*run)}{safe(run[1])}</span>" for run in enumerate(names))}</p>'


def card(title: str, body: str, *, wide: bool = False) -> str:
    """Return a section of a page with its title; `wide` ones take the whole row.

    >>> card("ranks", "<p/>")
    '<div class="card"><h3>ranks</h3><p/></div>'
    """
    return f'<div class="card{" wide" if wide else ""}"><h3>{safe(title)}</h3>{body}</div>'


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return the main figures of a page, each with its name and a note."""
    items = (
        f"<div><dt>{safe(name)}</dt><dd>{safe(value)}</dd><dd class='note'>{safe(note)}</dd></div>"
        for name, value, note in figures
    )
    return f'<dl class="cards">{"".join(items)}</dl>'


def table_html(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, words: Sequence[int] = (), signs: Sequence[str] = ()
) -> str:
    """Return a table; the columns in `words` hold text, the others numbers. `signs` are markup before the rows' names.

    >>> '<td class="words"><i/>a</td><td>1</td>' in table_html(["run", "s"], [["a", "1"]], words=[0], signs=["<i/>"])
    True
    """
    left = [' class="words"' if at in words else "" for at in range(len(header))]
    head = "".join(f'<th scope="col"{kind}>{safe(name)}</th>' for name, kind in zip(header, left, strict=True))
    lines = []
    for at, row in enumerate(rows):
        cells = [f"<td{kind}>{safe(cell)}</td>" for cell, kind in zip(row, left, strict=True)]
        if signs:
            cells[0] = f"<td{left[0]}>{signs[at]}{safe(row[0])}</td>"
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


class PlotLine(NamedTuple):
    """A line: its class, its name, and (step, value) in step order."""

    kind: str
    name: str
    points: Sequence[tuple[int, float]]


def curves(
    name: str,
    lines: Sequence[PlotLine],
    written: Callable[[float], str],
    *,
    low: float,
    high: float,
    marks: Sequence[int] = (),
) -> str:
    """Return curves over steps in one frame from `low` to `high`; `written` writes a value, `marks` are steps to mark.

    >>> text = curves("loss", [PlotLine("one", "run", [(0, 2.0), (1, 1.0)])], "{:.1f}".format, low=1, high=2)
    >>> text.count("<path"), "step 1: 1.0" in text
    (1, True)
    """
    steps = [step for line in lines for step, _ in line.points]
    first, last = min(steps, default=0), max(steps, default=0)
    plane = Plane(Axis(first, last, 0, _WIDTH), Axis(low, high, _HEIGHT, 0))
    paths = [
        f'<path class="line {line.kind}" data-run="{safe(line.name)}" d="{_path(line.points, plane)}"/>'
        for line in lines
        if line.points
    ]
    places = (plane.x.at(mark) for mark in marks if first <= mark <= last)
    paths += [f'<path class="line mark" d="M{at:.1f} 0V{_HEIGHT}"/>' for at in places]
    drawn = "".join(paths) + _titles(lines, written, plane)
    frame = (
        f'<svg class="curve" viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{safe(name)} from step {first} to step {last}">{drawn}</svg>'
    )
    return (
        f'<figure><figcaption>{safe(name)}</figcaption><div class="frame">'
        f'<span class="high">{safe(written(high))}</span><span class="low">{safe(written(low))}</span>{frame}</div>'
        f'<div class="ends"><span>step {first}</span><span>{last}</span></div></figure>'
    )


def _path(points: Sequence[tuple[int, float]], plane: Plane) -> str:
    """Return a line through the points; if there are many, through the lowest and highest of each interval."""
    every = -(-2 * len(points) // _POINTS)
    if every > 2:
        groups = (points[at : at + every] for at in range(0, len(points), every))
        points = [pair for group in groups for pair in sorted({min(group, key=_value), max(group, key=_value)})]
    return "M" + "L".join("{:.1f} {:.1f}".format(*plane.at(*point)) for point in points)


def _value(point: tuple[int, float]) -> float:
    return point[1]


def _titles(lines: Sequence[PlotLine], written: Callable[[float], str], plane: Plane) -> str:
    """Return invisible stripes whose tooltips show the values of a step; `data-dots` are their places on the curves."""
    said: dict[int, list[tuple[str, float]]] = {}
    for line in lines:
        every = -(-len(line.points) // _POINTS)
        for step, value in line.points[::every] if every else ():
            said.setdefault(step, []).append((line.name, value))
    half = _WIDTH / max(len(said), 1) / 2
    stripes = []
    for step, values in sorted(said.items()):
        texts = [f"{name}: {written(value)}" for name, value in values]
        words = chr(10).join([f"step {step}", *texts]) if len(lines) > 1 else f"step {step}: {written(values[0][1])}"
        dots = " ".join("{:.1f},{:.1f}".format(*plane.at(step, value)) for _, value in values)
        middle = plane.x.at(step)
        left, right = max(middle - half, 0.0), min(middle + half, _WIDTH)
        place = f'x="{left:.1f}" width="{right - left:.1f}" height="{_HEIGHT}"'
        stripes.append(f'<rect class="aim" {place} data-dots="{dots}"><title>{safe(words)}</title></rect>')
    return "".join(stripes)
