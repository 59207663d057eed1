"""The sheet for every standalone picture: its header, axes with their marks, numbers and text as SVG.

    title
    what the numbers are
    6 ┤────────────────────  level: horizontal rules, marks on the left
    4 ┤────────────────────
      │    │    │    │       upright: vertical rules, marks below
      0    5    10   15

It uses attributes only, no style sheet, ids or script: converters draw it the same way, and several fit on one page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import NamedTuple

import numpy as np

from drumline.core.units import number
from drumline.report.draw.packed import plain
from drumline.report.draw.palette import INK, MUTED, PAPER, RULE

APART = 6.0  # from line to line of a hatch
_HEAD = 44  # height of the title and the line below it
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, Helvetica, Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of numbers on a range of the sheet; a `log` axis doubles from mark to mark.

    >>> Axis(0, 10, 100, 200).at(5), Axis(1, 8, 0, 90, log=True).marks(10)
    (150.0, [1.0, 2.0, 4.0, 8.0])
    >>> Axis(49.2745, 93.1, 0, 90).marks(5)
    [50.0, 60.0, 70.0, 80.0, 90.0]
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, value: float) -> float:
        """Return the position of a number on the sheet."""
        scale = math.log if self.log else float
        part = (scale(value) - scale(self.low)) / ((scale(self.high) - scale(self.low)) or 1.0)
        return self.start + part * (self.end - self.start)

    def marks(self, most: int) -> list[float]:
        """Return the round numbers to write next to it."""
        if not self.log:
            steps = ticks(self.high - self.low, most=most)
            if len(steps) < 2:
                return [self.low]
            first, last = math.ceil(self.low / steps[1] - 1e-9), math.floor(self.high / steps[1] + 1e-9)
            return [float(f"{index * steps[1]:.12g}") for index in range(first, last + 1)]
        first, last = math.ceil(math.log2(self.low)), math.floor(math.log2(self.high))
        return [2.0**index for index in range(first, last + 1)]


class Plane(NamedTuple):
    """A part of the sheet with two axes: one to the right, one upwards."""

    x: Axis
    y: Axis

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the place of two numbers."""
        return self.x.at(x), self.y.at(y)


def ticks(extent: float, *, most: int = 10) -> Sequence[float]:
    """Return round times from 0 to `extent`, at most `most` steps of 1, 2 or 5 times a power of ten.

    >>> ticks(33, most=8)
    [0, 5, 10, 15, 20, 25, 30]
    >>> ticks(0.5, most=5)
    [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    """
    if not extent > 0:
        return [0]
    power = math.floor(math.log10(extent / most))
    step = next(index for index in (1, 2, 5, 10) if index * 10.0**power * most >= extent * (1 - 1e-9))
    count = math.floor(extent / (step * 10.0**power) + 1e-9)
    return plain(np.round(np.arange(count + 1) * step * 10.0**power, max(0, -power)))


def sheet(
    lines: Iterable[str],
    *,
    width: float,
    height: float,
    title: str,
    about: str,
    described: str | None = None,
    headed: bool = True,
) -> str:
    """Return the document: a title, a line about the picture, and the drawing; `described` is for screen readers.

    A page that has the title itself has it not `headed`: the picture begins below these lines.

    >>> sheet(["<g/>"], width=300, height=200, title="1F1B & friends", about="seconds").splitlines()[2]
    '<text x="16" y="26" font-size="15" font-weight="600">1F1B &amp; friends</text>'
    """
    top = 0 if headed else _HEAD
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{px(width)}" height="{px(height - top)}" '
        f'viewBox="0 {px(top)} {px(width)} {px(height - top)}" role="img" aria-label="{xml_text(described or title)}" '
        f'font-family="{xml_text(FONT)}" font-size="11" fill="{INK}">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        f'<text x="16" y="26" font-size="15" font-weight="600">{xml_text(title)}</text>',
        f'<text x="16" y="44" fill="{MUTED}">{xml_text(about)}</text>',
    ]
    return "\n".join([*(head if headed else head[:1]), *lines, "</svg>", ""])


def upright(
    axis: Axis, top: float, bottom: float, *, most: int, written: Callable[[float], str] = number
) -> Iterator[str]:
    """Yield a vertical rule at every mark of a horizontal axis, and the mark below it."""
    for mark in axis.marks(most):
        x = px(axis.at(mark))
        yield f'<path d="M{x} {px(top)}V{px(bottom)}" stroke="{RULE}"/>'
        yield text(axis.at(mark), bottom + 13, written(mark), anchor="middle", fill=MUTED)


