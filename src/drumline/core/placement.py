"""The rank that runs each (stage, microbatch).

    linear          loop (v = 2)      v (v = 2)         bidirectional
    rank 0: 0       rank 0: 0 4       rank 0: 0 7       rank 0: 0, and 3 for mirrored microbatches
    rank 1: 1       rank 1: 1 5       rank 1: 1 6       rank 1: 1, and 2
    rank 2: 2       rank 2: 2 6       rank 2: 2 5       rank 2: 2, and 1
    rank 3: 3       rank 3: 3 7       rank 3: 3 4       rank 3: 3, and 0

A bidirectional placement holds two copies of every stage: mirrored microbatches flow from the last rank to the first.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from drumline.core.action import COMPUTE_OPS, Action, Op
from drumline.core.graph import PLACE, Columns, Ints


@dataclass(frozen=True, slots=True)
class Placement:
    """The home rank of every stage, and the microbatches that use the ranks in mirrored order.

    >>> placement = Placement.v(num_ranks=4)
    >>> [placement.rank_of(stage, 0) for stage in range(8)]
    [0, 1, 2, 3, 3, 2, 1, 0]
    >>> placement.name
    'v'
    """

    num_ranks: int
    homes: tuple[int, ...]
    mirrored: frozenset[int] = frozenset()
    _stages_by_rank: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def rank_of(self, stage: int, microbatch: int) -> int:
        """Return the rank that runs `stage` for `microbatch`."""
        home = self.homes[stage]
        return self.num_ranks - 1 - home if microbatch in self.mirrored else home

    def ranks_of(self, stage: int) -> tuple[int, ...]:
        """Return every rank that holds a copy of `stage`, lowest first."""
        home = self.homes[stage]
        return tuple(sorted({home, self.num_ranks - 1 - home})) if self.mirrored else (home,)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that `rank` holds, lowest first."""
        if (
            not self._stages_by_rank
        ):  # computed once for all ranks: doing it per rank would be too slow for 100,000 ranks
            stages_by_rank: dict[int, list[int]] = {}
            for stage in range(self.num_stages):
                for holder in self.ranks_of(stage):
                    stages_by_rank.setdefault(holder, []).append(stage)
            object.__setattr__(
                self, "_stages_by_rank", {holder: tuple(stages) for holder, stages in stages_by_rank.items()}
            )
        return self._stages_by_rank.get(rank, ())

    @property
    def num_stages(self) -> int:
        """Number of stages that the model is cut into."""
        return len(self.homes)

    @property
    def name(self) -> str:
        """`linear`, `loop`, `v`, `bidirectional`, or `custom` for any other."""
        if self.mirrored:
            return "bidirectional" if self.homes == tuple(range(self.num_ranks)) else "custom"
        passes, rest = divmod(self.num_stages, self.num_ranks)
        if rest == 0:
            for named in (Placement.loop, Placement.v):
                if self == named(self.num_ranks, stages_per_rank=passes):
                    return "linear" if passes == 1 else named.__name__
        return "custom"

    @staticmethod
    def linear(num_ranks: int) -> Placement:
        """Place one stage on each rank, in order."""
        return Placement(num_ranks, tuple(range(num_ranks)))

    @staticmethod
    def loop(num_ranks: int, *, stages_per_rank: int = 2) -> Placement:
        """Place stages round-robin: rank 0 holds stages 0, P, 2P, ..."""
        return Placement(num_ranks, tuple(range(num_ranks)) * stages_per_rank)

    @staticmethod
    def v(num_ranks: int, *, stages_per_rank: int = 2) -> Placement:
        """Place stages down the ranks and up again, so that the last stage before a turn and the next share a rank."""
        down = tuple(range(num_ranks))
        passes = (down if turn % 2 == 0 else down[::-1] for turn in range(stages_per_rank))
        return Placement(num_ranks, tuple(rank for one_pass in passes for rank in one_pass))

    @staticmethod
    def bidirectional(num_ranks: int, *, mirrored: Iterable[int]) -> Placement:
        """Place one stage per rank going down; microbatches in `mirrored` go up."""
        return Placement(num_ranks, tuple(range(num_ranks)), frozenset(mirrored))


