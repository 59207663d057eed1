"""What a rank holds, action by action.

A (stage, microbatch) pair is held from its F's start to its B's (split: W's) end; in an overlapped pair F counts before
B. All of it follows from the rows alone, whatever the times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from drumline.core.action import TIMED_OPS, Action, Op
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.versions import Versions, versions


@dataclass(frozen=True, slots=True)
class Holding:
    """One rank's memory: pairs and bytes while each timed action runs, and once it has ended.

    Bytes are None where none are known. They are the stash, plus `static_bytes` (weights, gradients, optimizer), plus
    what further weight versions and gradient buffers take.
    """

    pairs: Sequence[tuple[int, int]]
    bytes: Sequence[tuple[float, float]] | None
    static_bytes: float
    peak_versions: int
    peak_stash_bytes: float | None

    @property
    def peak_pairs(self) -> int:
        """The most pairs held at once."""
        return max((during for during, _ in self.pairs), default=0)

    @property
    def peak_bytes(self) -> float | None:
        """The most bytes held at once, or None where no bytes are known."""
        if self.bytes is None:
            return None
        return max((during for during, _ in self.bytes), default=self.static_bytes)


class _Change(NamedTuple):
    """What one op does to a rank's memory as it starts and as it ends; bytes are those of a microbatch of factor 1."""

    pairs_start: int = 0
    pairs_end: int = 0
    bytes_start: float = 0.0
    bytes_end: float = 0.0


def holdings(program: Program, costs: Costs) -> tuple[Holding, ...]:
    r"""Return what every rank holds.

    >>> [holding.peak_pairs for holding in holdings(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"), Costs())]
    [2, 1]
    """
    if costs.knows_bytes:
        return _holdings(program, costs)
    # Pairs alone follow from the rows, whatever the costs.
    if "pairs" not in program.compiled:
        program.compiled["pairs"] = _holdings(program, Costs())
    found = program.compiled["pairs"]
    assert isinstance(found, tuple)
    return found


def _holdings(program: Program, costs: Costs) -> tuple[Holding, ...]:
    changes = _changes(program, costs)
    factors = costs.factors(program.num_microbatches)
    static = [
        sum(values)
        for values in zip(
            *(costs.per_stage(f"{what}_bytes", program.num_stages) for what in ("weight", "gradient", "optimizer")),
            strict=True,
        )
    ]
    found = []
    for row in program.rows:
        timed = [action for action in row if action.op in TIMED_OPS]
        extra = versions(row, costs, program)
        found.append(_holding(timed, changes, factors, static, extra, costs.knows_bytes))
    return tuple(found)


def _changes(program: Program, costs: Costs) -> dict[tuple[Op, int], _Change]:
    """Return the change that every (op, stage) makes."""
    stages = program.num_stages
    full = costs.per_stage("activation_bytes", stages)
    until_weight = full
    if costs.held_until_weight_bytes is not None:
        until_weight = costs.per_stage("held_until_weight_bytes", stages)
    recomputes, checkpoint = costs.recomputes(stages), costs.per_stage("checkpoint_bytes", stages)
    changes: dict[tuple[Op, int], _Change] = {}
    for stage in range(stages):
        kept = checkpoint[stage] if recomputes[stage] else full[stage]
        again = full[stage] - kept
        at_once = not program.has_backward
        changes[Op.FORWARD, stage] = _Change(+1, -1 if at_once else 0, kept, -kept if at_once else 0.0)
        changes[Op.BACKWARD, stage] = _Change(0, -1, again, -full[stage])
        changes[Op.BACKWARD_INPUT, stage] = _Change(0, 0, again, until_weight[stage] - full[stage])
        changes[Op.BACKWARD_WEIGHT, stage] = _Change(0, -1, 0.0, -until_weight[stage])
    return changes


def _holding(
    row: Sequence[Action],
    changes: dict[tuple[Op, int], _Change],
    factors: Sequence[float],
    static_bytes_of: Sequence[float],
    extra: Versions | None,
    knows_bytes: bool,
) -> Holding:
    static = sum(static_bytes_of[stage] for stage in {part.stage for action in row for part in action.work})
    pairs: list[tuple[int, int]] = []
    sizes: list[tuple[float, float]] = []
    held, size = 0, 0.0
    nothing = _Change()
    for action in row:
        during, during_size = held, size
        for stage, op, microbatch, _ in action.parts or (action,):
            more, less, more_bytes, less_bytes = changes.get((op, stage), nothing)
            during += more
            held += more + less
            if knows_bytes:
                factor = factors[microbatch] if microbatch is not None else 1.0
                during_size += more_bytes * factor
                size += (more_bytes + less_bytes) * factor
        pairs.append((during, held))
        if knows_bytes:
            sizes.append((during_size, size))
    versions_held = extra.peak if extra is not None else 1
    if not knows_bytes:
        return Holding(pairs, None, static, versions_held, None)
    beside = extra.bytes if extra is not None else [(0.0, 0.0)] * len(sizes)
    total = [(static + a + more, static + b + after) for (a, b), (more, after) in zip(sizes, beside, strict=True)]
    return Holding(pairs, total, static, versions_held, max((during for during, _ in sizes), default=0.0))
