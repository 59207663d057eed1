"""What every rank holds at its peak: how many microbatches of each of its stages, as counts for sizes to be put into.

    row of rank 0 (1f1b, 2 ranks)    0F0  0F1  0B0  0F2  0B1  0B2
    pairs held, one of them in B      1    2   2+B   2   2+B  1+B      of which only "2+B" can be the peak

A rank with several stages peaks at different moments for different sizes, so every moment that could be the peak is
kept. A stage that is recomputed holds less, and while its backward runs one microbatch's whole: so each moment counts
pairs held since F, those of them whose backward runs, and those between I and W. With a cut's bytes put in, the largest
sum is the simulator's peak: `Peaks` does so for many cuts at once, `HeldPairs` for one, without recomputation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from drumline.core.action import TIMED_OPS, Action, Op
from drumline.core.program import Program
from drumline.core.rules import Backward
from drumline.core.simulate.graph import Floats

_Moment = tuple[int, ...]  # (held since F, of them in their backward, between I and W) of each stage in turn


@dataclass(frozen=True, slots=True)
class PairSizes:
    """Bytes of a pair of each stage, (cuts, stages): as it is kept, in its backward, and between I and W."""

    kept: Floats
    full: Floats
    until_weight: Floats


class Peaks:
    """The moments of every rank that could be its peak."""

    def __init__(self, program: Program) -> None:
        self.stages = [program.placement.stages_of(rank) for rank in range(program.num_ranks)]
        self.moments = [
            np.array(_largest(_moments(row, stages, program.backwards)) or [(0,) * 3 * len(stages)], dtype=float)
            for row, stages in zip(program.rows, self.stages, strict=True)
        ]

    def stash(self, sizes: PairSizes) -> Floats:
        """Return every rank's peak of activations, (cuts, ranks).

        >>> from drumline.schedules import generate
        >>> one, none = np.ones((1, 2)), np.zeros((1, 2))
        >>> Peaks(generate("1f1b", num_ranks=2, num_microbatches=4)).stash(PairSizes(one, 10 * one, none)).tolist()
        [[11.0, 10.0]]
        """
        columns = []
        for stages, moments in zip(self.stages, self.moments, strict=True):
            here = list(stages)
            kept, until = sizes.kept[:, here], sizes.until_weight[:, here]
            bytes_of = np.stack([kept, sizes.full[:, here] - kept, until], axis=2).reshape(len(kept), -1)
            columns.append((bytes_of @ moments.T).max(axis=1))
        return np.stack(columns, axis=1)

    def of_stage(self, stage: int) -> Floats:
        """Return what the rank with most of it holds of one stage alone, moment by moment: (moments, 3)."""
        found = [
            moments[:, 3 * stages.index(stage) : 3 * stages.index(stage) + 3]
            for stages, moments in zip(self.stages, self.moments, strict=True)
            if stage in stages
        ]
        return np.concatenate(found)


@dataclass(frozen=True, slots=True)
class HeldPairs:
    """One rank: its stages, and for each moment that could be the peak what it holds of each of them.

    That is how many pairs between F and I (or B), and how many between I and W. `shares` says what part of each stage's
    microbatches the rank runs: less than all where a stage has two copies.
    """

    stages: tuple[int, ...]
    moments: tuple[tuple[tuple[int, int], ...], ...]
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


def held_by(program: Program) -> tuple[HeldPairs, ...]:
    r"""Return what every rank holds.

    >>> [rank.moments for rank in held_by(Program.parse("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1"))]
    [(((2, 0),),), (((1, 0),),)]
    """
    found = []
    for rank, row in enumerate(program.rows):
        stages = program.placement.stages_of(rank)
        moments = _moments(row, stages, program.backwards)
        pairs = _largest(
            tuple(one for at in range(0, len(each), 3) for one in each[at : at + 3 : 2]) for each in moments
        )
        forwards = Counter(part.stage for action in row for part in action.work if part.op is Op.FORWARD)
        found.append(
            HeldPairs(
                stages,
                tuple(tuple(zip(one[::2], one[1::2], strict=True)) for one in pairs),
                tuple(forwards[stage] / program.num_microbatches for stage in stages),
            )
        )
    return tuple(found)


def _moments(row: Sequence[Action], stages: Sequence[int], backwards: Sequence[Backward]) -> Iterator[_Moment]:
    """Yield the counts while each action of a row runs."""
    place = {stage: at for at, stage in enumerate(stages)}
    held, until = [0] * len(stages), [0] * len(stages)
    for action in row:
        if action.op not in TIMED_OPS:
            continue
        parts = [(place[part.stage], part.op, backwards[part.stage]) for part in action.work]
        split = [at for at, op, kind in parts if op is Op.BACKWARD_INPUT and kind is Backward.WHOLE]
        running = [at for at, op, _ in parts if op in (Op.BACKWARD, Op.BACKWARD_INPUT)]
        for at, op, _ in parts:
            held[at] += op is Op.FORWARD
        # While I runs, its pair counts as the larger of what F left and what W will need.
        for turned in product((False, True), repeat=len(split)):
            moved = [at for at, turn in zip(split, turned, strict=True) if turn]
            counts = zip(range(len(stages)), held, until, strict=True)
            yield tuple(
                number
                for at, pairs, later in counts
                for number in (pairs - moved.count(at), running.count(at) - moved.count(at), later + moved.count(at))
            )
        for at, op, kind in parts:
            held[at] -= op in (Op.BACKWARD, Op.BACKWARD_INPUT) or (op is Op.FORWARD and kind is Backward.NONE)
            until[at] += (at in split and op is Op.BACKWARD_INPUT) - (op is Op.BACKWARD_WEIGHT)


def _largest(moments: Iterable[_Moment]) -> list[_Moment]:
    """Leave out moments at which nothing is held more of than at some other."""
    found: list[_Moment] = []
    for moment in sorted(set(moments), reverse=True):
        if not any(all(a >= b for a, b in zip(other, moment, strict=True)) for other in found):
            found.append(moment)
    return found
