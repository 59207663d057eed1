"""The ranks of a plan: how fast each computes, what it may hold, and links that differ from the profiled ones."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from drumline.core.costs import Edge
from drumline.core.errors import PlanError, counted

_MOST_PERMUTED = 4  # up to this many ranks, every order is tried


@dataclass(frozen=True, slots=True)
class Ranks:
    """`speeds` are relative to the profiled device; a rank keeps the share `headroom` of its `memory` bytes free.

    >>> Ranks.of(2, memory_bytes=1000, headroom=0.25).limits
    (750.0, 750.0)
    """

    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    headroom: float = 0.1
    edges: Mapping[tuple[int, int], Edge] = field(default_factory=dict)

    @staticmethod
    def of(
        num_ranks: int,
        *,
        memory_bytes: float | None = None,
        headroom: float = 0.1,
        rank_speeds: Sequence[float] | None = None,
        rank_memory: Sequence[float] | None = None,
        links: Mapping[tuple[int, int], Edge] | None = None,
    ) -> Ranks:
        """Return the ranks; without a memory limit unless given."""
        if isinstance(num_ranks, bool) or not isinstance(num_ranks, int) or num_ranks < 1:
            raise PlanError(f"num_ranks is {num_ranks!r}", expected="a whole number of 1 or more")
        if not 0 <= headroom < 1:
            raise PlanError(f"headroom is {headroom:g}", expected="a share of the memory, from 0 to less than 1")
        if memory_bytes is not None and rank_memory is not None:
            raise PlanError("both memory_bytes and rank_memory are set", expected="only one of the two")
        speeds = [1.0] * num_ranks if rank_speeds is None else list(rank_speeds)
        memory = [math.inf if memory_bytes is None else float(memory_bytes)] * num_ranks
        if rank_memory is not None:
            memory = [float(value) for value in rank_memory]
        for what, values in (("speeds", speeds), ("memory sizes", memory)):
            if len(values) != num_ranks:
                raise PlanError(f"got {len(values)} {what}", expected=f"one for each of {counted(num_ranks, 'rank')}")
            if any(math.isnan(value) or value <= 0 for value in values):
                raise PlanError(f"the {what} are {values}", expected="more than 0 each")
        for source, target in links or {}:
            if not (source in range(num_ranks) and target in range(num_ranks) and source != target):
                raise PlanError(f"a link is {source}-{target}", expected=f"two different ranks of 0 to {num_ranks - 1}")
        return Ranks(tuple(speeds), tuple(memory), headroom, dict(links or {}))

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return len(self.speeds)

    @property
    def limits(self) -> tuple[float, ...]:
        """The bytes that each rank may hold."""
        return tuple(value * (1 - self.headroom) for value in self.memory)

    @property
    def is_limited(self) -> bool:
        """Whether any rank has a memory limit."""
        return min(self.memory) < math.inf

    def orders(self) -> Iterator[tuple[int, ...]]:
        """Yield the distinct orders of ranks: which rank plays rank 0, 1, ... of a schedule.

        >>> list(Ranks.of(3).orders()), list(Ranks.of(2, rank_speeds=[1, 0.5]).orders())
        ([(0, 1, 2)], [(0, 1), (1, 0)])
        """
        alike = len(set(zip(self.speeds, self.memory, strict=True))) == 1 and not self.edges
        seen_orders = set()
        every = permutations(range(self.num_ranks)) if not alike and self.num_ranks <= _MOST_PERMUTED else []
        for order in [tuple(range(self.num_ranks)), *every]:
            kind = tuple((self.speeds[number], self.memory[number], number if self.edges else 0) for number in order)
            if kind not in seen_orders:
                seen_orders.add(kind)
                yield order
