"""The dynamic programme: the best that the stages from any block on can do, each with its ranks to itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from drumline.plan.cut.chain import Chain, Floats

SLACK = 1e-12  # of the largest stage: seconds are sums in floating point


class Bounds:
    """For every (stage, first block): the best that this and later stages can do, each with its ranks to itself."""

    def __init__(self, chain: Chain, limit: float) -> None:
        self.chain = chain
        self.fits = [chain.stage_bytes(stage) <= limit for stage in range(chain.num_stages)]
        self.seconds = chain.stage_seconds()
        parts = [max(one for rank in chain.ranks for at, one in rank if at == stage) for stage in range(len(self.fits))]
        allowed = [np.where(fits, self.seconds, np.inf) for fits in self.fits]
        self.on_ranks = [part * one for part, one in zip(parts, allowed, strict=True)]
        self.largest = suffixes(self.on_ranks, np.maximum)
        self.squares = suffixes([one**2 for one in allowed], np.add)

    def best_cut(self) -> list[int] | None:
        """Return where the stages end, from 0 on; None where no cut has every stage within the limit."""
        largest = self.largest[0][0]
        if largest == np.inf:
            return None
        short = [one <= largest * (1 + SLACK) for one in self.on_ranks]
        allowed = [np.where(one, self.seconds**2, np.inf) for one in short]
        squares = suffixes(allowed, np.add)
        ends = [0]
        for stage in range(self.chain.num_stages):
            first = ends[-1]
            ends.append(int(np.argmin(allowed[stage][first] + squares[stage + 1])))
        return ends


def suffixes(cost: Sequence[Floats], join: np.ufunc) -> list[Floats]:
    """Return, for every stage and first block, the least joined cost of this stage and those after it."""
    num_blocks = cost[0].shape[0]
    table = [np.where(np.arange(num_blocks + 1) == num_blocks, 0.0, np.inf)]
    for one in reversed(cost):
        best = np.min(join(one, table[0][None, :]), axis=1)
        table.insert(0, np.append(best, np.inf))
    return table
