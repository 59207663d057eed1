"""Costs of stages with what goes with their actions, to hold a prediction against a measured step.

A rank cannot compute while it copies a message, so the copy belongs to the action that makes or needs the message. The
same holds for the executor's own work for every action. Only the flight is latency, which occupies no rank.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drumline.core.costs import Costs
from drumline.core.measured.costs import Handling
from drumline.core.program import Program


def with_handling(costs: Costs, handling: Handling, program: Program) -> Costs:
    r"""Return the costs of actions with what goes with them: copying messages, and the executor's own work.

    The time of an edge is that of the message's flight alone: copies occupy the ranks.

    >>> from drumline.core.program import Program
    >>> program = Program.parse("0F0,0B0\n1F0,1B0")
    >>> handled = with_handling(Costs(), Handling(send=0.5, take=0.25, action=0.125, flight=1.0), program)
    >>> handled.forward, handled.backward, handled.comm
    ([1.625, 1.375], [2.375, 2.625], 1.0)
    """
    stages, homes = range(program.num_stages), program.placement.homes
    later = [stage + 1 in stages and homes[stage + 1] != homes[stage] for stage in stages]
    earlier = [stage - 1 in stages and homes[stage - 1] != homes[stage] for stage in stages]
    send, take = handling.send, handling.take
    forth = [take * before + send * behind for before, behind in zip(earlier, later, strict=True)]
    back = [take * behind + send * before for before, behind in zip(earlier, later, strict=True)]
    none = [0.0] * len(stages)
    copying = {"forward": forth, "backward": back, "backward_input": back, "backward_weight": none}
    more = {name: [handling.action + value for value in extra] for name, extra in copying.items()}
    seconds: dict[str, Any] = {
        name: [value + other for value, other in zip(costs.per_stage(name, len(stages)), extra, strict=True)]
        for name, extra in more.items()
    }
    return replace(costs, **seconds, comm=handling.flight, edges={}, message_bytes=0.0)
