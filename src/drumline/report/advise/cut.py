"""Move blocks between stages, so that no rank is slower than the others.

rank 0   0 1 2 3            rank 1 takes twice as long
rank 1   4 5 6 7
rank 0   0 1 2 3 4 5        blocks 4-5 move to rank 0
rank 1   6 7

Where blocks are not known, as in a trace, the remedy says which stage to take them from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from drumline.core.backwards import Backward
from drumline.core.errors import PlanError
from drumline.plan.cut.timed import TimedCuts
from drumline.report.advise.block_costs import Blocks, Counts, blocks_of
from drumline.report.advise.remedy import LEAST_GAIN, Evidence, Remedy, predicted
from drumline.report.units import ms

_SLOWER = 0.02  # less is no difference between ranks
_NAMED_MOVES = 3


def recut(seen: Evidence) -> Iterator[Remedy]:
    """Yield the best other cut, where one is shorter."""
    program = seen.program
    blocks = blocks_of(seen.plan or {}, program, seen.costs)
    if blocks is None or set(program.backwards) != {Backward.WHOLE}:
        return
    cuts = TimedCuts(blocks.costs_of_blocks, program, [True] * len(blocks.names), blocks.costs)
    try:
        found = cuts.best().counts
    except PlanError:
        return
    before, after = cuts.makespans([blocks.counts, found])
    gain = (before - after) / seen.measured.makespan
    if gain < LEAST_GAIN:
        return
    moved = list(moves(blocks, found))
    listed = ", ".join(moved[:_NAMED_MOVES]) + (f" and {len(moved) - _NAMED_MOVES} more" if moved[3:] else "")
    sentence = f"{slowest_rank(seen.rank_seconds)}: move {listed} (balance={list(found)}), {predicted(gain)}"
    yield Remedy("cut", sentence, gain, {"balance": list(found)}, blocks.assumes)


def equal_stages(seen: Evidence) -> Iterator[Remedy]:
    """Yield what equal stages would save, where only stages are known."""
    ideal, level, stages = seen.simulated, seen.simulated.balanced, seen.stage_seconds
    if seen.plan is not None or level is None or len(stages) < 2:
        return
    slowest = max(range(len(stages)), key=stages.__getitem__)
    sentence = (
        f"Move layers off stage {slowest}: a microbatch takes {ms(stages[slowest])} there and "
        f"{ms(sum(stages) / len(stages))} on average. With equal stages the same order would take "
        f"{ms(level.makespan)} at best in place of {ms(ideal.makespan)}"
    )
    yield Remedy("stages", sentence, (ideal.makespan - level.makespan) / seen.measured.makespan)


def slowest_rank(seconds: Sequence[float]) -> str:
    """Return which rank is slower than the others on average, and by how much.

    >>> slowest_rank([1.0, 1.2, 1.0]), slowest_rank([1.0, 1.0])
    ('Rank 1 is 20% slower', 'The stages are uneven')
    """
    rank = max(range(len(seconds)), key=seconds.__getitem__)
    others = (sum(seconds) - seconds[rank]) / max(len(seconds) - 1, 1)
    more = seconds[rank] / others - 1 if others > 0 else 0.0
    return f"Rank {rank} is {more:.0%} slower" if more >= _SLOWER else "The stages are uneven"


def moves(blocks: Blocks, counts: Counts) -> Iterator[str]:
    """Yield what moves where, neighbours that move together at once."""
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
    """Return blocks by name.

    >>> _named(["5"]), _named(["5", "6"]), _named(["layers.5", "layers.6"])
    ('block 5', 'blocks 5-6', 'blocks layers.5 to layers.6')
    """
    if len(names) == 1:
        return f"block {names[0]}"
    numbers = names[0].isdigit() and names[-1].isdigit()
    return f"blocks {names[0]}{'-' if numbers else ' to '}{names[-1]}"
