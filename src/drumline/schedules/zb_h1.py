"""ZB-H1 (arXiv 2401.10241): 1F1B with the backward split; weight gradients fill the bubble of the drain.

PICTURE

Rank r delays its W by r microbatches, so that every rank holds P pairs and all W that is left fits behind the last I.
"""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.action import Action, F, I, W
from drumline.schedules.registry import schedule


@schedule("zb-h1", summary="1F1B with W delayed into the drain: a third of its bubble, the same peak memory")
def zb_h1(num_ranks: int, *, num_microbatches: int) -> Iterator[list[Action]]:
    """Run 1F1B with split backwards, W delayed by r microbatches on rank r."""
    for rank in range(num_ranks):
        yield list(delayed_weights(rank, num_microbatches, ahead=num_ranks - 1 - rank, delay=rank))


def delayed_weights(stage: int, num_microbatches: int, *, ahead: int, delay: int) -> Iterator[Action]:
    """Yield one stage's F and I in turn, F `ahead` microbatches ahead and W `delay` behind.

    >>> list(delayed_weights(1, 3, ahead=0, delay=1))
    [1F0, 1I0, 1F1, 1I1, 1W0, 1F2, 1I2, 1W1, 1W2]
    """
    for m in range(min(ahead, num_microbatches)):
        yield F(stage, m)
    for m in range(num_microbatches):
        if m + ahead < num_microbatches:
            yield F(stage, m + ahead)
        yield I(stage, m)
        if m >= delay:
            yield W(stage, m - delay)
    for m in range(max(0, num_microbatches - delay), num_microbatches):
        yield W(stage, m)
