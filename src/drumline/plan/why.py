"""Why one choice loses against another, and what it is short of: for programs on ranks and layouts on clusters alike.

What something takes is a dataclass of numbers, one for each item.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

Items = list[tuple[str, float]]


def lost_and_saved(chosen: Any, other: Any, least: float = 0.0) -> tuple[Items, Items]:
    """Return what `other` loses against `chosen` and what it saves, item by item, the largest first.

    Differences up to `least` are none; where it loses nothing, the item by which it saves least stands for that.

    >>> from drumline.plan.cluster.loads import Volumes
    >>> lost_and_saved(Volumes(1, 2, 0, 0, 0), Volumes(4, 0, 0, 1, 0))
    ([('tensor', 3), ('pipeline', 1)], [('context', 2)])
    """
    mine, theirs = asdict(chosen), asdict(other)
    by = sorted(((item, theirs[item] - mine[item]) for item in mine), key=lambda one: -one[1])
    lost = [(item, more) for item, more in by if more > least]
    return lost or by[:1], [(item, -more) for item, more in reversed(by) if more < -least]


def less_activations(over: float, activations: float) -> str | None:
    """Return which part of the activations has to go where so many bytes are too much; None if even all are too few.

    >>> less_activations(1.0, 4.0), less_activations(5.0, 4.0)
    ('25% less activation memory', None)
    """
    return f"{over / activations:.0%} less activation memory" if over < activations else None
