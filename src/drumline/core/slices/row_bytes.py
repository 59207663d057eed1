"""What a row of slices holds."""

from __future__ import annotations

from collections.abc import Iterable

from drumline.core.action import Action, Op

_BACK = (Op.BACKWARD, Op.BACKWARD_INPUT)  # what brings gradients of keys and values
_FREES = (Op.BACKWARD, Op.BACKWARD_WEIGHT)


def peak_bytes(row: Iterable[Action], num_slices: int, unit_bytes: float, owed_bytes: float) -> float:
    """Return the most bytes that a row holds after an action: of units, and gradients of keys and values.

    A unit holds `unit_bytes` from F until B or W. From the first backward of a microbatch until its last, each stage
    holds `owed_bytes`: the gradients of all its keys and values.

    >>> from drumline.core.program import Program
    >>> row = Program.parse("0F0.0,0F0.1,0F1.0,0B0.1,0F1.1,0B0.0,0B1.1,0B1.0").rows[0]
    >>> peak_bytes(row, 2, 10.0, 3.0)
    33.0
    """
    stash = owed = most = 0.0
    for action in row:
        for part in action.work:
            assert part.microbatch is not None, f"{part} belongs to no unit"
            number = part.microbatch % num_slices
            stash += unit_bytes * ((part.op is Op.FORWARD) - (part.op in _FREES))
            if part.op in _BACK and num_slices > 1:
                owed += owed_bytes * ((number == num_slices - 1) - (number == 0))
            most = max(most, stash + owed)
    return most
