"""How many microbatches of each of its stages a rank holds at once, as counts that any sizes can be put into.

    row of rank 0 (1f1b, 2 ranks)   0F0  0F1  0B0  0F2  0B1  0B2
    held of stage 0 meanwhile        1    2    2    2    2    1      of which only "2" can be the peak

A rank with several stages peaks at different moments for different sizes, so every moment that could be the peak is
kept. Whatever the sizes, the largest sum over these moments is what the simulator calls the rank's peak.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

from drumline.core.action import TIMED_OPS, Action, Op
from drumline.core.backwards import Backward
from drumline.core.program import Program

Counts = tuple[int, int]  # pairs between F and I (or B), and pairs between I and W


@dataclass(frozen=True, slots=True)
class Held:
    """One rank: its stages, and for each moment that could be the peak what it holds of each of them.

    `shares` says what part of each stage's microbatches the rank runs: less than all where a stage has two copies.
    """

    stages: tuple[int, ...]
    moments: tuple[tuple[Counts, ...], ...]
    shares: tuple[float, ...] = ()  # all of them, unless given

    @property
    def parts(self) -> tuple[tuple[int, float], ...]:
        """Its stages, each with the part of its microbatches that runs here."""
        return tuple(zip(self.stages, self.shares or (1.0,) * len(self.stages), strict=True))

    def bytes(self, full: Sequence[float], until_weight: Sequence[float], static: Sequence[float]) -> float:
        """Return the rank's peak, given each of its stages' bytes."""
        held = (
            sum(f * a + u * b for (f, u), a, b in zip(moment, full, until_weight, strict=True))
            for moment in self.moments
        )
        return max(held, default=0.0) + sum(static)


def held_by(program: Program) -> tuple[Held, ...]:
    r"""Return what every rank holds.

    >>> [rank.moments for rank in held_by(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"))]
    [(((2, 0),),), (((1, 0),),)]
    """
    return tuple(
        Held(
            stages := program.placement.stages_of(rank),
            _peaks(_moments(row, stages, program.backwards)),
            _shares(row, stages, program.num_microbatches),
        )
        for rank, row in enumerate(program.rows)
    )


def _shares(row: Sequence[Action], stages: Sequence[int], num_microbatches: int) -> tuple[float, ...]:
    """Return the part of each stage's forwards that a row has."""
    found = Counter(part.stage for action in row for part in action.work if part.op is Op.FORWARD)
    return tuple(found[stage] / num_microbatches for stage in stages)


def _moments(
    row: Sequence[Action], stages: Sequence[int], backwards: Sequence[Backward]
) -> Iterator[tuple[Counts, ...]]:
    """Yield the counts while each action of a row runs."""
    place = {stage: at for at, stage in enumerate(stages)}
    full, until_weight = [0] * len(stages), [0] * len(stages)
    for action in row:
        if action.op not in TIMED_OPS:
            continue
        split = [part for part in action.work if backwards[part.stage] is Backward.WHOLE]
        inputs = [place[part.stage] for part in split if part.op is Op.BACKWARD_INPUT]
        for part in action.work:
            full[place[part.stage]] += part.op is Op.FORWARD
        # While I runs, its pair counts as the larger of what F left and what W will need.
        for turned in product((False, True), repeat=len(inputs)):
            moved = [sum(at == one for one, turn in zip(inputs, turned, strict=True) if turn) for at in place.values()]
            yield tuple((f - m, u + m) for f, u, m in zip(full, until_weight, moved, strict=True))
        for part in action.work:
            at = place[part.stage]
            kind = backwards[part.stage]
            full[at] -= part.op in (Op.BACKWARD, Op.BACKWARD_INPUT) or (part.op is Op.FORWARD and kind is Backward.NONE)
            until_weight[at] -= part.op is Op.BACKWARD_WEIGHT
        for at in inputs:
            until_weight[at] += 1


def _peaks(moments: Iterator[tuple[Counts, ...]]) -> tuple[tuple[Counts, ...], ...]:
    """Leave out moments at which nothing is held more of than at some other."""
    found: list[tuple[Counts, ...]] = []
    for moment in sorted(set(moments), reverse=True):
        if not any(_covers(other, moment) for other in found):
            found.append(moment)
    return tuple(found)


def _covers(larger: tuple[Counts, ...], smaller: tuple[Counts, ...]) -> bool:
    return all(a >= c and b >= d for (a, b), (c, d) in zip(larger, smaller, strict=True))
