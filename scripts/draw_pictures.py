"""Draws the pictures of schedules' files and of pages: `python scripts/draw_pictures.py` rewrites them in place."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from drumline.core.costs import Costs
from drumline.core.simulate.simulate import simulate
from drumline.report.draw.grid import grid
from drumline.report.draw.palette import PAPER
from drumline.report.draw.svg import svg
from drumline.schedules import find, schedules

_TITLE = re.compile(r"^    (\d+ ranks, .* microbatches.*)$", re.MULTILINE)
_BLOCK = re.compile(r"(?:^    \d+ ranks, .* microbatches.*\n\n(?:^    (?:rank|Compressed).*\n)+)", re.MULTILINE)

# Few enough microbatches to fit a line; chimera's slots are equal, an update takes a slot where there are any.
_MICROBATCHES = {
    "naive": 2,
    "v-half": 3,
    "v-min": 3,
    "hanayo": 3,
    "gpipe": 5,
    "1f1b": 6,
    "zb-h1": 6,
    "zb-h2": 7,
    "dualpipe": 8,
    "forward-only": 6,
}
_COSTS = {
    "chimera": Costs(backward_input=0.5, backward_weight=0.5),
    "pipedream": Costs(update=1),
    "pipedream-2bw": Costs(update=1),
}
_OPTIONS = {"pipedream-2bw": {"num_steps": 3}}
_RANKS = {"interleaved-1f1b": 2, "looped-bfs": 2, "pipedream-2bw": 2, "pipedream": 3}


def picture(name: str) -> str:
    """Return the picture of one schedule, indented as its file shows it.

    >>> print(picture("naive").splitlines()[0])
        4 ranks, 4 stages, 2 microbatches
    """
    ranks, microbatches = _RANKS.get(name, 4), _MICROBATCHES.get(name, 4)
    if name == "pipedream-2bw":
        microbatches = 2
    program = find(name).build(ranks, microbatches, **_OPTIONS.get(name, {}))
    drawn = grid(simulate(program, _COSTS.get(name)), width=112, figures=False)
    title = f"{ranks} ranks, {program.num_stages} stages, {program.num_microbatches} microbatches"
    return "\n".join(["    " + title, "", *(f"    {line}" for line in drawn.splitlines())])


def source(name: str) -> Path:
    """Return the file that holds the schedule's recipe."""
    path = inspect.getsourcefile(find(name).recipe)
    assert path is not None
    return Path(path)


# One unit of time is as wide in both parts of the README's picture, beside what stands left and right of the rows.
_UNIT, _BESIDE = 22, 196


def page_pictures() -> dict[Path, str]:
    """Return the pictures that pages show without a build: one of the README, two of the first steps.

    >>> [path.name for path, drawn in page_pictures().items() if drawn.startswith("<svg")]
    ['readme.svg', 'start-1f1b.svg', 'start-zb-v.svg']
    """
    docs = Path(__file__).parents[1] / "docs"
    drawn = {docs / "readme.svg": same_work()}
    for name in ("1f1b", "zb-v"):
        timeline = simulate(find(name).build(4, 8))
        drawn[docs / f"start-{name}.svg"] = svg(timeline, width=960, title=f"{name} on 4 ranks, 8 microbatches")
    return drawn


def same_work() -> str:
    """Return one picture of the same work by 1f1b and by zb-v, which cuts it into stages of half the size.

    >>> same_work().count("<svg"), "bubble 27.3%" in same_work(), "bubble 5.88%" in same_work()
    (3, True, True)
    """
    parts, top, right = [], 0, 0
    for name, seconds in (("1f1b", 1.0), ("zb-v", 0.5)):
        timeline = simulate(find(name).build(4, 8), Costs(seconds, seconds, seconds))
        width = round(_BESIDE + _UNIT * timeline.makespan)
        drawn = svg(timeline, width=width, title=name)
        height = re.search(r'height="(\d+)', drawn)
        assert height is not None
        parts.append(drawn.replace("<svg ", f'<svg y="{top}" ', 1).rstrip())
        top, right = top + int(height[1]), max(right, width)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{right}" height="{top}" viewBox="0 0 {right} {top}"'
    label = ' role="img" aria-label="The same work by 1f1b, and by zb-v, which ends earlier">'
    paper = f'<rect width="100%" height="100%" rx="6" fill="{PAPER}"/>'
    return "\n".join([head + label, paper, *parts, "</svg>", ""])


def main() -> int:
    """Rewrite every picture that has changed."""
    for path, drawn in page_pictures().items():
        path.write_text(drawn, encoding="utf-8")
    for name in schedules():
        path = source(name)
        text = path.read_text(encoding="utf-8")
        drawn = picture(name) + "\n"
        redrawn, count = _BLOCK.subn(drawn.replace("\\", r"\\"), text, count=1)
        if count != 1:
            print(f"{path}: no picture to redraw", file=sys.stderr)
            return 1
        if redrawn != text:
            path.write_text(redrawn, encoding="utf-8")
            print(f"redrew {path.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
