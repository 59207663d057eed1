"""The same model cut finer: what every stage takes when each is cut into equal parts.

one stage a rank    a        b        c        d
two                 a/2 a/2  b/2 b/2  c/2 c/2  d/2 d/2     dealt to the ranks as a placement says
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from drumline.core.costs import Costs

_CUT = (
    "forward",
    "backward_input",
    "backward_weight",
    "backward",
    "overlapped",
    "update",
    "reduce",
    "activation_bytes",
    "held_until_weight_bytes",
    "weight_bytes",
    "gradient_bytes",
    "optimizer_bytes",
)
_REPEATED = ("message_bytes", "checkpoint_bytes", "recompute")


def cut_finer(costs: Costs, stages_per_rank: int) -> Costs:
    """Return the costs of the same model with every stage cut into so many equal parts.

    >>> cut_finer(Costs(forward=[2, 4], backward_input=1), 2).forward
    (1.0, 1.0, 2.0, 2.0)
    """
    changed: dict[str, Any] = {}
    for name in (*_CUT, *_REPEATED):
        value = getattr(costs, name)
        share = stages_per_rank if name in _CUT else 1
        if isinstance(value, Sequence):
            changed[name] = tuple(one / share if share > 1 else one for one in value for _ in range(stages_per_rank))
        elif value is not None and share > 1:
            changed[name] = value / share
    return replace(costs, **changed) if stages_per_rank > 1 else costs
