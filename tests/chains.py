"""Every cut of a chain of blocks, and what its stages take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, combinations, pairwise

from drumline.plan.cut.chain import BlockCosts, BlockTable, CutChain
from drumline.plan.cut.peaks import HeldPairs
from names import NAMES

FLUSHED = tuple(name for name in NAMES if not name.startswith("pipedream"))


def cuts(num_blocks: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    for inner in combinations(range(1, num_blocks), num_stages - 1):
        yield tuple(j - i for i, j in pairwise((0, *inner, num_blocks)))


def stage_seconds(chain: Sequence[BlockCosts], counts: tuple[int, ...]) -> tuple[float, ...]:
    ends = list(accumulate(counts, initial=0))
    return tuple(sum(costs.seconds for costs in chain[i:j]) for i, j in pairwise(ends))


def rank_bytes(blocks: Sequence[BlockCosts], counts: Sequence[int], held: Sequence[HeldPairs]) -> tuple[float, ...]:
    """Return every rank's peak under a given cut."""
    return tuple(CutChain(BlockTable(blocks), len(counts), held).rank_bytes([tuple(counts)])[0].tolist())
