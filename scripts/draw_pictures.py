"""Draws the picture that opens each schedule's file: `python scripts/draw_pictures.py` rewrites them in place."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from drumline.core.costs import Costs
from drumline.core.simulate.simulate import simulate
from drumline.report.draw.grid import grid
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


_README = ("1f1b", "zb-v")


def readme_pictures() -> dict[Path, str]:
    """Return the README's pictures by file: the usual schedule, and the one without a bubble inside a rank's span.

    >>> [path.name for path, drawn in readme_pictures().items() if drawn.startswith("<svg")]
    ['readme-1f1b.svg', 'readme-zb-v.svg']
    """
    docs = Path(__file__).parents[1] / "docs"
    return {
        docs / f"readme-{name}.svg": svg(
            simulate(find(name).build(4, 8)), width=960, title=f"{name} on 4 ranks, 8 microbatches"
        )
        for name in _README
    }


def main() -> int:
    """Rewrite every picture that has changed."""
    for path, drawn in readme_pictures().items():
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
