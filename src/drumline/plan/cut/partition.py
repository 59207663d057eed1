"""The best cut of a chain of blocks: the largest rank as short as it can be, within every rank's memory.

    blocks   3 1 2 2 4        into 3 stages:   3 1 | 2 2 | 4     largest 4, and no cut has a smaller one

Among cuts with the shortest largest rank, the one with the smallest sum of squares is taken: stages are as even as that
allows. With one stage on every rank both are found exactly, by dynamic programming over (stage, first block), O(S n²):

    best(s, i) = min over j of max(seconds(i..j), best(s + 1, j))

and a limit only forbids some (stage, i, j). Several stages on one rank share its time and its memory:

    blocks   1 1 1 1 1 1 1 1 4    as a V on 2 ranks:   1 1 | 1 1 1 | 1 1 1 | 4     2 + 4 on rank 0, 3 + 3 on rank 1

Then the boundaries of that cut are moved until nothing gets better, and from there all cuts are searched, with the
table and the share of what is left as bounds. The search is exact unless it runs out of nodes, and says so
(`Partition.is_exact`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from drumline.core.errors import PlanError, counted
from drumline.core.timeline.idle import Limit
from drumline.plan.cut.chain import BlockCosts, Chain, Partition
from drumline.plan.cut.climb import Counts, climb, ends_of, even_cut, neighbours
from drumline.plan.cut.peaks import HeldPairs
from drumline.plan.cut.shared_ranks import Bounds, Search

_MAX_MOVES = 20_000  # a second or two
_REACH = 3  # blocks that a boundary moves at once


def partition(
    blocks: Sequence[BlockCosts], num_stages: int, *, held: Sequence[HeldPairs] = (), max_bytes: float | None = None
) -> Partition:
    """Return the best cut of `blocks` into stages; `held`, from `held_by`, says what each rank holds at once.

    >>> partition([BlockCosts(seconds) for seconds in (3, 1, 2, 2, 4)], 3).counts
    (2, 2, 1)
    """
    if not 1 <= num_stages <= len(blocks):
        raise PlanError(
            f"{counted(len(blocks), 'block')} for {counted(num_stages, 'stage')}",
            expected="at least one block per stage, and at least one stage",
        )
    if max_bytes is not None and not held:
        raise PlanError("max_bytes without held", expected="what every rank holds, as held_by(program) tells")
    chain = Chain(blocks, num_stages, held)
    limit = Limit(max_bytes=max_bytes).most_bytes
    found = Bounds(chain, limit).best_cut()
    if found is not None and not chain.shares_ranks:
        return chain.partition(ends_of(found), True)
    even = even_cut(chain.num_blocks, num_stages)
    least = even if limit == math.inf else _climbed(even, chain.sizes)
    if found is not None:
        value = partial(chain.fitting, limit)
        begun = min((ends_of(_climbed(one, value)) for one in (found, least)), key=value)
        fits = limit == math.inf or max(chain.rank_bytes(begun)) <= limit
        search = Search(chain, limit, begun if fits else None)
        if search.best is not None:
            return chain.partition(search.best, search.is_exact)
    smallest = Search(chain, math.inf, ends_of(least), smallest=True)
    assert smallest.best is not None, "without a limit something fits"
    if max(chain.rank_bytes(smallest.best)) <= limit:
        return chain.partition(smallest.best, False)  # the search for a fast one gave up before it found any
    raise _too_small(chain, limit, smallest)


def _climbed(begun: Counts, value: Callable[[list[int]], tuple[float, ...]]) -> Counts:
    """Return the cut at which no move of one or two boundaries makes the value smaller any more."""
    rounds = _MAX_MOVES // max(sum(1 for _ in neighbours(begun, reach=_REACH)), 1)
    return climb([begun], lambda many: [value(ends_of(one)) for one in many], rounds=rounds, reach=_REACH)


def rank_bytes(blocks: Sequence[BlockCosts], counts: Sequence[int], held: Sequence[HeldPairs]) -> tuple[float, ...]:
    """Return every rank's peak under a given cut.

    >>> rank = HeldPairs(stages=(0,), moments=(((2, 0),),))
    >>> rank_bytes([BlockCosts(1.0, activation_bytes=10, static_bytes=5)] * 3, [3], [rank])
    (75.0,)
    """
    return Chain(blocks, len(counts), held).rank_bytes(ends_of(counts))


def _too_small(chain: Chain, limit: float, least: Search) -> PlanError:
    """Return the error that names the smallest limit that would do."""
    assert least.best is not None
    smallest = math.ceil(max(chain.rank_bytes(least.best)))
    error = PlanError(
        f"no cut {'of' if least.is_exact else 'was found of'} {counted(chain.num_blocks, 'block')} into"
        f" {counted(chain.num_stages, 'stage')} that keeps every rank within {limit:,.0f} bytes",
        expected=f"max_bytes={smallest} or more",
        fix="use more ranks, smaller microbatches, or a schedule that holds fewer of them",
    )
    error.smallest_bytes = smallest
    return error
