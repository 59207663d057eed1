"""Curves and points as a standalone SVG: what a formula or the simulator says, and what was measured, on one sheet.

Attributes only, like the timelines: no style sheet, no ids, no script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from drumline.core.errors import UsageError
from drumline.report.draw.palette import INK, MUTED, PAPER, RULE
from drumline.report.draw.scene import ticks
from drumline.report.draw.svg import FONT

# Okabe and Ito's hues at full strength: lines are thin.
HUES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#17212b")
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 24, 54, 46
_ENTRY = 18  # height of a line of the legend


@dataclass(frozen=True, slots=True)
class Series:
    """One curve, or with `marks` single points: (x, y) each."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: bool = False
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class _Axis:
    """A stretch of numbers on a stretch of the sheet."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        scale = math.log if self.log else float
        part = (scale(value) - scale(self.low)) / ((scale(self.high) - scale(self.low)) or 1.0)
        return self.start + part * (self.end - self.start)

    def marks(self, most: int) -> list[float]:
        if not self.log:
            return [self.low + one for one in ticks(self.high - self.low, most=most)]
        powers = (2.0**one for one in range(math.ceil(math.log2(self.low)), math.floor(math.log2(self.high)) + 1))
        return list(powers)


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
    """Return an SVG document with all series; a point's own numbers are its tooltip. `log_x` doubles from mark to mark.

    The first x is that of the first point, or `x_from`.

    >>> bound = Series("M / (M + 1)", [(1, 0.5), (4, 0.8)])
    >>> picture = chart([bound], title="Bound", x_label="M", y_label="utilisation")
    >>> picture.count("<polyline"), "utilisation" in picture
    (1, True)
    """
    points = [point for one in series for point in one.points]
    if not points or not all(math.isfinite(x) and math.isfinite(y) for x, y in points):
        raise UsageError("a chart without points, or with one that is not finite", expected="numbers to draw")
    if log_x and min(x for x, _ in points) <= 0:
        raise UsageError(f"x is {min(x for x, _ in points):g} on an axis that doubles", expected="x above 0")
    names = len(series) * _ENTRY
    first = min(x for x, _ in points)
    across = _Axis(
        first if x_from is None else min(x_from, first), max(x for x, _ in points), _LEFT, width - _RIGHT, log_x
    )
    up = _Axis(min(0.0, *(y for _, y in points)), max(y for _, y in points), height - _BOTTOM, _TOP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height + names}" '
        f'viewBox="0 0 {width} {height + names}" role="img" aria-label="{_safe(title)}" '
        f'font-family="{_safe(FONT)}" font-size="11" fill="{INK}">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        f'<text x="16" y="26" font-size="15" font-weight="600">{_safe(title)}</text>',
        f'<text x="16" y="44" fill="{MUTED}">{_safe(y_label)}</text>',
        *_grid(across, up),
        f'<text x="{_n((across.start + across.end) / 2)}" y="{height - 10}" text-anchor="middle" fill="{MUTED}">'
        f"{_safe(x_label)}</text>",
    ]
    for at, one in enumerate(series):
        hue = HUES[at % len(HUES)]
        lines += _drawn(one, hue, across, up)
        lines += _entry(one, hue, height + 2 + at * _ENTRY)
    return "\n".join([*lines, "</svg>", ""])


def _grid(across: _Axis, up: _Axis) -> Iterator[str]:
    for mark in up.marks(6):
        y = _n(up.at(mark))
        yield f'<path d="M{_n(across.start)} {y}H{_n(across.end)}" stroke="{RULE}"/>'
        x, below = _n(across.start - 8), _n(up.at(mark) + 4)
        yield f'<text x="{x}" y="{below}" text-anchor="end" fill="{MUTED}">{mark:g}</text>'
    for mark in across.marks(10):
        x = _n(across.at(mark))
        yield f'<path d="M{x} {_n(up.start)}v4" stroke="{MUTED}"/>'
        yield f'<text x="{x}" y="{_n(up.start + 16)}" text-anchor="middle" fill="{MUTED}">{mark:g}</text>'


def _drawn(one: Series, hue: str, across: _Axis, up: _Axis) -> Iterator[str]:
    if not one.marks:
        places = " ".join(f"{_n(across.at(x))},{_n(up.at(y))}" for x, y in one.points)
        dashes = ' stroke-dasharray="5 4"' if one.dashed else ""
        yield f'<polyline points="{places}" fill="none" stroke="{hue}" stroke-width="2"{dashes}/>'
    for x, y in one.points:
        size = 4.5 if one.marks else 2.5
        note = f"<title>{_safe(f'{one.name}: {x:g}, {y:.4g}')}</title>"
        yield f'<circle cx="{_n(across.at(x))}" cy="{_n(up.at(y))}" r="{size}" fill="{hue}">{note}</circle>'


def _entry(one: Series, hue: str, y: float) -> Iterator[str]:
    if one.marks:
        yield f'<circle cx="{_LEFT + 10}" cy="{_n(y - 4)}" r="4.5" fill="{hue}"/>'
    else:
        dashes = ' stroke-dasharray="5 4"' if one.dashed else ""
        yield f'<path d="M{_LEFT} {_n(y - 4)}h20" stroke="{hue}" stroke-width="2"{dashes}/>'
    yield f'<text x="{_LEFT + 28}" y="{_n(y)}" fill="{MUTED}">{_safe(one.name)}</text>'


def _n(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _safe(text: str) -> str:
    return escape("".join(letter for letter in text if letter >= " "))
