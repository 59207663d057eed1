"""What no lengths and no order of slices stay below, with the proof.

For one stage on each of P ranks in a line, M microbatches, and slices whose F, I and W take f, i and w at least on
every rank. A whole backward counts as its I and then its W.

1. *Before the first backward of the last rank* it runs forwards alone, and stands idle for (P-1) max f or longer.
   Let J be the units that it has run forward by then. They include all slices of some microbatch. Let k be the longest
   of these, which passes P ranks. Units of J before k on rank 0 run before k begins. Units after k on the last rank run
   after k ends. Any other unit of J overtakes k: on some rank it runs after k, and on the next one before k. So k waits
   there for as long as the unit takes. Together: sum of J + (P-1) f(k).
2. *After the last forward of the last rank* the same holds in reverse for what goes back to rank 0. Whole backwards
   leave the last rank idle for (P-1) max b. Split ones take (P-1) max i until rank 0 has run them, and its last W
   follows. Meanwhile the last rank may compute W.
3. The last rank does all of its work beside this. If all its forwards come before its first backward, both still hold.

So a step takes at least

    whole backwards      M (F + B) + (P-1) (max f + max b)
    split backwards      the larger of   M (F + I + W) + (P-1) max f   and   M (F + I) + (P-1) (max f + max i) + min w

and a message between two ranks adds its latency to each of the P-1. Slices divide a sequence, so the longest is at
least as long as `shortest_longest` allows: this holds for all lengths. With whole backwards and slices that take the
same time it is (M + (P-1)/S)(F+B), which 1f1b reaches.

4. Any rank begins once some slice 0 has passed the stages before its first. With whole backwards, the last that it runs
   is a slice 0, which then goes back through these stages. This holds for any placement and for unequal stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from drumline.core.graph import Floats
from drumline.core.placement import Placement
from drumline.core.slices.curve import SliceCurve
from drumline.plan.slices.lengths import num_blocks, shortest_longest
from drumline.plan.slices.work import B, F, I, SlicedWork, W


@dataclass(frozen=True, slots=True)
class SliceBound:
    """What a step takes at least: with `whole` backwards, and in `any` order, split ones included."""

    whole: float
    any: float


def slice_bound(
    work: SlicedWork, placement: Placement, *, num_microbatches: int, num_slices: int, multiple: int = 1
) -> SliceBound:
    """Return the bounds for all lengths that are multiples, and all orders.

    >>> from drumline.core.costs import Costs
    >>> work = SlicedWork.of(Costs(), 4, tokens=64, attention=0.0)
    >>> bound = slice_bound(work, Placement.linear(4), num_microbatches=2, num_slices=4)
    >>> round(bound.whole, 6), round(bound.any, 6)  # 2 x 3 + 3 x 3/4, and the larger of 6 + 3/4 and 4 + 3/2
    (8.25, 6.75)
    """
    num_blocks(work.tokens, num_slices, multiple)
    return SliceBound(
        *(
            max(
                _of_work(work, placement, num_microbatches, num_slices, multiple, whole=whole),
                _of_slices(work, placement, num_microbatches, num_slices, multiple, whole=whole),
            )
            for whole in (True, False)
        )
    )


def _work_of_sequence(work: SlicedWork, num_slices: int) -> Floats:
    """Return the seconds of all slices of a sequence together: (stages, ops); they do not depend on the lengths."""
    return np.array([[c.at(0, work.tokens) + (num_slices - 1) * c.fixed for c in stage] for stage in work.curves])


def _latencies(work: SlicedWork, placement: Placement) -> list[float]:
    """Return the latency of the message before every stage; 0 for the first, and within a rank."""
    homes = placement.homes
    return [0.0] + [
        0.0 if here == there else min(work.costs.edge(here, there).latency, work.costs.edge(there, here).latency)
        for here, there in pairwise(homes)
    ]


def _least(curves: list[SliceCurve]) -> SliceCurve:
    """Return a curve that is nowhere above any of these."""
    parts = np.array([(curve.fixed, curve.per_token, curve.per_pair) for curve in curves]).min(axis=0)
    return SliceCurve(*parts.tolist())


def _halves(work: SlicedWork) -> tuple[list[SliceCurve], list[SliceCurve], list[SliceCurve]]:
    """Return the curves of F, of the part of a backward that passes the gradient on, and of the rest, at least."""
    early = [_least([stage[I], stage[B]]) for stage in work.curves]
    late = [_late(stage[W], stage[I], stage[B], first) for stage, first in zip(work.curves, early, strict=True)]
    return [stage[F] for stage in work.curves], early, late


def _late(weight: SliceCurve, first: SliceCurve, whole: SliceCurve, early: SliceCurve) -> SliceCurve:
    split, joined = first + weight, whole
    least = _least([split, joined])
    names = ("fixed", "per_token", "per_pair")
    return SliceCurve(*(max(0.0, getattr(least, name) - getattr(early, name)) for name in names))


def _of_slices(
    work: SlicedWork, placement: Placement, num_microbatches: int, num_slices: int, multiple: int, *, whole: bool
) -> float:
    """Return the bound of the module's 1 to 3, for one stage on each rank of a line; 0 for others."""
    if placement.mirrored or placement.num_stages != placement.num_ranks:
        return 0.0
    hops, num_hops = sum(_latencies(work, placement)), placement.num_ranks - 1
    forwards, early, late = _halves(work)

    def longest(curve: SliceCurve) -> float:
        return shortest_longest(curve, work.tokens, num_slices, multiple)[1]

    def all_of(curve: SliceCurve) -> float:
        return num_microbatches * (curve.at(0, work.tokens) + (num_slices - 1) * curve.fixed)

    forward, first, second = _least(forwards), _least(early), _least(late)
    if whole:
        back = _least([stage[B] for stage in work.curves])
        ends = num_hops * (longest(forward) + longest(back)) + 2 * hops
        return all_of(forward) + all_of(back) + ends
    there = num_hops * longest(forward) + hops
    back_too = there + num_hops * longest(first) + hops + second.at(0, multiple)
    return max(there + all_of(forward) + all_of(first) + all_of(second), back_too + all_of(forward) + all_of(first))


def _of_work(
    work: SlicedWork, placement: Placement, num_microbatches: int, num_slices: int, multiple: int, *, whole: bool
) -> float:
    """Return the bound of the module's 4: every rank's work, after the way to it, and before the way back."""
    if placement.mirrored:
        return 0.0
    sums, latency = _work_of_sequence(work, num_slices), _latencies(work, placement)
    least = 0.0
    forwards, early, late = _halves(work)
    for rank in range(placement.num_ranks):
        stages = list(placement.stages_of(rank))
        first = min(stages)
        down = sum(forwards[stage].at(0, multiple) + latency[stage + 1] for stage in range(first))
        if whole:
            own_work = num_microbatches * sum(sums[stage, F] + sums[stage, B] for stage in stages)
            up = sum(work.curves[stage][B].at(0, multiple) + latency[stage + 1] for stage in range(first))
        else:
            curves = [forwards[stage] + early[stage] + late[stage] for stage in stages]
            own_work = num_microbatches * sum(c.at(0, work.tokens) + (num_slices - 1) * c.fixed for c in curves)
            up = 0.0
        least = max(least, down + own_work + up)
    return least
