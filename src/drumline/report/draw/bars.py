"""Stacked bars as a standalone SVG: one bar a row, its parts in the order of the legend.

Attributes only, like the timelines: no style sheet, no ids, no script.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from drumline.core.errors import UsageError
from drumline.report.draw.palette import INK, MUTED, PAPER, RULE, TRACK
from drumline.report.draw.scene import ticks
from drumline.report.draw.svg import FONT

_LEFT, _RIGHT, _TOP, _ROW = 190, 90, 60, 30


@dataclass(frozen=True, slots=True)
class Bar:
    """A row: its name, its parts by the names of the legend, and what stands behind it."""

    name: str
    parts: Mapping[str, float]
    note: str = ""


def bars(rows: Sequence[Bar], hues: Mapping[str, str], *, title: str, x_label: str, width: int = 900) -> str:
    """Return the bars; `hues` are the parts' colours, in the order of drawing.

    >>> picture = bars([Bar("TP8", {"busy": 2.0, "idle": 1.0}, "3 s")], {"busy": "#009e73", "idle": "#999999"},
    ...                title="A step", x_label="seconds")
    >>> picture.count("<title>"), "3 s" in picture
    (2, True)
    """
    if not rows or max(sum(row.parts.values()) for row in rows) <= 0:
        raise UsageError("no bars, or none with a length", expected="something to draw")
    longest = max(sum(row.parts.values()) for row in rows)
    scale = (width - _LEFT - _RIGHT) / longest
    bottom = _TOP + _ROW * len(rows)
    shown = [part for part in hues if any(row.parts.get(part, 0.0) > 0 for row in rows)]
    height = bottom + 44 + 20 * -(-len(shown) // 4)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" aria-label="{_safe(title)}" font-family="{_safe(FONT)}" font-size="11" fill="{INK}">',
        f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>',
        f'<text x="16" y="26" font-size="15" font-weight="600">{_safe(title)}</text>',
        f'<text x="16" y="44" fill="{MUTED}">{_safe(x_label)}</text>',
    ]
    for mark in ticks(longest, most=8):
        x = _LEFT + mark * scale
        lines.append(f'<path d="M{x:.1f} {_TOP - 4}V{bottom + 3}" stroke="{RULE}"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle" fill="{MUTED}">{mark:g}</text>')
    for at, row in enumerate(rows):
        lines += _drawn(row, hues, _TOP + at * _ROW, scale)
    for at, part in enumerate(shown):
        x, y = 16 + at % 4 * (width - 32) / 4, bottom + 40 + 20 * (at // 4)
        lines.append(f'<rect x="{x:.1f}" y="{y - 9}" width="14" height="11" rx="2" fill="{hues[part]}"/>')
        lines.append(f'<text x="{x + 20:.1f}" y="{y}" fill="{MUTED}">{_safe(part)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def _drawn(row: Bar, hues: Mapping[str, str], top: float, scale: float) -> Iterator[str]:
    middle = top + _ROW / 2 + 2
    yield f'<text x="{_LEFT - 10}" y="{middle:.1f}" text-anchor="end">{_safe(row.name)}</text>'
    whole = sum(row.parts.values()) * scale
    yield f'<rect x="{_LEFT}" y="{top + 4:.1f}" width="{whole:.2f}" height="{_ROW - 10}" fill="{TRACK}"/>'
    x = float(_LEFT)
    for part, hue in hues.items():
        length = row.parts.get(part, 0.0) * scale
        if length <= 0:
            continue
        note = f"<title>{_safe(f'{row.name}, {part}: {row.parts[part]:.4g}')}</title>"
        place = f'x="{x:.2f}" y="{top + 4:.1f}" width="{length:.2f}" height="{_ROW - 10}"'
        yield f'<rect {place} fill="{hue}">{note}</rect>'
        x += length
    yield f'<text x="{x + 8:.1f}" y="{middle:.1f}" fill="{MUTED}">{_safe(row.note)}</text>'


def _safe(text: str) -> str:
    return escape("".join(letter for letter in text if letter >= " "))
