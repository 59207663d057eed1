"""Which of the layouts that a forecast cannot tell apart to run: the plainest.

Some published rows run one model in two layouts (`docs/published.md`). The forecast of one beside the other is 1.7% off
in the median. So layouts within 2% of the fastest count as equally fast. Of these, in this order:

    links       those whose messages keep links between nodes busy for a tenth of the step less: what is hidden in a
                forecast may show in a run. Inside a node bytes do not count
    program     a schedule before a searched program, whole sequences before slices
    axes        the fewest of tensor, pipeline, context and expert parallelism
    recompute   nothing, then operations, then whole layers
    headroom    a tenth of the limit left free, then a twentieth, then less: forecasts of memory are off by as much
    the rest    fewer stages per rank, a plainer schedule, a lower ZeRO stage, smaller microbatches; then the seconds
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from drumline.plan.layouts.choice import Choice

BAND = 0.02  # layouts this close to the fastest count as equally fast
_ROOMY = 0.9  # the share of the limit up to which headroom does not count
_STEP = 0.05  # of the limit: less headroom by this counts


def band(choices: Sequence[Choice], limit_bytes: float) -> list[Choice]:
    """Return those that are as fast as the fastest, within what a forecast can tell, the preferred first."""
    least = min(choice.seconds for choice in choices)
    near = (choice for choice in choices if choice.seconds <= least * (1 + BAND))
    return sorted(near, key=lambda choice: preference(choice, limit_bytes))


def preference(choice: Choice, limit_bytes: float) -> tuple[object, ...]:
    """Return the sort key among layouts that are equally fast."""
    links = int(10 * choice.outside)
    axes = len(choice.axes)
    return (
        links,
        choice.program is not None,
        choice.layout.slices > 1,
        axes,
        choice.recomputed,
        tightness(choice, limit_bytes),
        *choice.plainness,
    )


def tightness(choice: Choice, limit_bytes: float) -> int:
    """Return how little of the limit is left free: 0 with a tenth of it or more, 1 with a twentieth, 2 with less."""
    return max(ceil((choice.bytes / limit_bytes - _ROOMY) / _STEP - 1e-9), 0)


def drawback(chosen: Choice, other: Choice, limit_bytes: float) -> str:
    """Return why another layout is not preferred, in words; empty if nothing speaks against it."""
    if int(10 * other.outside) > int(10 * chosen.outside):
        return f"keeps links between nodes busy for {other.outside:.0%} of the step instead of {chosen.outside:.0%}"
    if other.program is not None and chosen.program is None:
        return "runs a searched program"
    if other.layout.slices > 1 and chosen.layout.slices == 1:
        return "runs slices of sequences"
    if len(other.axes) > len(chosen.axes):
        more = [name for name in other.axes if name not in chosen.axes]
        also = len(more) == len(other.axes) - len(chosen.axes)
        return f"also divides by {' and '.join(more)}" if also else f"divides by {' and '.join(other.axes)}"
    if other.recomputed > chosen.recomputed:
        return f"needs {other.layout.recomputation}"
    if tightness(other, limit_bytes) > tightness(chosen, limit_bytes):
        return f"leaves only {1 - other.bytes / limit_bytes:.1%} of the memory free"
    mine, theirs = chosen.layout, other.layout
    if theirs.stages_per_rank > mine.stages_per_rank:
        return f"has {theirs.stages_per_rank} stages per rank"
    if other.schedule != chosen.schedule:
        return f"runs {other.schedule}"
    if theirs.zero > mine.zero:
        return f"shards more, with ZeRO {theirs.zero}"
    return "is no plainer"
