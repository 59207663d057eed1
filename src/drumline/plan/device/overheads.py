"""What a step takes beside computing, for messages of any size: handling that was measured at some sizes.

    rank 0    0F0 │own│send│                     what the executor does itself, and copying the message out
    rank 1             │flight│take│ 1F0 │own│   waking up, which occupies nobody, and copying it in

Copying keeps a rank from computing, so it is part of the action that makes or needs the message. At the end of a step a
rank looks at its gradients, which takes longer the more there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from drumline.core.costs import Costs
from drumline.core.measured.handling import Handling
from drumline.core.parsed import LARGEST, Parsed
from drumline.core.program import Program
from drumline.plan.device.link_fit import Line, fitted

_NOTHING = Line()
_LINES = ("send", "take", "end")


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds: to `send` and to `take` a message of so many bytes, of its `flight`, of any `action`, to `begin` a step.

    `end` is that of a rank with so many bytes of gradients.
    """

    send: Line = _NOTHING
    take: Line = _NOTHING
    end: Line = _NOTHING
    flight: float = 0.0
    action: float = 0.0
    begin: float = 0.0

    @staticmethod
    def fitted(measured: Sequence[tuple[float, Handling]], ends: Sequence[tuple[float, float]]) -> Overheads:
        """Return what fits the handling of messages of some sizes, and ends of steps with some bytes of gradients.

        >>> told = [(0.0, Handling(send=1.0, action=0.5)), (10.0, Handling(send=2.0, action=0.5))]
        >>> found = Overheads.fitted(told, [(0.0, 1.0)])
        >>> round(found.send.at(20.0), 9), found.action
        (3.0, 0.5)
        """
        middle = {
            name: sorted(getattr(one, name) for _, one in measured)[len(measured) // 2]
            for name in ("flight", "action", "begin")
        }
        send, take = (fitted([(size, getattr(one, name)) for size, one in measured]) for name in ("send", "take"))
        return Overheads(send, take, fitted(ends), **middle)

    def added_to(self, costs: Costs, program: Program) -> Costs:
        r"""Return the costs of actions with what goes with them.

        >>> program = Program.parse("0F0,0B0\n1F0,1B0")
        >>> costs = Costs(message_bytes=[10, 0])
        >>> Overheads(send=Line(0.1), take=Line(0.0, 0.02)).added_to(costs, program).forward
        (1.1, 1.2)
        """
        stages, homes = range(program.num_stages), program.placement.homes
        sizes = costs.per_stage("message_bytes", len(stages))
        crossed = [stage + 1 in stages and homes[stage + 1] != homes[stage] for stage in stages]
        out = [self.send.at(size) * one for size, one in zip(sizes, crossed, strict=True)]  # from a stage to the next
        into = [self.take.at(size) * one for size, one in zip(sizes, crossed, strict=True)]

        def more(name: str, sends: Sequence[float], takes: Sequence[float]) -> tuple[float, ...]:
            own = costs.per_stage(name, len(stages))
            return tuple(
                seconds + self.action + send + take for seconds, send, take in zip(own, sends, takes, strict=True)
            )

        none = [0.0] * len(stages)
        back = [0.0, *out[:-1]]  # a stage sends its gradient where its input came from
        return replace(
            costs,
            forward=more("forward", out, [0.0, *into[:-1]]),
            backward=more("backward", back, into),
            backward_input=more("backward_input", back, into),
            backward_weight=more("backward_weight", none, none),
            comm=costs.comm + self.flight,
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as an object for JSON."""
        table = {one.name: getattr(self, one.name) for one in fields(self)}
        return table | {name: [table[name].seconds, table[name].seconds_per_byte] for name in _LINES}

    @staticmethod
    def from_json(table: Parsed) -> Overheads:
        """Return what `to_json` made an object of.

        >>> from drumline.core.errors import PlanError
        >>> from drumline.core.files import Kind
        >>> one = Overheads(send=Line(1.0, 0.5), action=0.25)
        >>> Overheads.from_json(Parsed(one.to_json(), Kind("profile", PlanError, "a profile"))) == one
        True
        """
        table.only(one.name for one in fields(Overheads))
        send, take, end = (_line_from(table[name]) for name in _LINES)
        # What is left over of a step, shared among its actions, may come out below 0.
        action = table["action"].number(-LARGEST)
        return Overheads(send, take, end, table["flight"].number(), action, table["begin"].number())


def _line_from(pair: Parsed) -> Line:
    if len(pair.each()) != 2:
        raise pair.refuse("seconds, and seconds per byte")
    seconds, slope = pair.each()
    return Line(seconds.number(), slope.number())
