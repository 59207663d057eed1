"""Find lengths of slices and an order of their units, with a bound for all lengths and all orders.

One seed drives all randomness, and every number of slices gets its part of the time (`lengths_search.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from drumline.core.costs import Costs
from drumline.core.errors import PlanError
from drumline.core.placement import Placement
from drumline.core.timeline.idle import Limit
from drumline.plan.search.search_run import SECONDS
from drumline.plan.slices.lengths_search import LengthsSearch
from drumline.plan.slices.results import SliceResult
from drumline.plan.slices.work import SlicedWork

_LATE = 0.1  # of the budget stays for the proof and the timeline


def search_slices(
    costs: Costs,
    placement: Placement,
    *,
    num_microbatches: int,
    slices: int | Sequence[int],
    tokens: int = 4096,
    attention: float | Sequence[float] | None = None,
    overhead: float = 0.0,
    multiple: int = 1,
    split: bool = True,
    limit: Limit | None = None,
    seconds: float | None = None,
    tries: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> SliceResult:
    """Return the best lengths and order found for so many slices of sequences of `tokens`, and their bound.

    `costs` are those of whole sequences. `attention` is the part of their time that grows with keys: one number, or one
    for each stage (default: that of the costs). A slice takes as long as `overhead` tokens more. Lengths are multiples
    of `multiple` tokens. Without `split`, backwards stay whole. With several numbers of `slices`, the best counts.
    `limit` counts whole microbatches, or bytes. The search ends after `seconds` (10 unless given) or `tries` programs,
    or when it reaches the bound.

    >>> found = search_slices(
    ...     Costs(), Placement.linear(4), num_microbatches=2, slices=4, attention=0.4, multiple=64, split=False
    ... )
    >>> found.lengths, round(found.value, 3), round(found.bound, 3), round(found.reference.value, 3)
    ((1408, 1024, 896, 768), 8.289, 8.289, 9.825)
    """
    began = time.monotonic()
    numbers = [slices] if isinstance(slices, int) else list(dict.fromkeys(slices))
    if not numbers or min(numbers) < 1:
        raise PlanError(f"slices is {slices!r}", expected="1 or more, or several such numbers")
    if seconds is not None and seconds <= 0:
        raise PlanError(f"seconds is {seconds:g}", expected="more than 0")
    if placement.mirrored:
        raise PlanError(
            "slices need one copy of every stage",
            expected="a placement that is not bidirectional: all slices of a microbatch take one way",
            fix="use linear, loop or v",
        )
    work = SlicedWork.of(costs, placement.num_stages, tokens=tokens, attention=attention, overhead=overhead)
    budget = SECONDS if seconds is None and tries is None else seconds
    runs: list[LengthsSearch] = []
    interrupted = False
    try:
        for place, num_slices in enumerate(numbers):
            left = math.inf if budget is None else (began + budget - time.monotonic()) / (len(numbers) - place)
            share = None if tries is None else tries // len(numbers)
            run = LengthsSearch(
                work,
                placement,
                num_microbatches,
                num_slices,
                multiple,
                split=split,
                limit=limit,
                seconds=None if budget is None else budget / len(numbers),
                deadline=math.inf if budget is None else time.monotonic() + max(left, 0.0) * (1 - _LATE),
                tries=math.inf if share is None else share,
                seed=seed,
                progress=progress,
            )
            runs.append(run)
            run.run()
    except KeyboardInterrupt:
        interrupted = True
    finished = [run for run in runs if run.best is not None]
    if not finished:
        raise PlanError(
            "no order of slices keeps every rank within the limit",
            expected="a limit in which one microbatch fits, in slices",
            fix="use a larger limit, or more ranks",
        )
    best = min(finished, key=lambda run: run.value)
    return best.result(time.monotonic() - began, sum(run.num_tried for run in runs), interrupted)
