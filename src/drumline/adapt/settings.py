"""What may change while a pipeline runs, when, and within which limits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from drumline.core.errors import UsageError, nearest
from drumline.core.settings.kinds import Wrong
from drumline.core.settings.rule import BYTES, COUNT, PART, POSITIVE, SECONDS, STEPS, one_of
from drumline.core.settings.setting import setting, settings_of

SOLVE, HALF, KEEP, BATCH, SIZE = "solve", "half", "keep", "batch", "size"


@dataclass(frozen=True, slots=True)
class Adapt:
    """How a pipeline adapts.

    A rank is too slow if it takes `threshold` longer than its neighbour; an action has changed if it takes `threshold`
    longer or shorter than before. With `microbatches="size"` a step runs in groups whose gradients accumulate.
    `max_bytes` needs blocks that were timed. A search runs in its own process.

    >>> Adapt(threshold=0.2).rebalance
    'solve'
    """

    program: bool = setting(
        True, "whether to search another program if actions or messages take other times than before"
    )
    rebalance: str = setting(
        SOLVE,
        "how to move layers: to the best cut, half of a slow stage's to its neighbour, or not at all",
        one_of(SOLVE, HALF, KEEP),
    )
    microbatches: str = setting(
        KEEP,
        "keep their number, choose it at the same batch, or at the same size through accumulation",
        one_of(KEEP, BATCH, SIZE),
    )
    threshold: float = setting(
        0.1, "share by which a rank must be slower than its neighbour, or an action than before", POSITIVE
    )
    patience: int = setting(3, "steps in a row for which a rank must be too slow", STEPS)
    cooldown: int = setting(8, "steps between two changes", STEPS)
    within: int = setting(100, "steps within which a change must pay for itself", STEPS)
    least_gain: float = setting(0.02, "least share of a step that a change must save", PART)
    max_activations: int | None = setting(
        None, "pairs of stage and microbatch that a rank may hold", COUNT, empty="as at the start"
    )
    max_bytes: float | None = setting(
        None, "bytes that a rank may hold after a move of layers", BYTES, empty="no limit"
    )
    seconds: float = setting(3.0, "seconds of a search, which runs during training", SECONDS)

    def __post_init__(self) -> None:
        for name, option in settings_of(Adapt).items():
            value = getattr(self, name)
            try:
                option.taken(value)
            except Wrong as wrong:
                expected = "True or False" if option.kind is bool else str(wrong)
                raise UsageError(f"adapt: {name} is {value!r:.60}", expected=expected) from None

    @staticmethod
    def of(value: Any) -> Adapt | None:
        """Return what a user's `adapt=` means; None if nothing is to change.

        >>> Adapt.of(False), Adapt.of({"rebalance": "half"}).rebalance
        (None, 'half')
        >>> Adapt.of({"treshold": 0.2})
        Traceback (most recent call last):
        drumline.core.errors.UsageError: adapt has no 'treshold'; did you mean threshold?
        """
        if value is None or value is False:
            return None
        if value is True:
            return Adapt()
        if isinstance(value, Adapt):
            return value
        if not isinstance(value, Mapping):
            raise UsageError(f"adapt is {value!r:.60}", expected='True, False, or a dict like {"rebalance": "half"}')
        known = [field.name for field in fields(Adapt)]
        for name in value:
            if name not in known:
                raise UsageError(f"adapt has no {name!r:.60}", fix=nearest(str(name), known))
        return Adapt(**value)
