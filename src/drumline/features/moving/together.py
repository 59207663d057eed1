"""What does not go with layers that move."""

from __future__ import annotations

from drumline.core.settings.clash import Clash, Facts, Given, call
from drumline.engine.together import AFTER, NO_FLUSH


def _divides_some(facts: Facts) -> bool:
    """Whether the parameters of some stages are divided, and those of others are not.

    >>> [_divides_some({"num_stages": 2, "zero_by_stage": by_stage}) for by_stage in ({}, {0: 3}, {0: 3, 1: 3})]
    [False, True, False]
    """
    by_stage = facts.get("zero_by_stage") or {}
    levels = [by_stage.get(stage, 0) for stage in range(facts.get("num_stages", 0))]
    return 3 in levels and set(levels) != {3}


_SOME_STAGES = Given("zero", "`zero=3` of some stages", _divides_some, "zero is 3 for some stages and not for others")
_STAYS = {
    NO_FLUSH: "layers can move only if no microbatch is in flight",
    AFTER: "copies of updates that may be undone do not move",
    _SOME_STAGES: "only the program of a divided stage gathers parameters",
}
CLASHES = tuple(
    Clash(call("repartition"), other, "layers that stay", why, ("zero", 3) if other is _SOME_STAGES else None)
    for other, why in _STAYS.items()
)
