"""The colours of every picture: one hue per op, one hatch per cause of idle time, one line per run.

The hues of ops are those of Okabe and Ito, lightened so that dark numbers stay readable on them, in two shades for even
and odd microbatches. Every second slice of a microbatch is paler. They stay distinct for the three common kinds of
colour blindness; a test computes this. Idle time is hatched: two causes differ in the direction of their lines, or in a
hue that everybody can distinguish.
"""

from __future__ import annotations

from typing import NamedTuple

from drumline.core.action import Op, placed
from drumline.core.timeline.idle import Cause

DARK_INK = "#10202c"
LIGHT_INK = "#ffffff"


class Shades(NamedTuple):
    """The fills for even and odd microbatches, the edge that marks a rank's further stages, and the text colour."""

    even: str
    odd: str
    edge: str
    ink: str = DARK_INK


SHADES: dict[Op, Shades] = {
    Op.FORWARD: Shades("#a3d7f7", "#7cc4f0", "#0b5f92"),
    Op.BACKWARD: Shades("#3fb892", "#159f78", "#04513b"),
    Op.BACKWARD_INPUT: Shades("#f7a27f", "#ef8759", "#9a3f0c"),
    Op.BACKWARD_WEIGHT: Shades("#fce79a", "#f6d766", "#967300"),
    Op.UPDATE: Shades("#9c5fa8", "#9c5fa8", "#52285b", LIGHT_INK),
    Op.UNSHARD: Shades("#c3cbd3", "#c3cbd3", "#59636d"),
    Op.RESHARD: Shades("#dde2e7", "#dde2e7", "#59636d"),
    Op.REDUCE_GRAD: Shades("#9c5fa8", "#9c5fa8", "#52285b", LIGHT_INK),
}


class Hatch(NamedTuple):
    """How idle time of one cause looks: its colour on light and dark paper, on a terminal, and its line directions."""

    light: str
    dark: str
    terminal: int
    lines: str


IDLE: dict[Cause, Hatch] = {
    Cause.FILL: Hatch("#56687a", "#9fb4c7", 67, "/"),
    Cause.DRAIN: Hatch("#86694a", "#c9a987", 137, "\\"),
    Cause.WAIT: Hatch("#b8471b", "#ff9a6b", 166, "/\\"),
    Cause.TRANSFER: Hatch("#0b6aa8", "#6cc0f5", 32, "-"),
    Cause.IMBALANCE: Hatch("#a8388a", "#ee93d3", 169, "|"),
    Cause.MEMORY: Hatch("#7d6b00", "#d8c24a", 142, "|-"),
    Cause.OVERHEAD: Hatch("#3d454d", "#d5dbe0", 246, "/\\"),
    Cause.OUTSIDE: Hatch("#6c4fb0", "#bda6f5", 98, "\\"),
    Cause.UNEXPLAINED: Hatch("#c4122f", "#ff7d84", 161, "/"),
}
# A run's colour on light and dark paper. The thirteenth run repeats the first colour with a dashed line.
RUNS = (
    ("#0b6aa8", "#7cc4f0"),
    ("#c2571a", "#f09a6c"),
    ("#0e8463", "#4cc7a1"),
    ("#8f4f9c", "#c99ad3"),
    ("#8a6d00", "#dcbc55"),
    ("#56687a", "#9fb4c7"),
    ("#b3263e", "#ff8d92"),
    ("#2f7d9e", "#62d0dd"),
    ("#5a7d1e", "#a9cf62"),
    ("#6c4fb0", "#b9a6f5"),
    ("#8b5a3c", "#d6a889"),
    ("#3d454d", "#d5dbe0"),
)

INK = "#17212b"
MUTED = "#66727e"
RULE = "#e3e8ec"
TRACK = "#f2f4f6"
PAPER = "#ffffff"


def fill(op: Op, number: int | None) -> str:
    """Return the colour of a box, of a microbatch or one of its slices.

    >>> fill(Op.FORWARD, 0) == fill(Op.FORWARD, 2), fill(Op.FORWARD, 0) == fill(Op.FORWARD, 1)
    (True, False)
    """
    microbatch, part = placed(number)
    shade = SHADES[op].odd if microbatch % 2 else SHADES[op].even
    return pale(shade) if part % 2 else shade


def pale(colour: str) -> str:
    """Return a colour halfway to white.

    >>> pale("#0080ff")
    '#7fbfff'
    """
    return "#" + "".join(f"{(int(colour[at : at + 2], 16) + 255) // 2:02x}" for at in (1, 3, 5))


def theme() -> str:
    """Return the colours of causes and runs as a style sheet: variables for light and dark pages, and their uses.

    >>> "--idle-wait: #b8471b;" in theme(), theme().count("--run-0:")
    (True, 3)
    """
    names = [*(f"idle-{cause}" for cause in IDLE), *(f"run-{at}" for at in range(len(RUNS)))]
    light, dark = (
        " ".join(f"--{name}: {pair[side]};" for name, pair in zip(names, [*IDLE.values(), *RUNS], strict=True))
        for side in (0, 1)
    )
    fills = [f".part.{name.removeprefix('idle-')} {{ fill: var(--{name}); }}" for name in names]
    lines = [
        f".line.run-{at} {{ stroke: var(--run-{at}); }} .series.run-{at} {{ color: var(--run-{at}); }}"
        for at in range(len(RUNS))
    ]
    scopes = [
        f":root {{ {light} }}",
        f'@media (prefers-color-scheme: dark) {{ :root:not([data-theme="light"]) {{ {dark} }} }}',
        f':root[data-theme="dark"] {{ {dark} }}',
    ]
    return "\n".join([*scopes, *fills, *lines, *_AGAIN, ""])


# What the colours of a standalone picture become on a page with a theme.
_ON_PAGES = {
    INK: "ink",
    MUTED: "muted",
    RULE: "rule",
    TRACK: "track",
    PAPER: "paper",
    SHADES[Op.FORWARD].edge: "accent",
    SHADES[Op.BACKWARD_INPUT].edge: "run-1",
    IDLE[Cause.FILL].light: "idle-fill",
}


def drawn() -> str:
    """Return a style sheet by which standalone pictures of the class `drawn` follow a page's theme.

    >>> print(drawn().splitlines()[1])
    .drawn [fill="#66727e"] { fill: var(--muted); } .drawn [stroke="#66727e"] { stroke: var(--muted); }
    """
    uses = ("fill", "stroke")
    lines = (
        " ".join(f'.drawn [{use}="{hue}"] {{ {use}: var(--{name}); }}' for use in uses)
        for hue, name in _ON_PAGES.items()
    )
    return "\n".join([*lines, ""])


# A rim around the square of a run that repeats a colour, a dashed line for its curve.
_AGAIN = (".line.again { stroke-dasharray: 5 4; }", ".swatch .part.again { stroke: var(--ink); stroke-width: 5; }")


def run_class(number: int) -> str:
    """Return the classes of a run's parts and lines.

    >>> run_class(1), run_class(13)
    ('run-1', 'run-1 again')
    """
    return f"run-{number % len(RUNS)}" + (" again" if number >= len(RUNS) else "")