def level(
    axis: Axis, left: float, right: float, *, most: int, written: Callable[[float], str] = number
) -> Iterator[str]:
    """Yield a horizontal rule at every mark of a vertical axis, and the mark before it."""
    for mark in axis.marks(most):
        y = axis.at(mark)
        yield f'<path d="M{px(left)} {px(y)}H{px(right)}" stroke="{RULE}"/>'
        yield text(left - 8, y + 4, written(mark), anchor="end", fill=MUTED)


def text(x: float, y: float, words: str, *, anchor: str = "", fill: str = "") -> str:
    """Return text at a position.

    >>> text(2, 10.5, "a < b", anchor="end")
    '<text x="2" y="10.5" text-anchor="end">a &lt; b</text>'
    """
    more = (f' text-anchor="{anchor}"' if anchor else "") + (f' fill="{fill}"' if fill else "")
    return f'<text x="{px(x)}" y="{px(y)}"{more}>{xml_text(words)}</text>'


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    *,
    note: str = "",
    corner: int = 0,
    opacity: float = 1,
    rim: str = "",
) -> str:
    """Return a rectangle; `note` is its tooltip, and `rim` the colour of a line around it, inside its edges.

    >>> rect(0, 0, 5, 2.5, "#fff", note="F0")
    '<rect x="0" y="0" width="5" height="2.5" fill="#fff"><title>F0</title></rect>'
    """
    inset = 0.5 if rim else 0.0
    place = f'x="{px(x + inset)}" y="{px(y + inset)}" width="{px(width - 2 * inset)}" height="{px(height - 2 * inset)}"'
    rounded = f' rx="{corner}"' if corner else ""
    faint = f' fill-opacity="{opacity:g}"' if opacity < 1 else ""
    line = f' stroke="{rim}"' if rim else ""
    return _closed(f'<rect {place}{rounded} fill="{fill}"{line}{faint}', "rect", note)


def hatched(x: float, y: float, width: float, height: float, lines: str, *, distance: float = APART) -> str:
    """Return the path of lines across a rectangle: `/`, a backslash, `-` and `|`, or several of them at once.

    All lines lie on one grid of the sheet, so that those of neighbours meet.

    >>> hatched(0, 0, 10, 10, "/", distance=10), hatched(0, 0, 10, 10, "|", distance=5)
    ('M0 10L10 0', 'M5 0V10')
    """
    right, bottom = x + width, y + height
    drawn = []
    for kind in lines:
        low, high = {"/": (x + y, right + bottom), "\\": (y - right, bottom - x), "|": (x, right), "-": (y, bottom)}[
            kind
        ]
        for step in range(math.floor(low / distance) + 1, math.ceil(high / distance)):
            at = step * distance
            if kind == "|":
                drawn.append(f"M{px(at)} {px(y)}V{px(bottom)}")
            elif kind == "-":
                drawn.append(f"M{px(x)} {px(at)}H{px(right)}")
            else:
                slope = -1 if kind == "/" else 1
                ends = sorted((slope * (edge - at) for edge in (y, bottom)), key=float)
                left, far = max(x, ends[0]), min(right, ends[1])
                drawn.append(f"M{px(left)} {px(at + slope * left)}L{px(far)} {px(at + slope * far)}")
    return "".join(drawn)


def circle(x: float, y: float, radius: float, fill: str, *, note: str = "") -> str:
    """Return a dot; `note` is its tooltip.

    >>> circle(1, 2, 4.5, "#fff")
    '<circle cx="1" cy="2" r="4.5" fill="#fff"/>'
    """
    return _closed(f'<circle cx="{px(x)}" cy="{px(y)}" r="{radius}" fill="{fill}"', "circle", note)


def _closed(opened: str, name: str, note: str) -> str:
    return f"{opened}><title>{xml_text(note)}</title></{name}>" if note else f"{opened}/>"


def px(value: float) -> str:
    """Return a coordinate, to a hundredth of a pixel.

    >>> px(2.0), px(1 / 3)
    ('2', '0.33')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".")


def xml_text(words: str) -> str:
    r"""Escape text, and drop the control characters that XML cannot carry.

    >>> xml_text("a < b\x00")
    'a &lt; b'
    """
    return escape("".join(c for c in words if c >= " " and c not in "\ufffe\uffff" and not "\ud800" <= c <= "\udfff"))


def grouped(lines: Iterable[str]) -> str:
    """Return a series of marks as one group: on a page, arrow keys go along it, or on to the next.

    >>> grouped(["<rect/>", "<rect/>"])
    '<g><rect/><rect/></g>'
    """
    return f"<g>{''.join(lines)}</g>"
