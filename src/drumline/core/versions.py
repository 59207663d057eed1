"""Weight versions and gradient buffers of programs that take optimizer steps without a flush.

    0F0 0F1 0B0 0UPDATE0 0F2 0B1 0UPDATE1 0B2 ...
     └─ version 0 ─┘      └ version 1      1B1 still needs version 0: two versions are held

A forward sees the newest version of its stage, that is all UPDATEs before it in its row, and its backward sees the
same one: a version stays in memory while a pair still needs it. UPDATE m takes the gradients of the microbatches up
to m that no earlier UPDATE took; gradients of later ones accumulate apart.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from drumline.core import rules
from drumline.core.action import TIMED_OPS, Action, Op
from drumline.core.costs import Costs
from drumline.core.program import Program


@dataclass(frozen=True, slots=True)
class Versions:
    """What versions and second gradient buffers add, while each timed action runs and after it; the most versions."""

    bytes: Sequence[tuple[float, float]]
    peak: int


def versions(row: Sequence[Action], costs: Costs, program: Program) -> Versions | None:
    """Return what a row's weight versions cost beyond the first; None where the program takes no steps itself.

    >>> program = Program.parse("0F0,0F1,0B0,0UPDATE0,0F2,0B1,0UPDATE1,0B2,0UPDATE2")
    >>> versions(program.rows[0], Costs(weight_bytes=10), program).peak
    2
    """
    if not program.num_updates:
        return None
    weight, gradient = (costs.per_stage(f"{what}_bytes", program.num_stages) for what in ("weight", "gradient"))
    state = _State(_updates(row))
    found, peak = [], 1
    for action in row:
        if action.op not in TIMED_OPS:
            continue
        for part in action.work:
            state.start(part)
        during = state.extra(weight, gradient)
        peak = max(peak, 1 + max(state.old.values(), default=0))
        for part in action.work:
            state.end(part)
        found.append((during, state.extra(weight, gradient)))
    return Versions(found, peak)


def _updates(row: Sequence[Action]) -> dict[int, list[int]]:
    updates: dict[int, list[int]] = {}
    for action in row:
        if action.op is Op.UPDATE and action.microbatch is not None:
            updates.setdefault(action.stage, []).append(action.microbatch)
    return updates


@dataclass
class _State:
    updates: dict[int, list[int]]
    newest: Counter[int] = field(default_factory=Counter)
    seen_by: dict[tuple[int, int | None], int] = field(default_factory=dict)
    users: Counter[tuple[int, int]] = field(default_factory=Counter)
    old: Counter[int] = field(default_factory=Counter)
    accumulating: dict[int, set[int]] = field(default_factory=dict)

    def start(self, part: Action) -> None:
        if part.op is Op.FORWARD:
            version = self.newest[part.stage]
            self.seen_by[part.stage, part.microbatch] = version
            self.users[part.stage, version] += 1
        elif part.op in rules.RELEASES:
            step = bisect_left(self.updates.get(part.stage, []), part.microbatch or 0)
            self.accumulating.setdefault(part.stage, set()).add(step)

    def end(self, part: Action) -> None:
        if part.op in rules.RELEASES:
            key = (part.stage, self.seen_by.pop((part.stage, part.microbatch), 0))
            self.users[key] -= 1
            if self.users[key] <= 0:
                del self.users[key]
                self.old[part.stage] -= key[1] < self.newest[part.stage]
        elif part.op is Op.UPDATE:
            # The version that was newest stays, as an old one, while a pair still needs it.
            self.old[part.stage] += (part.stage, self.newest[part.stage]) in self.users
            self.newest[part.stage] += 1
            steps = self.accumulating.get(part.stage)
            if steps:
                steps.discard(min(steps))

    def extra(self, weight: Sequence[float], gradient: Sequence[float]) -> float:
        second = sum(gradient[stage] * (len(steps) - 1) for stage, steps in self.accumulating.items() if len(steps) > 1)
        return second + sum(weight[stage] * count for stage, count in self.old.items())
