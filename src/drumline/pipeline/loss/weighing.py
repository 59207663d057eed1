"""How much of the batch's loss each microbatch's is, from what the parts of the loss count in each.

          microbatch   0     1     2     3
words that count      18    17     0     9      one mean: shares 18/44, 17/44, 0, 9/44
sentences              2     2     1     1      a second mean: both are multiplied by factors of their own
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drumline.core.errors import BatchError
from drumline.runtime.loss.counts import Count


@dataclass(frozen=True, slots=True)
class Weighing:
    """Each microbatch's share, and where one share cannot be right for all parts of the loss, factors for these."""

    shares: Sequence[Count]
    factors: Mapping[int, Sequence[float]] = field(default_factory=dict)


def weighed(counts: Sequence[Sequence[Count | None]], rows: Sequence[int], *, others: bool = False) -> Weighing:
    """Return the microbatches' shares from what every part counts in each, None for a sum.

    With `others`, parts that nothing is known of, microbatches count by their rows.

    >>> weighed([[3], [1]], [2, 2]).shares
    [0.75, 0.25]
    >>> weighed([[3, 2], [1, 2]], [2, 2])
    Weighing(shares=[0.5, 0.5], factors={0: [1.5, 1.0], 1: [0.5, 1.0]})
    >>> weighed([[None], [None]], [2, 2]).shares
    [1.0, 1.0]
    """
    columns = list(zip(*counts, strict=True))
    if len(columns) == 1 and not others and any(isinstance(one, Tensor) and not one.is_cpu for one in columns[0]):
        return Weighing(_parts(columns[0]))
    parts = [[float(one) for one in _parts([_plain(one) for one in column])] for column in columns]
    base = [one / sum(rows) for one in rows]
    if not others and parts and all(_alike(parts[0], one) for one in parts[1:]):
        return Weighing(parts[0])
    if all(_alike(base, one) for one in parts):
        return Weighing(base)
    factors = {at: [column[at] / base[at] for column in parts] for at in range(len(rows))}
    return Weighing(base, factors)


def _parts(column: Sequence[Count | None]) -> list[Count]:
    """Return what part of the whole each microbatch's count is; all of a sum's are added as they are."""
    counts = [one for one in column if one is not None]
    if len(counts) < len(column):
        return [1.0] * len(column)
    total = sum(counts[1:], start=counts[0])
    if not isinstance(total, Tensor) and not total > 0:
        raise BatchError(
            f"the microbatches' loss weights are {counts}", expected="numbers of 0 or more, not all of them 0"
        )
    return [one / total for one in counts]


def _plain(count: Count | None) -> float | None:
    return None if count is None else float(count)


def _alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= 1e-9 * max(abs(a), abs(b)) for a, b in zip(one, other, strict=True))
