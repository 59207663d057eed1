"""The search on placements by name: one of them, or all that the counts admit, for one and the same model.

On all of them the costs are those of a stage when every rank holds one. A placement with v stages per rank cuts each of
these into v equal parts, so that every placement does the same work and holds the same bytes; a limit in pairs counts v
of them as one.

    one stage a rank    a        b        c        d
    two                 a/2 a/2  b/2 b/2  c/2 c/2  d/2 d/2     dealt to the ranks as the placement says
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from drumline.core.costs import Costs, cut_finer
from drumline.core.errors import PlanError, nearest
from drumline.core.placement import Placement
from drumline.core.timeline.idle import Limit
from drumline.plan.search.search import Found, search

PLACEMENTS = ("linear", "loop", "v", "bidirectional")


def placement_named(name: str, num_ranks: int, num_microbatches: int, stages_per_rank: int | None = None) -> Placement:
    """Return a placement by its name; on a bidirectional one the second half of the microbatches goes up.

    >>> placement_named("v", 2, 4).homes
    (0, 1, 1, 0)
    """
    if name not in PLACEMENTS:
        raise PlanError(f"unknown placement {name!r}", fix=nearest(name, (*PLACEMENTS, "all")))
    if name in ("linear", "bidirectional"):
        if stages_per_rank not in (None, 1):
            raise PlanError(
                f"{name} with {stages_per_rank} stages per rank",
                expected="one stage per rank",
                fix="leave --stages-per-rank out, or choose loop or v",
            )
        if name == "linear":
            return Placement.linear(num_ranks)
        if num_ranks % 2 or num_microbatches < 2:
            raise PlanError(
                f"bidirectional with {num_ranks} ranks and {num_microbatches} microbatches",
                expected="an even number of ranks, and two microbatches or more",
            )
        return Placement.bidirectional(num_ranks, mirrored=range((num_microbatches + 1) // 2, num_microbatches))
    maker = Placement.v if name == "v" else Placement.loop
    return maker(num_ranks, stages_per_rank=stages_per_rank or 2)


class Everywhere(list[Found]):
    """What was found on every placement, the best first, and why placements were left out, by their name."""

    def __init__(self, found: Iterable[Found], left_out: Mapping[str, PlanError] | None = None) -> None:
        super().__init__(found)
        self.left_out = dict(left_out or {})


def search_all(
    costs: Costs,
    num_ranks: int,
    *,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    limit: Limit | None = None,
    seconds: float = 10.0,
    **options: Any,
) -> Everywhere:
    """Search on every placement that the counts and the limit admit, and return what was found, the best first.

    The seconds are shared out evenly; `options` are those of `search`. Placements that do not admit the counts or the
    limit are in `left_out`, each with the reason.

    >>> [found.placement for found in search_all(Costs(), 2, num_microbatches=4, seconds=2)]
    ['bidirectional', 'loop', 'v', 'linear']
    """
    found: list[Found] = []
    left_out: dict[str, PlanError] = {}
    limit = limit or Limit()
    for name in PLACEMENTS:
        try:
            per_rank = None if name in ("linear", "bidirectional") else stages_per_rank
            placement = placement_named(name, num_ranks, num_microbatches, per_rank)
            share = placement.num_stages // num_ranks
            pairs = None if limit.max_activations is None else limit.max_activations * share
            found.append(
                search(
                    cut_finer(costs, share),
                    placement,
                    num_microbatches=num_microbatches,
                    limit=Limit(pairs, limit.max_bytes),
                    seconds=seconds / len(PLACEMENTS),
                    **options,
                )
            )
        except PlanError as error:
            left_out[name] = error
    if not found:
        raise next(iter(left_out.values()))
    return Everywhere(sorted(found, key=lambda one: one.value), left_out)