def infer(rows: Sequence[Sequence[Action]]) -> Placement:
    """Return the placement that most of the work in the rows agrees with.

    The validator reports work that disagrees: a single stray action must not move its whole stage.

    >>> infer([[Action(0, Op.FORWARD, 0)], [Action(1, Op.FORWARD, 0)]]).homes
    (0, 1)
    """
    votes: dict[tuple[int, int], Counter[int]] = defaultdict(Counter)
    for rank, row in enumerate(rows):
        for part in (part for action in row for part in action.work):
            if part.op in COMPUTE_OPS and part.microbatch is not None:
                # A forward weighs more: if a pair is split between ranks, the stash is where F ran.
                votes[part.stage, part.microbatch][rank] += 3 if part.op is Op.FORWARD else 2
    num_ranks = len(rows)
    num_stages = 1 + max((stage for stage, _ in votes), default=-1)
    paths: dict[int, dict[int, int]] = defaultdict(dict)
    for (stage, microbatch), counts in votes.items():
        paths[microbatch][stage] = _commonest(counts, 0)
    # Two directions are two equally common paths; call the smaller one down and its mirror image up.
    seed = _commonest(Counter(tuple(sorted(path.items())) for path in paths.values()), ())
    up = _mirror_images(paths, dict(seed), num_ranks)
    counted: list[Counter[int]] = [Counter() for _ in range(num_stages)]
    for stage, rank in (step for m, path in paths.items() if m not in up for step in path.items()):
        counted[stage][rank] += 1
    homes = tuple(_commonest(counts, 0) for counts in counted)
    return Placement(num_ranks, homes, frozenset(_mirror_images(paths, dict(enumerate(homes)), num_ranks)))


def consistent(columns: Columns) -> Placement | None:
    """Return the placement that all work in the rows agrees with, or None; does not count votes.

    >>> consistent(Columns.of([[Action(0, Op.FORWARD, 0)], [Action(0, Op.BACKWARD, 0)]])) is None
    True
    """
    computes = PLACE[columns.code] >= 0
    stage, microbatch, rank = columns.stage[computes], columns.microbatch[computes], columns.rank[computes]
    if not len(stage) or stage.min() < 0 or stage.max() >= len(stage) or not np.bincount(stage).all():
        return None
    homes = _homes(stage, rank)
    return (
        _two_ways(stage, microbatch, rank, columns.num_ranks) if homes is None else Placement(columns.num_ranks, homes)
    )


def _two_ways(stage: Ints, microbatch: Ints, rank: Ints, num_ranks: int) -> Placement | None:
    """Return the bidirectional placement that all of this work agrees with, or None."""
    last = num_ranks - 1
    first = stage == 0
    entered, at = np.divmod(np.unique(microbatch[first].astype(np.int64) * num_ranks + rank[first]), num_ranks)
    # The larger half of the microbatches goes down; if both are equal, the half that enters at the lower rank does.
    enters = int(np.bincount(at).argmax())
    mirrored = entered[(at == last - enters) & (at != enters) & (entered >= 0)]
    homes = _homes(stage, np.where(np.isin(microbatch, mirrored), last - rank, rank))
    return None if homes is None else Placement(num_ranks, homes, frozenset(mirrored.tolist()))


def _homes(stage: Ints, rank: Ints) -> tuple[int, ...] | None:
    """Return every stage's rank, or None if two ranks claim a stage."""
    homes = np.zeros(int(stage.max()) + 1, dtype=np.int64)
    homes[stage] = rank
    return tuple(homes.tolist()) if np.array_equal(homes[stage], rank) else None


def _commonest(counts: Counter[Any], default: Any) -> Any:
    """Return the most common item; the smallest one in a tie."""
    return min(counts, key=lambda value: (-counts[value], value), default=default)


def _mirror_images(paths: dict[int, dict[int, int]], down: dict[int, int], num_ranks: int) -> set[int]:
    up = {stage: num_ranks - 1 - rank for stage, rank in down.items()}
    return {m for m, path in paths.items() if _distance(path, up) < _distance(path, down)}


def _distance(path: dict[int, int], other: dict[int, int]) -> int:
    return sum(other.get(stage) != rank for stage, rank in path.items())
