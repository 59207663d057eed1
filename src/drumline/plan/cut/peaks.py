"""What every rank holds at its peak, for many cuts of one program at once.

    row of rank 0 (1f1b, 2 ranks)    0F0  0F1  0B0  0F2  0B1  0B2
    pairs held, one of them in B      1    2   2+B   2   2+B  1+B      of which only "2+B" can be the peak

A stage that is recomputed holds less, and while its backward runs one microbatch's whole: so each moment counts pairs
held since F, those of them whose backward runs, and those between I and W. With a cut's bytes put in, the largest sum
is the simulator's peak.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from drumline.core.action import TIMED_OPS, Action, Op
from drumline.core.backwards import Backward
from drumline.core.program import Program
from drumline.core.simulate.graph import Floats

_Moment = tuple[int, ...]  # (held since F, of them in their backward, between I and W) of each stage in turn


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a pair of each stage, (cuts, stages): as it is kept, in its backward, and between I and W."""

    kept: Floats
    full: Floats
    until_weight: Floats


class Peaks:
    """The moments of every rank that could be its peak."""

    def __init__(self, program: Program) -> None:
        self.stages = [program.placement.stages_of(rank) for rank in range(program.num_ranks)]
        self.moments = [
            np.array(_largest(_moments(row, stages, program.backwards)), dtype=float)
            for row, stages in zip(program.rows, self.stages, strict=True)
        ]

    def stash(self, sizes: Sizes) -> Floats:
        """Return every rank's peak of activations, (cuts, ranks).

        >>> from drumline.schedules import generate
        >>> one, none = np.ones((1, 2)), np.zeros((1, 2))
        >>> Peaks(generate("1f1b", num_ranks=2, num_microbatches=4)).stash(Sizes(one, 10 * one, none)).tolist()
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
                for number in (
                    pairs - moved.count(at),
                    running.count(at) - moved.count(at),
                    later + moved.count(at),
                )
            )
        for at, op, kind in parts:
            held[at] -= op in (Op.BACKWARD, Op.BACKWARD_INPUT) or (op is Op.FORWARD and kind is Backward.NONE)
            until[at] += (at in split and op is Op.BACKWARD_INPUT) - (op is Op.BACKWARD_WEIGHT)


def _largest(moments: Iterator[_Moment]) -> list[_Moment]:
    """Leave out moments at which nothing is held more of than at some other."""
    found: list[_Moment] = []
    for moment in sorted(set(moments), reverse=True):
        if not any(all(a >= b for a, b in zip(other, moment, strict=True)) for other in found):
            found.append(moment)
    return found or [(0, 0, 0)]
