"""What every rank holds at its peak: how many microbatches of each of its stages, as counts to multiply with sizes.

    row of rank 0 (1f1b, 2 ranks)    0F0  0F1  0B0  0F2  0B1  0B2
    pairs held, one of them in B      1    2   2+B   2   2+B  1+B      only "2+B" can be the peak

A rank with several stages peaks at different moments for different sizes, so every moment that could be the peak is
kept. A recomputed stage holds less, plus all of one microbatch while its backward runs. So each moment counts pairs
held since F, those of them whose backward runs, and those between I and W. Multiplied with a cut's bytes, the largest
sum is the simulator's peak, for many cuts at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from drumline.core.action import TIMED_OPS, Action, Op
from drumline.core.graph import Floats
from drumline.core.program import Program, once_per_program
from drumline.core.rules import Backward

_Moment = tuple[int, ...]  # (held since F, of them in their backward, between I and W) of each stage in turn


@dataclass(frozen=True, slots=True, eq=False)
class HeldPairs:
    """One rank: its stages, and what it holds of each at every moment that could be the peak: (moments, stages, 3).

    The three are the pairs between F and I (or B), those of them in their backward, and the pairs between I and W.
    `shares` is the share of each stage's microbatches that the rank runs: less than all if a stage has two copies.
    """

    stages: tuple[int, ...]
    moments: Floats
    shares: tuple[float, ...] = ()  # all microbatches, unless given

    def stash(self, pairs: Floats) -> Floats:
        """Return the rank's peak of activations, given the bytes of a pair of each of its stages, (..., stages, 3).

        The three are the bytes of a pair as kept, what its backward adds, and between I and W.

        >>> from drumline.schedules import generate
        >>> ranks = held_by(generate("1f1b", num_ranks=2, num_microbatches=4))
        >>> [float(rank.stash(np.array([[1.0, 9.0, 0.0]]))) for rank in ranks]
        [11.0, 10.0]
        """
        flat = pairs.reshape(*pairs.shape[:-2], -1)
        stashes: Floats = (flat @ self.moments.reshape(len(self.moments), -1).T).max(axis=-1)
        return stashes

    def only(self, stages: Sequence[int]) -> HeldPairs:
        """Return what the rank holds of only some of its stages."""
        return HeldPairs(tuple(stages), self.moments[:, [self.stages.index(stage) for stage in stages]])


@once_per_program
def held_by(program: Program) -> tuple[HeldPairs, ...]:
    r"""Return what every rank holds.

    >>> [rank.moments.tolist() for rank in held_by(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"))]
    [[[[2.0, 1.0, 0.0]]], [[[1.0, 1.0, 0.0]]]]
    >>> [rank.moments.tolist() for rank in held_by(Program.parse("0F0.0,0F0.1,0B0.1,0B0.0"))]
    [[[[1.0, 0.5, 0.0]]]]
    """
    held_pairs = []
    for rank, row in enumerate(program.rows):
        stages = program.placement.stages_of(rank)
        moments = _largest(_moments(row, stages, program.backwards)) or [(0,) * 3 * len(stages)]
        forwards = Counter(part.stage for action in row for part in action.work if part.op is Op.FORWARD)
        shares = tuple(forwards[stage] / program.num_units for stage in stages)
        counts = np.array(moments, dtype=float).reshape(-1, len(stages), 3) / program.num_slices
        held_pairs.append(HeldPairs(stages, counts, shares))
    return tuple(held_pairs)


def _moments(row: Sequence[Action], stages: Sequence[int], backwards: Sequence[Backward]) -> Iterator[_Moment]:
    """Yield the counts while each action of a row runs."""
    place = {stage: at for at, stage in enumerate(stages)}
    held_counts, until = [0] * len(stages), [0] * len(stages)
    for action in row:
        if action.op not in TIMED_OPS:
            continue
        parts = [(place[part.stage], part.op, backwards[part.stage]) for part in action.work]
        split = [at for at, op, kind in parts if op is Op.BACKWARD_INPUT and kind is Backward.WHOLE]
        running = [at for at, op, _ in parts if op in (Op.BACKWARD, Op.BACKWARD_INPUT)]
        for at, op, _ in parts:
            held_counts[at] += op is Op.FORWARD
        # While I runs, its pair counts as the larger of what F left and what W will need.
        for turned in product((False, True), repeat=len(split)):
            moved = [at for at, turn in zip(split, turned, strict=True) if turn]
            counts = zip(range(len(stages)), held_counts, until, strict=True)
            yield tuple(
                number
                for at, pairs, later in counts
                for number in (pairs - moved.count(at), running.count(at) - moved.count(at), later + moved.count(at))
            )
        for at, op, kind in parts:
            held_counts[at] -= op in (Op.BACKWARD, Op.BACKWARD_INPUT) or (op is Op.FORWARD and kind is Backward.NONE)
            until[at] += (at in split and op is Op.BACKWARD_INPUT) - (op is Op.BACKWARD_WEIGHT)


def _largest(moments: Iterable[_Moment]) -> list[_Moment]:
    """Drop moments at which nothing is larger than at some other moment."""
    moments_left: list[_Moment] = []
    for moment in sorted(set(moments), reverse=True):
        if not any(all(a >= b for a, b in zip(other, moment, strict=True)) for other in moments_left):
            moments_left.append(moment)
    return moments_left
