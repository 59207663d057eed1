"""Timelines as one page, a single file with its own style, script and data, and as a notebook cell.

A page loads nothing. Its policy allows only the script and the style inside it, by their hashes: if a name ever slipped
through the escaping, the browser would still not run it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from importlib.resources import files
from typing import Any

from drumline.core.program import Program
from drumline.core.prove.violation import InvalidProgram
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.timeline import Timeline
from drumline.report.draw.markup import safe
from drumline.report.draw.palette import drawn, theme
from drumline.report.draw.scene import document
from drumline.report.draw.svg import svg
from drumline.report.draw.trace import trace

# A larger SVG makes a notebook slow; the page (`drumline show --format html`) draws any size.
MAX_BOXES = 10_000
# In dependency order.
_SCRIPTS = [
    f"{name}.js"
    for name in ("model", "surface", "chart", "panels", "view", "explain", "pointers", "player", "marks", "viewer")
]
_UNSAFE = {ord(character): f"\\u{ord(character):04x}" for character in "<>&"}
_EXTRA = '<script type="application/json" id="extra">{}</script>'
_PLACE = re.compile(r"\{\{(\w+)\}\}")


def page(
    timelines: Iterable[Timeline],
    *,
    title: str | None = None,
    rows: Iterable[Mapping[str, Any]] | None = None,
    advice: str | None = None,
    seconds: bool = False,
) -> str:
    """Return a page of timelines, stacked on one time axis; `rows` adds the plot of bubble against peak memory.

    A row is a mapping with `name`, `bubble`, `peak_share` and `fits`; `advice` is a sentence at the top. With
    `seconds`, the page writes times with their unit.

    >>> from drumline.core.simulate.simulate import simulate
    >>> from drumline.schedules import generate
    >>> text = page([simulate(generate("1f1b", num_ranks=4, num_microbatches=8))], title="1F1B & friends")
    >>> text.startswith("<!doctype html>"), "<title>1F1B &amp; friends</title>" in text
    (True, True)
    """
    return page_with(document(timelines, title=title, rows=rows, advice=advice, seconds=seconds))


def picture(kind: str, timeline: Timeline, *, title: str | None = None) -> str | bytes:
    """Return a timeline as a file: svg, html, or a trace for Perfetto, which has no title.

    >>> picture("svg", simulate(Program.parse("0F0,0B0"))).startswith("<svg")
    True
    """
    if kind == "perfetto":
        return trace(timeline)
    return svg(timeline, title=title) if kind == "svg" else page([timeline], title=title)


def page_with(
    data: Mapping[str, Any],
    *,
    panel: str = "",
    below: str = "",
    style: str = "",
    script: str = "",
    extra: object = None,
) -> str:
    """Return the page with additions: markup above and below the timelines, style, script, and data for the script.

    A page with its own script may send requests to its own server, and nowhere else.

    >>> "<p>hello</p>" in page_with(document([]), panel="<p>hello</p>")
    True
    """
    styles, scripts = theme() + asset("viewer.css") + asset("marks.css") + style, viewer_script(script)
    asks = " connect-src 'self';" if script else ""
    parts = {
        "policy": f"default-src 'none';{asks} img-src data:; style-src '{_hash(styles)}';"
        f" script-src '{_hash(scripts)}'",
        "title": safe(data["title"]),
        "style": styles,
        "script": scripts,
        "panel": panel,
        "below": below,
        "data": json_for_script(data),
        "extra": "" if extra is None else _EXTRA.format(json_for_script(extra)),
    }
    return _PLACE.sub(lambda match: parts[match[1]], asset("page.html"))


def viewer_script(more: str = "") -> str:
    """Return the viewer's script: all of its files and `more` in one scope.

    >>> "window.drumline" in viewer_script()
    True
    """
    return _scoped(*map(asset, _SCRIPTS), more)


def _scoped(*scripts: str) -> str:
    body = "\n".join(scripts)
    return f'"use strict";\n{{\n{body}}}\n'


def plain_page(title: str, body: str, *, lead: str = "") -> str:
    """Return a page without timelines that opens from disk: a title, a sentence, and markup below them.

    >>> "<h1>a profile</h1>" in plain_page("a profile", "<p>1 &lt; 2</p>")
    True
    """
    style = theme() + "".join(map(asset, ("viewer.css", "marks.css", "report.css"))) + drawn()
    script = _scoped(asset("marks.js"), "new Marks();\nnew ScrollBoxes();\n")
    policy = f"default-src 'none'; img-src data:; style-src '{_hash(style)}'; script-src '{_hash(script)}'"
    said = f'<p class="advice">{safe(lead)}</p>\n' if lead else ""
    lines = [
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f'<title>{safe(title)}</title>\n<link rel="icon" href="data:,">\n<style>{style}</style>\n</head>\n<body>',
        f'<header class="masthead">\n<h1>{safe(title)}</h1>\n{said}</header>',
        f'<main><div class="report">{body}</div></main>',
        f"<script>{script}</script>\n</body>\n</html>",
    ]
    return "\n".join(lines)


def json_for_script(value: object) -> str:
    r"""Return JSON that no HTML parser mistakes for markup.

    >>> json_for_script({"name": "</script>"})
    '{"name":"\\u003c/script\\u003e"}'
    """
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_UNSAFE)


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


@cache
def asset(name: str) -> str:
    """Return one of the page's files.

    >>> asset("page.html").startswith("<!doctype html>")
    True
    """
    return files("drumline.report").joinpath("assets", name).read_text(encoding="utf-8")


def timeline_html(timeline: Timeline) -> str:
    """Return the picture of a timeline, or its figures if the picture would be too large.

    >>> timeline_html(simulate(Program.parse("0F0,0B0"))).startswith("<div")
    True
    """
    if sum(len(track.actions) for track in timeline.tracks) > MAX_BOXES:
        return f"<pre>{escape(repr(timeline))}\nToo large to draw here: use drumline show --format html.</pre>"
    return f'<div style="overflow-x: auto; background: #fff">{svg(timeline)}</div>'


def program_html(program: Program) -> str:
    r"""Return the picture of a program with equally long ops, or why it cannot run.

    >>> "never runs" in program_html(Program.parse("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1"))
    True
    """
    try:
        return timeline_html(simulate(program))
    except InvalidProgram as error:
        listed = "".join(f"<li>{escape(str(violation))}</li>" for violation in error.violations[:20])
        return f"<p>{escape(repr(program))} cannot run:</p><ul>{listed}</ul>"
