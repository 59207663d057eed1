"""What single blocks cost, from what their stages were measured to take.

A run times stages, not blocks. How a stage's seconds are shared among its blocks is known or assumed, best first:

    profile      the blocks were measured one by one before the run: then a rank may also turn out slow as a whole
    parameters   in proportion to the parameters that they compute with
    evenly       nothing else is known
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise
from typing import Any

from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.plan.cut.chain import BlockCosts
from drumline.report.advise.remedy import OPS

Counts = tuple[int, ...]

_SAID = {
    "profile": "",
    "parameters": "if a block costs by its parameters, on any rank",
    "evenly": "if the blocks of a stage cost the same, on any rank",
}


@dataclass(frozen=True)
class Blocks:
    """The blocks of a run: their names, how many each stage has, and seconds per op; `speed` is a factor per rank."""

    names: tuple[str, ...]
    counts: Counts
    seconds: Mapping[str, tuple[float, ...]]
    speed: tuple[float, ...]
    basis: str
    program: Program
    measured: Costs

    @property
    def assumes(self) -> str:
        """What is taken for true without having been measured."""
        return _SAID[self.basis]

    @property
    def costs_of_blocks(self) -> list[BlockCosts]:
        """Return the blocks as the search for cuts takes them."""
        return [BlockCosts(sum(each)) for each in zip(*self.seconds.values(), strict=True)]

    def costs(self, counts: Counts) -> Costs:
        """Return what the stages of a cut would take."""
        homes = self.program.placement.homes
        ends = list(pairwise(accumulate(counts, initial=0)))
        found: dict[str, Any] = {
            op: [sum(self.seconds[op][i:j]) * self.speed[homes[stage]] for stage, (i, j) in enumerate(ends)]
            for op in OPS
        }
        return replace(self.measured, **found, activation_bytes=None, held_until_weight_bytes=None)


def blocks_of(plan: Mapping[str, Any], program: Program, costs: Costs) -> Blocks | None:
    r"""Return the blocks that a run's plan names, or None where it names none.

    >>> program = Program.parse("0F0,0B0\n1F0,1B0")
    >>> costs = Costs(forward=[1, 3], backward_input=[2, 6], backward_weight=0)
    >>> blocks = blocks_of({"blocks": [["0"], ["1", "2", "3"]]}, program, costs)
    >>> blocks.basis, blocks.seconds["forward"], blocks.costs((2, 2)).forward
    ('evenly', (1.0, 1.0, 1.0, 1.0), [2.0, 2.0])
    """
    stages: Sequence[Sequence[str]] = plan.get("blocks") or ()
    if len(stages) != program.num_stages or not all(stages):
        return None
    names, counts = tuple(chain(*stages)), tuple(map(len, stages))
    taken = {op: costs.per_stage(op, len(stages)) for op in OPS}
    profiled = (plan.get("predicted") or {}).get("blocks")
    if profiled is not None and len(profiled) == len(names):
        seconds = {op: tuple(float(one[op]) for one in profiled) for op in OPS}
        if not any(taken["backward_weight"]):  # its backward was never split
            whole = tuple(float(one["backward"]) for one in profiled)
            seconds |= {"backward_input": whole, "backward_weight": (0.0,) * len(names)}
        return Blocks(names, counts, seconds, _speed(seconds, taken, counts, program), "profile", program, costs)
    guessed: Sequence[float] = plan.get("guessed_costs") or ()
    known = len(guessed) == len(names) and min(guessed) > 0
    shares = [float(one) for one in guessed] if known else [1.0] * len(names)
    seconds = {op: _shared(taken[op], shares, counts) for op in OPS}
    level = (1.0,) * program.num_ranks
    return Blocks(names, counts, seconds, level, "parameters" if known else "evenly", program, costs)


def _shared(stages: Sequence[float], shares: Sequence[float], counts: Counts) -> tuple[float, ...]:
    """Return every block's part of what its stage takes."""
    found: list[float] = []
    for taken, (i, j) in zip(stages, pairwise(accumulate(counts, initial=0)), strict=True):
        found += [taken * share / sum(shares[i:j]) for share in shares[i:j]]
    return tuple(found)


def _speed(
    blocks: Mapping[str, Sequence[float]], stages: Mapping[str, Sequence[float]], counts: Counts, program: Program
) -> tuple[float, ...]:
    """Return by what factor each rank is slower than the blocks' own seconds say."""
    ends = list(pairwise(accumulate(counts, initial=0)))
    found = []
    for rank in range(program.num_ranks):
        own = program.placement.stages_of(rank)
        took = sum(stages[op][stage] for op in OPS for stage in own)
        expected = sum(sum(blocks[op][slice(*ends[stage])]) for op in OPS for stage in own)
        found.append(took / expected if expected > 0 else 1.0)
    return tuple(found)
