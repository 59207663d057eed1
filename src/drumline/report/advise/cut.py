"""Move blocks between stages, so that no rank is slower than the others.

    rank 0   0 1 2 3            rank 1 takes twice as long
    rank 1   4 5 6 7
    rank 0   0 1 2 3 4 5        blocks 4-5 move to rank 0
    rank 1   6 7

If blocks are unknown, as in a trace, the remedy names the stage to take them from.

A run times stages, not blocks. The division of a stage's seconds among its blocks is known or assumed, best first:

    profile      the blocks were measured one by one before the run; this also shows ranks that are slow as a whole
    parameters   in proportion to the parameters they compute with
    evenly       nothing else is known
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, pairwise
from typing import Any

from drumline.core.costs import Costs
from drumline.core.errors import PlanError
from drumline.core.program import Program
from drumline.core.rules import Backward
from drumline.core.units import ms
from drumline.plan.cut.chain import BlockCosts
from drumline.plan.cut.timed import TimedCuts, steps_of
from drumline.plan.device.advice import LEAST_GAIN, Remedy, predicted
from drumline.report.advise.evidence import OPS, Evidence

Counts = tuple[int, ...]

_ASSUMES = {  # assumptions that were not measured
    "profile": "",
    "parameters": "assuming that a block's cost follows its parameters, on any rank",
    "evenly": "assuming that all blocks of a stage cost the same, on any rank",
}
_SLOWER = 0.02  # smaller differences between ranks do not count
_NAMED_MOVES = 3


def recut(evidence: Evidence) -> Iterator[Remedy]:
    """Yield the best other cut, if one is faster."""
    program = evidence.program
    blocks = blocks_of(evidence.plan or {}, program, evidence.costs)
    if blocks is None or set(program.backwards) != {Backward.WHOLE}:
        return
    each = [BlockCosts(sum(seconds)) for seconds in zip(*blocks.seconds.values(), strict=True)]
    cuts = TimedCuts(each, program, steps_of(blocks.costs))
    try:
        counts = cuts.best().counts
    except PlanError:
        return
    before, after = (cut.seconds for cut in cuts.timed([blocks.counts, counts]))
    gain = (before - after) / evidence.measured.makespan
    if gain < LEAST_GAIN:
        return
    moved = list(moves(blocks, counts))
    listed = ", ".join(moved[:_NAMED_MOVES]) + (f" and {len(moved) - _NAMED_MOVES} more" if moved[3:] else "")
    sentence = f"{slowest_rank(evidence.rank_seconds)}: move {listed} (balance={list(counts)}), {predicted(gain)}"
    yield Remedy("cut", sentence, gain, {"balance": list(counts)}, _ASSUMES[blocks.basis])


def equal_stages(evidence: Evidence) -> Iterator[Remedy]:
    """Yield what equal stages would save, if only stages are known."""
    ideal, level, stages = evidence.simulated, evidence.simulated.balanced, evidence.stage_seconds
    if evidence.plan is not None or level is None or len(stages) < 2:
        return
    slowest = max(range(len(stages)), key=stages.__getitem__)
    sentence = (
        f"Move layers off stage {slowest}: a microbatch takes {ms(stages[slowest])} there and "
        f"{ms(sum(stages) / len(stages))} on average. With equal stages, the same order would take "
        f"{ms(level.makespan)} at best instead of {ms(ideal.makespan)}"
    )
    yield Remedy("stages", sentence, (ideal.makespan - level.makespan) / evidence.measured.makespan)


def slowest_rank(seconds: Sequence[float]) -> str:
    """Say which rank is slower than the average, and by how much.

    >>> slowest_rank([1.0, 1.2, 1.0]), slowest_rank([1.0, 1.0])
    ('Rank 1 is 20% slower', 'The stages are uneven')
    """
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = (sum(seconds) - seconds[rank]) / max(len(seconds) - 1, 1)
    more = seconds[rank] / others - 1 if others > 0 else 0.0
    return f"Rank {rank} is {more:.0%} slower" if more >= _SLOWER else "The stages are uneven"


def moves(blocks: RunBlocks, counts: Counts) -> Iterator[str]:
    """Yield which blocks move where; neighbours that move together count as one move."""
    old, new = _stages(blocks.counts), _stages(counts)
    homes = blocks.program.placement.homes
    for (source, target), group in groupby(enumerate(blocks.names), key=lambda at: (old[at[0]], new[at[0]])):
        if source != target:
            names = [name for _, name in group]
            shared = len(blocks.program.placement.stages_of(homes[target])) > 1
            yield f"{_named(names)} to {f'stage {target} on ' if shared else ''}rank {homes[target]}"


def _stages(counts: Counts) -> list[int]:
    """Return the stage of every block."""
    return [stage for stage, count in enumerate(counts) for _ in range(count)]


def _named(names: Sequence[str]) -> str:
    """Return a phrase for these blocks.

    >>> _named(["5"]), _named(["5", "6"]), _named(["layers.5", "layers.6"])
    ('block 5', 'blocks 5-6', 'blocks layers.5 to layers.6')
    """
    if len(names) == 1:
        return f"block {names[0]}"
    numbers = names[0].isdigit() and names[-1].isdigit()
    return f"blocks {names[0]}{'-' if numbers else ' to '}{names[-1]}"


@dataclass(frozen=True)
class RunBlocks:
    """The blocks of a run: their names, how many each stage has, and seconds per op; `speed` is a factor per rank."""

    names: tuple[str, ...]
    counts: Counts
    seconds: Mapping[str, tuple[float, ...]]
    speed: tuple[float, ...]
    basis: str
    program: Program
    measured: Costs

    def costs(self, counts: Counts) -> Costs:
        """Return the costs of the stages of a cut."""
        speeds = [self.speed[home] for home in self.program.placement.homes]
        fields: dict[str, Any] = {
            op: [
                sum(own_seconds) * speed
                for own_seconds, speed in zip(_by_stage(self.seconds[op], counts), speeds, strict=True)
            ]
            for op in OPS
        }
        return replace(self.measured, **fields, activation_bytes=None, held_until_weight_bytes=None)


def blocks_of(plan: Mapping[str, Any], program: Program, costs: Costs) -> RunBlocks | None:
    r"""Return the blocks in a run's plan, or None if it has none.

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
        seconds = {op: tuple(float(block[op]) for block in profiled) for op in OPS}
        if not any(taken["backward_weight"]):  # its backward was never split
            whole = tuple(float(block["backward"]) for block in profiled)
            seconds |= {"backward_input": whole, "backward_weight": (0.0,) * len(names)}
        return RunBlocks(names, counts, seconds, _speed(seconds, taken, counts, program), "profile", program, costs)
    guessed: Sequence[float] = plan.get("guessed_costs") or ()
    known = len(guessed) == len(names) and min(guessed) > 0
    shares = [float(block) for block in guessed] if known else [1.0] * len(names)
    seconds = {op: _shared(taken[op], shares, counts) for op in OPS}
    level = (1.0,) * program.num_ranks
    return RunBlocks(names, counts, seconds, level, "parameters" if known else "evenly", program, costs)


def _shared(stages: Sequence[float], shares: Sequence[float], counts: Counts) -> tuple[float, ...]:
    """Return every block's share of its stage's seconds."""
    each = zip(stages, _by_stage(shares, counts), strict=True)
    return tuple(taken * share / sum(own_seconds) for taken, own_seconds in each for share in own_seconds)


def _by_stage(values: Sequence[float], counts: Counts) -> list[Sequence[float]]:
    """Group the values of blocks by stage."""
    return [values[i:j] for i, j in pairwise(accumulate(counts, initial=0))]


def _speed(
    blocks: Mapping[str, Sequence[float]], stages: Mapping[str, Sequence[float]], counts: Counts, program: Program
) -> tuple[float, ...]:
    """Return the factor by which each rank is slower than its blocks' own seconds predict."""
    alone = {op: [sum(own_seconds) for own_seconds in _by_stage(blocks[op], counts)] for op in OPS}
    speeds = []
    for rank in range(program.num_ranks):
        own_stages = program.placement.stages_of(rank)
        took, expected = (sum(seconds[op][stage] for op in OPS for stage in own_stages) for seconds in (stages, alone))
        speeds.append(took / expected if expected > 0 else 1.0)
    return tuple(speeds)
