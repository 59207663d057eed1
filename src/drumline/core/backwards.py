"""What each stage does of its backward, read from the rows.

    stage 3   F I W    or F B: it trains
    stage 2   F I      nothing of its own is trained, but the gradient has to pass: only the half that makes it
    stage 1   F I W    the lowest that trains; nobody waits for the gradient of its input
    stage 0   F        nothing here or below is trained, so no gradient ever comes

All microbatches of a stage do the same. What fits none of this is taken for a stage that trains, and its missing work
is for the validator to name.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
import numpy.typing as npt

from drumline.core.action import Op
from drumline.core.simulate.graph import CODE, Ints


class Backward(StrEnum):
    """How much of a backward a stage has."""

    WHOLE = "whole"  # B, or I and W
    INPUT = "input"  # I alone
    NONE = "none"  # F alone


def backwards(stage: Ints, code: Ints, num_stages: int) -> tuple[Backward, ...]:
    """Return what each stage does, or would have to do for the program to be complete, from its actions' columns.

    >>> from drumline.core.program import Program
    >>> [str(one) for one in Program.parse("0F0,1F0,2F0,2I0,1B0").backwards]
    ['none', 'whole', 'input']
    """
    whole = _having(stage, code, num_stages, Op.BACKWARD, Op.BACKWARD_WEIGHT)
    first = _having(stage, code, num_stages, Op.BACKWARD_INPUT)
    lowest = int(np.append(whole | first, True).argmax())
    lowest_whole = int(np.append(whole, True).argmax())
    alone = first & ~whole
    found = [Backward.NONE] * lowest
    for at in range(lowest, num_stages):
        found.append(Backward.INPUT if alone[at] and at > lowest_whole else Backward.WHOLE)
    return tuple(found)


def _having(stage: Ints, code: Ints, num_stages: int, *ops: Op) -> npt.NDArray[np.bool_]:
    """Return which stages have any of these ops."""
    found = np.zeros(num_stages, dtype=bool)
    found[stage[np.isin(code, [CODE[op] for op in ops]) & (stage >= 0)]] = True
    return found
