"""What may change while a pipeline runs, when, and within which limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from drumline.core.errors import UsageError, nearest

SOLVE, HALF, KEEP, BATCH, SIZE = "solve", "half", "keep", "batch", "size"
REBALANCES = (SOLVE, HALF, KEEP)
MICROBATCHES = (KEEP, BATCH, SIZE)


@dataclass(frozen=True, slots=True)
class Adapt:
    """How a pipeline adapts.

    - `program`: search another program for the same stages if actions or messages take other times than before.
    - `rebalance`: how to move layers: "solve" for the best cut, "half" of the slow stage's layers to its neighbour, or
      "keep" the cut.
    - `microbatches`: "keep" their number, choose it at a fixed "batch", or at a fixed "size" of a microbatch: the step
      then runs in groups whose gradients accumulate.
    - `threshold`: a rank that takes this share longer than its neighbour is too slow, and an action that takes this
      share longer or shorter than before has changed.
    - `patience`: for how many steps in a row a rank must be too slow. `cooldown`: steps between two changes.
    - `within`: a change must pay for itself within so many steps. `least_gain`: the least share of a step to gain.
    - `max_activations`: pairs of stage and microbatch that a rank may hold (default: what the first program holds).
      `max_bytes`: what a rank may hold in all, for cuts; known only if the blocks were timed.
    - `seconds`: how long a search may take. It runs in a process of its own, beside training.

    >>> Adapt(threshold=0.2).rebalance
    'solve'
    """

    program: bool = True
    rebalance: str = SOLVE
    microbatches: str = KEEP
    threshold: float = 0.1
    patience: int = 3
    cooldown: int = 8
    within: int = 100
    least_gain: float = 0.02
    max_activations: int | None = None
    max_bytes: float | None = None
    seconds: float = 3.0

    def __post_init__(self) -> None:
        for name, (is_right, expected) in _KINDS.items():
            if not is_right(value := getattr(self, name)):
                raise UsageError(f"adapt: {name} is {value!r:.60}", expected=expected)

    @staticmethod
    def of(given: Any) -> Adapt | None:
        """Return what a user's `adapt=` means; None if nothing is to change.

        >>> Adapt.of(False), Adapt.of({"rebalance": "half"}).rebalance
        (None, 'half')
        >>> Adapt.of({"treshold": 0.2})
        Traceback (most recent call last):
        drumline.core.errors.UsageError: adapt has no 'treshold'; did you mean threshold?
        """
        if given is None or given is False:
            return None
        if given is True:
            return Adapt()
        if isinstance(given, Adapt):
            return given
        if not isinstance(given, Mapping):
            raise UsageError(f"adapt is {given!r:.60}", expected='True, False, or a dict like {"rebalance": "half"}')
        known = [one.name for one in fields(Adapt)]
        for name in given:
            if name not in known:
                raise UsageError(f"adapt has no {name!r:.60}", fix=nearest(str(name), known))
        return Adapt(**given)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_Kind = tuple[Callable[[Any], bool], str]
_COUNT: _Kind = (_is_count, "a whole number of 1 or more")
_POSITIVE: _Kind = (lambda one: _is_number(one) and one > 0, "a number above 0")
_KINDS: dict[str, _Kind] = {
    "program": (lambda one: isinstance(one, bool), "True or False"),
    "rebalance": (lambda one: one in REBALANCES, ", ".join(f'"{one}"' for one in REBALANCES)),
    "microbatches": (lambda one: one in MICROBATCHES, ", ".join(f'"{one}"' for one in MICROBATCHES)),
    "threshold": _POSITIVE,
    "patience": _COUNT,
    "cooldown": _COUNT,
    "within": _COUNT,
    "least_gain": (lambda one: _is_number(one) and 0 <= one < 1, "a share, from 0 to less than 1"),
    "max_activations": (lambda one: one is None or _is_count(one), _COUNT[1]),
    "max_bytes": (lambda one: one is None or (_is_number(one) and one > 0), _POSITIVE[1]),
    "seconds": _POSITIVE,
}
