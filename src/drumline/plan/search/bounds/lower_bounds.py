"""Lower bounds that no program can beat, each with its proof; the largest one counts.

    bound       why
    work        a rank does one thing at a time
    residence   a pair is held while its microbatch goes to the last stage and back, and room is limited
    passage     everything that must precede an action has run before it; everything that must follow runs after it

All bounds use a smaller instance whose optimum is no larger. There every microbatch costs as much as the cheapest, and
a whole backward is an I that ends early with a W right after it. There, all microbatches are alike, so they may as well
pass every stage in order: swapping two that overtake each other makes nothing later. So "the m-th F of a stage" is a
single action and not a set of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from drumline.plan.search.bounds.earliest import latest
from drumline.plan.search.bounds.instance import Instance, W
from drumline.plan.search.bounds.relaxed import Relaxation

IsLate = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound: its value and its name."""

    value: float
    name: str


def lower_bound(instance: Instance, objective: str = "makespan", *, is_late: IsLate = lambda: False) -> Bound:
    """Return the largest bound that applies to the objective: makespan, span or steady.

    Passage takes most of the time: if `is_late`, it ends with what is proven by then.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.timeline.idle import Limit
    >>> from drumline.core.placement import Placement
    >>> lower_bound(Instance(Costs(), Placement.linear(4), 8))
    Bound(value=27.0, name='passage')
    >>> lower_bound(Instance(Costs(), Placement.linear(4), 8, Limit(max_activations=2)))
    Bound(value=39.0, name='passage')
    """
    bounds = BOUNDS | {"passage": partial(passage, is_late=is_late)}
    bounds_found = [Bound(bound(instance, objective), name) for name, bound in bounds.items()]
    return max(bounds_found, key=lambda bound: bound.value)


def work(instance: Instance, objective: str) -> float:
    """Return the work of the busiest rank.

    Proof: a rank does one thing at a time, so its first start and last end are at least its work apart. So are the
    starts of two consecutive steps.
    """
    del objective
    relaxed = Relaxation(instance)
    return max(
        sum(relaxed.exact[lane.stage][m] for lane in lanes for m in lane.microbatches) for lanes in instance.lanes
    )


def residence(instance: Instance, objective: str) -> float:
    """Return the least time in which the limit allows all pairs to be held for as long as they must.

    Proof: pair (s, m) is held from the start of its F to the end of its W. In between lie the forwards of the stages
    after s, then their I, then its own I and W: at least R(s) seconds. Bytes times seconds over all pairs of a rank are
    at most the limit times the time in which the rank holds anything. That time is at most the rank's span, and before
    it lie the forwards of the stages before the rank's first.
    """
    relaxed = Relaxation(instance)
    best = 0.0
    for lanes in instance.lanes:
        for at, resource in enumerate(instance.resources):
            room = resource.most - resource.always[lanes[0].rank]
            area = 0.0
            for lane in lanes:
                full, rest = relaxed.sizes(lane.stage, at)
                stay = relaxed.way_back[lane.stage]
                area += len(lane.microbatches) * (full * stay + rest * relaxed.seconds[lane.stage, W])
            if room > 0:
                before = relaxed.way_down[lanes[0].stage] if objective == "makespan" and relaxed.linked else 0.0
                best = max(best, area / room + before)
    return best


def passage(instance: Instance, objective: str, is_late: IsLate = lambda: False) -> float:
    """Return the latest lower bound on the start of any action, plus what must follow it.

    Proof: `head(a)` is a time before which a cannot start. It is at least the head of what a needs plus its seconds and
    the latency. For any x on the same rank, it is also at least the head of x plus all work of the rank that must lie
    between x and a. Before an action must come: what it needs, the same op of earlier microbatches, and, under a limit,
    enough I and W to make room for its F. If the pairs of the microbatches from m - K to m do not fit at once, the I of
    m - K comes before the F of m. After a comes at least the path of its microbatch down and back, and at least the
    work of the rank that must follow it.

    The same bounds the span of the rank with stage 0, which starts first; over several steps it bounds nothing.
    """
    relaxed = Relaxation(instance)
    if objective == "steady" or (objective == "span" and not relaxed.linked):
        return 0.0
    return latest(relaxed, only_first=objective == "span", is_late=is_late)


BOUNDS: dict[str, Callable[..., float]] = {"work": work, "residence": residence, "passage": passage}
