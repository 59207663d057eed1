"""Stacked bars as a standalone SVG: one bar a row, its parts in the order of the legend."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from drumline.core.errors import UsageError
from drumline.report.draw.palette import MUTED, TRACK
from drumline.report.draw.sheet import Axis, rect, sheet, text, upright

_LEFT, _TOP = 190, 60
_LONGEST = 28  # letters of a name that fit to the left


@dataclass(frozen=True, slots=True)
class Bar:
    """A row: its name, its parts by the names of the legend, and what stands behind it."""

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
    """Return the bars, `row` pixels each; `hues` are the parts' colours, in the order of drawing.

    Notes stand in the `right` margin; `unit` is that of the numbers that parts show when they are pointed at.

    >>> picture = bars([Bar("TP8", {"busy": 2.0, "idle": 1.0}, "3 s")], {"busy": "#009e73", "idle": "#999999"},
    ...                title="A step", x_label="seconds")
    >>> picture.count("<title>"), "3 s" in picture
    (2, True)
    """
    if not rows:
        raise UsageError("no bars", expected="something to draw")
    axis = Axis(0, max(sum(one.parts.values()) for one in rows) or 1.0, _LEFT, width - right)
    bottom = _TOP + row * len(rows)
    shown = [part for part in hues if any(one.parts.get(part, 0.0) > 0 for one in rows)]
    lines = [*upright(axis, _TOP - 4, bottom + 3, most=8)]
    for at, one in enumerate(rows):
        lines += _drawn(one, hues, axis, _TOP + at * row, row, unit)
    for at, part in enumerate(shown):
        x, y = 16 + at % 4 * (width - 32) / 4, bottom + 40 + 20 * (at // 4)
        lines += [rect(x, y - 9, 14, 11, hues[part], corner=2), text(x + 20, y, part, fill=MUTED)]
    height = bottom + 44 + 20 * -(-len(shown) // 4)
    return sheet(lines, width=width, height=height, title=title, about=x_label)


def _drawn(bar: Bar, hues: Mapping[str, str], axis: Axis, top: float, row: int, unit: str) -> Iterator[str]:
    thick = round(row * 0.68)
    middle = top + thick / 2 + 7
    label = bar.name if len(bar.name) <= _LONGEST else f"...{bar.name[3 - _LONGEST :]}"
    yield text(_LEFT - 10, middle, label, anchor="end")
    yield rect(_LEFT, top + 4, axis.at(sum(bar.parts.values())) - _LEFT, thick, TRACK)
    drawn = 0.0
    for part in (part for part in hues if bar.parts.get(part, 0.0) > 0):
        x, size = axis.at(drawn), bar.parts[part]
        drawn += size
        yield rect(x, top + 4, axis.at(drawn) - x, thick, hues[part], note=f"{bar.name}, {part}: {size:.4g}{unit}")
    yield text(axis.at(drawn) + 8, middle, bar.note, fill=MUTED)
