"""The colours of every picture: one hue per op, two shades of it for even and odd microbatches.

The hues are those of Okabe and Ito, lightened so that dark numbers stay readable on them; they stay apart for the
three common kinds of colour blindness, which a test computes.
"""

from __future__ import annotations

from typing import NamedTuple

from drumline.core.action import Op

DARK_INK = "#10202c"
LIGHT_INK = "#ffffff"


class Shades(NamedTuple):
    """The fills for even and odd microbatches, the edge that marks a rank's further stages, and the text on them."""

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

INK = "#17212b"
MUTED = "#66727e"
RULE = "#e3e8ec"
TRACK = "#f2f4f6"
PAPER = "#ffffff"


def fill(op: Op, microbatch: int | None) -> str:
    """Return the colour of a box.

    >>> fill(Op.FORWARD, 0) == fill(Op.FORWARD, 2), fill(Op.FORWARD, 0) == fill(Op.FORWARD, 1)
    (True, False)
    """
    shades = SHADES[op]
    return shades.odd if (microbatch or 0) % 2 else shades.even
