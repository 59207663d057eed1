"""How programs and timelines show themselves in a notebook cell."""

from __future__ import annotations

from html import escape

from drumline.core.program import Program
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.timeline import Timeline
from drumline.report.draw.svg import svg

# Beyond this an SVG makes a notebook slow; the page (`drumline show --format html`) draws any size.
MAX_BOXES = 10_000


def timeline_html(timeline: Timeline) -> str:
    """Return the picture of a timeline, or its figures where the picture would be too large.

    >>> timeline_html(simulate(Program.parse("0F0,0B0"))).startswith("<div")
    True
    """
    if sum(len(track.actions) for track in timeline.tracks) > MAX_BOXES:
        return f"<pre>{escape(repr(timeline))}\nToo large to draw here: use drumline show --format html.</pre>"
    return f'<div style="overflow-x: auto; background: #fff">{svg(timeline)}</div>'


def program_html(program: Program) -> str:
    r"""Return the picture of a program where every op takes equally long, or why it cannot run.

    >>> "never runs" in program_html(Program.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))
    True
    """
    try:
        return timeline_html(simulate(program))
    except InvalidProgram as error:
        listed = "".join(f"<li>{escape(str(violation))}</li>" for violation in error.violations[:20])
        return f"<p>{escape(repr(program))} cannot run:</p><ul>{listed}</ul>"
