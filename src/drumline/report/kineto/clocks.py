"""Align the clocks of several hosts by the messages between them: nothing arrives before it is sent.

    host A   sent ●                       B's clock is ahead: its times must move back at least until the earliest
                   ╲                      arrival follows its send, and messages in the other direction limit how
    host B      ●   ╲                     far. The room that remains between the two limits is the error.
             arrived ▼ really here

Every message from A to B says: shift(B) - shift(A) >= sent - arrived. Together these form a shortest-path problem; the
lowest and the highest solution are both valid, and so is the middle between them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from drumline.core.graph import Floats
from drumline.core.measured.align import agreed


@dataclass(frozen=True, slots=True)
class Alignment:
    """What to add to each clock's times, and the possible error: infinite if it cannot be known.

    `contradiction` is by how much messages arrive before they are sent, whatever is added: the clocks drift.
    """

    shifts: tuple[int, ...]
    errors: tuple[float, ...]
    contradiction: int = 0


def align(num_clocks: int, messages: Iterable[tuple[int, int, int, int]]) -> Alignment:
    """Return shifts so that no message, given as (from clock, to clock, sent, arrived), arrives before it is sent.

    Clocks that contradict no message stay unchanged. Times are whole numbers in any one unit.

    >>> align(2, [(0, 1, 100, 150), (1, 0, 160, 300)])
    Alignment(shifts=(0, 0), errors=(0.0, 140.0), contradiction=0)
    >>> align(2, [(0, 1, 100, 50), (1, 0, 60, 120)])
    Alignment(shifts=(0, 55), errors=(0.0, 5.0), contradiction=0)
    >>> align(2, [(0, 1, 100, 50)]).errors
    (0.0, inf)
    """
    # slack[a, b] is the most by which shift(a) may exceed shift(b).
    slack = np.full((num_clocks, num_clocks), math.inf)
    np.fill_diagonal(slack, 0.0)
    for source, target, sent, arrived in messages:
        if source != target:
            slack[source, target] = min(slack[source, target], arrived - sent)
    closed, granted = agreed(slack)
    shifts, errors = np.zeros(num_clocks), np.zeros(num_clocks)
    for clocks in _connected(closed):
        shifts[clocks], errors[clocks] = _solved(closed[np.ix_(clocks, clocks)])
    if granted:
        errors[1:] = math.inf
    elif (slack >= 0).all():
        errors, shifts = np.maximum(errors + shifts, errors - shifts), np.zeros(num_clocks)
    return Alignment(tuple(np.rint(shifts).astype(int).tolist()), tuple(errors.tolist()), granted)


def _solved(closed: Floats) -> tuple[Floats, Floats]:
    """Return the shifts of connected clocks, with 0 for the first one, and the possible error of each."""
    highest, lowest = closed[:, 0], -closed[0]
    above, below = np.isfinite(highest).all(), np.isfinite(lowest).all()
    errors = (highest - lowest) / 2
    if above and below:
        return (highest + lowest) / 2, errors
    if above or below:
        return highest if above else lowest, errors
    # Some are bounded on one side and some on the other: use any solution, since there is no middle.
    solution = np.minimum(closed.min(axis=1), 0.0)
    return solution - solution[0], errors


def _connected(closed: Floats) -> list[list[int]]:
    """Return the clocks in groups connected by messages, in either direction."""
    near = np.isfinite(closed) | np.isfinite(closed.T)
    groups: list[list[int]] = []
    for clock in range(len(near)):
        joined = [group for group in groups if near[clock, group].any()]
        groups = [group for group in groups if group not in joined]
        groups.append(sorted([clock, *(number for group in joined for number in group)]))
    return groups
