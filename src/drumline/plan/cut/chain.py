"""A chain of blocks as numbers: what runs of blocks cost as stages, on ranks that hold a given number of pairs.

Everything is a difference of prefix sums, so runs can be arrays of any shape. They can be every slice of the chain for
dynamic programming, the stages of one cut, or those of many cuts at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from drumline.core.errors import PlanError
from drumline.core.graph import Floats, Ints
from drumline.plan.cut.cuts import Counts, ends_of
from drumline.plan.cut.peaks import HeldPairs

Again = bool | npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class BlockCosts:
    """What one block costs, in any stage.

    `activation_bytes` are held per microbatch from F on, `held_until_weight_bytes` of it from I to W (None: the same).
    A stage that begins with this block also holds `start_bytes` per microbatch: its input. `static_bytes` are weights,
    gradients and optimizer state. `tied` names the part of these that other blocks share: a rank holds it once.
    `output_bytes` is what the block passes on. A recomputed stage keeps its input and, for its last block,
    `checkpoint_bytes`; in its backward it holds `again_bytes` more for that block than a stage without recomputation.
    """

    seconds: float
    activation_bytes: float = 0.0
    held_until_weight_bytes: float | None = None
    start_bytes: float = 0.0
    static_bytes: float = 0.0
    tied: tuple[tuple[str, float], ...] = ()
    output_bytes: float = 0.0
    checkpoint_bytes: float = 0.0
    again_bytes: float = 0.0
    trains: bool = True


def sums(values: Sequence[float]) -> Floats:
    """Return the prefix sums, from 0 on."""
    return np.array(list(accumulate(values, initial=0.0)))


class BlockTable:
    """Runs of blocks from `firsts` to before `ends`, in arrays of any shape; results have the same shape."""

    def __init__(self, blocks: Sequence[BlockCosts]) -> None:
        self.num_blocks = len(blocks)
        until = (block.held_until_weight_bytes for block in blocks)
        self.seconds, self._full, self._static = (
            sums([getattr(block, name) for block in blocks]) for name in ("seconds", "activation_bytes", "static_bytes")
        )
        self._until = sums(
            [
                full if own_bytes is None else own_bytes
                for full, own_bytes in zip(np.diff(self._full), until, strict=True)
            ]
        )
        self._start, self._checkpoint, self._again, outputs = (
            np.array([float(getattr(block, name)) for block in blocks])
            for name in ("start_bytes", "checkpoint_bytes", "again_bytes", "output_bytes")
        )
        self._outputs = np.append(0.0, outputs)
        tied = {name: size for block in blocks for name, size in block.tied}
        self._tied = [(size, sums([name in dict(block.tied) for block in blocks])) for name, size in tied.items()]

    @property
    def grid(self) -> tuple[Ints, Ints]:
        """Every slice, as first blocks and ends: (first, end)."""
        return np.arange(self.num_blocks)[:, None], np.arange(self.num_blocks + 1)[None, :]

    def sent(self, ends: Ints) -> Floats:
        """Return what a run passes on; nothing for the last run."""
        return np.where(ends < self.num_blocks, self._outputs[ends], 0.0)

    def received(self, firsts: Ints) -> Floats:
        """Return the input of a run; nothing for the first run."""
        sizes: Floats = self._outputs[firsts]
        return sizes

    def pairs(self, firsts: Ints, ends: Ints, again: Again = False) -> Floats:
        """Return the bytes of a pair, (..., 3): as kept, what its backward adds, and between I and W."""
        full = self._full[ends] - self._full[firsts] + self._start[firsts]
        kept_bytes = np.where(again, self.received(firsts) + self._checkpoint[ends - 1], full)
        more = full + self._again[ends - 1] * again - kept_bytes
        return np.stack([kept_bytes, more, self._until[ends] - self._until[firsts]], axis=-1)

    def rank_bytes(self, rank: HeldPairs, firsts: Ints, ends: Ints, again: Again = False) -> Floats:
        """Return the peak of a rank whose stages are the runs along the last axis; tied weights count once."""
        static: Floats = (self._static[ends] - self._static[firsts]).sum(axis=-1)
        for size, uses in self._tied:
            static = static - size * np.maximum((uses[ends] - uses[firsts]).sum(axis=-1) - 1, 0)
        return rank.stash(self.pairs(firsts, ends, again)) + static


class CutChain:
    """The blocks on ranks, with what each rank holds of its stages; some stages may be recomputed."""

    def __init__(
        self, table: BlockTable, num_stages: int, held_pairs: Sequence[HeldPairs], recompute: Sequence[bool] = ()
    ) -> None:
        self.table = table
        self.num_stages = num_stages
        self.held_pairs = held_pairs or [HeldPairs((stage,), np.zeros((1, 1, 3))) for stage in range(num_stages)]
        self._again = np.array(recompute or (False,) * num_stages)
        self.shares_ranks = any(len(rank.stages) > 1 for rank in self.held_pairs)
        self.shares = np.zeros((len(self.held_pairs), num_stages))
        named = {stage for rank in self.held_pairs for stage in rank.stages}
        if named != set(range(num_stages)):
            raise PlanError(f"held covers the stages {sorted(named)}", expected=f"all of 0 to {num_stages - 1}")
        for rank, row in zip(self.held_pairs, self.shares, strict=True):
            row[list(rank.stages)] = rank.shares or 1.0

    def stage_bytes(self, stage: int) -> Floats:
        """Return what every slice would cost as this stage, alone on its ranks; infinite if it is empty."""
        firsts, ends = self.table.grid
        runs = firsts[..., None], ends[..., None], self._again[[stage]]
        alone = [rank.only([stage]) for rank in self.held_pairs if stage in rank.stages]
        size = np.max([self.table.rank_bytes(rank, *runs) for rank in alone], axis=0)
        return np.where(firsts < ends, size, np.inf)

    def rank_bytes(self, many: Sequence[Counts]) -> Floats:
        """Return every rank's peak under each of these cuts, (cuts, ranks)."""
        ends = np.array([ends_of(counts) for counts in many])
        columns = []
        for rank in self.held_pairs:
            here = np.array(rank.stages)
            columns.append(self.table.rank_bytes(rank, ends[:, here], ends[:, here + 1], self._again[here]))
        return np.stack(columns, axis=1)

    def quality(self, many: Sequence[Counts]) -> list[tuple[float, float]]:
        """Return the time of the largest rank, then the unevenness of the stages: smaller is better."""
        seconds = np.diff(self.table.seconds[[ends_of(counts) for counts in many]], axis=1)
        largest, squares = (seconds @ self.shares.T).max(axis=1), (seconds**2).sum(axis=1)
        return list(zip(largest.tolist(), squares.tolist(), strict=True))
