"""What no program can go below: several bounds, each with its proof; the largest is the one that counts.

    bound       why
    work        a rank does one thing at a time
    residence   a pair is held for as long as its microbatch takes to the last stage and back, and room is limited
    passage     before some action runs, what must run before it has run; after it, what must run after it

All of them see the instance through a smaller one, whose optimum is no larger: every microbatch costs what the cheapest
does, and a whole backward is an I that ends early and a W right behind it. In that one microbatches are alike, so they
may as well pass every stage in order (swap two that overtake each other and nothing gets later), and "the m-th F of a
stage" is one action and not a set of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drumline.plan.search.bounds.earliest import latest
from drumline.plan.search.bounds.relaxed import Relaxed
from drumline.plan.search.instance import Instance, W


@dataclass(frozen=True, slots=True)
class Bound:
    """A lower bound: its value and its name."""

    value: float
    name: str


def lower_bound(instance: Instance, objective: str = "makespan") -> Bound:
    """Return the largest bound that applies to the objective: makespan, span or steady.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.timeline.idle import Limit
    >>> from drumline.core.placement import Placement
    >>> lower_bound(Instance(Costs(), Placement.linear(4), 8))
    Bound(value=27.0, name='passage')
    >>> lower_bound(Instance(Costs(), Placement.linear(4), 8, Limit(max_activations=2)))
    Bound(value=39.0, name='passage')
    """
    found = [Bound(bound(instance, objective), name) for name, bound in BOUNDS.items()]
    return max(found, key=lambda one: one.value)


def work(instance: Instance, objective: str) -> float:
    """Return the work of the busiest rank.

    Proof: a rank does one thing at a time, so its first start and last end are at least its work apart; so is the start
    of a step and the start of the next.
    """
    del objective
    relaxed = Relaxed(instance)
    return max(
        sum(relaxed.exact[lane.stage, m] for lane in lanes for m in lane.microbatches) for lanes in instance.lanes
    )


def residence(instance: Instance, objective: str) -> float:
    """Return the time in which the limit lets all pairs be held for as long as they must.

    Proof: pair (s, m) is held from the start of its F to the end of its W. In between lie the forwards of the stages
    after s, then their I, then its own I and W: at least R(s) seconds. Bytes times seconds over all pairs of a rank are
    at most the limit times the time in which the rank holds anything. That time is at most the rank's span, and before
    it lie the forwards of the stages before the rank's first.
    """
    relaxed = Relaxed(instance)
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


def passage(instance: Instance, objective: str) -> float:
    """Return the latest moment that some action cannot be earlier than, plus what must follow it.

    Proof: `head(a)` is a time before which a cannot start. It is at least the head of what a needs plus its seconds and
    the latency; and, for any x on the same rank, the head of x plus all the work of the rank that must lie between x
    and a. What must lie before an action: what it needs, the same op of earlier microbatches, and, under a limit, so
    many I and W that there is room for its F. If the pairs of the microbatches from m - K to m do not fit at once, the
    I of m - K is before the F of m. After a comes at least the way of its microbatch down and back, and at least the
    work of the rank that must lie after it.

    The span of the rank with stage 0 is bounded in the same way, as it starts first; over several steps nothing is.
    """
    relaxed = Relaxed(instance)
    if objective == "steady" or (objective == "span" and not relaxed.linked):
        return 0.0
    return latest(relaxed, only_first=objective == "span")


BOUNDS: dict[str, Callable[[Instance, str], float]] = {"work": work, "residence": residence, "passage": passage}
