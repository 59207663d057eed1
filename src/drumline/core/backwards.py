"""What each stage does of its backward; `Columns.backwards` reads it from the rows.

    stage 3   F I W    or F B: it trains
    stage 2   F I      nothing of its own is trained, but the gradient has to pass: only the half that makes it
    stage 1   F I W    the lowest that trains; nobody waits for the gradient of its input
    stage 0   F        nothing here or below is trained, so no gradient ever comes

All microbatches of a stage do the same. What fits none of this is taken for a stage that trains, and its missing work
is for the validator to name.
"""

from __future__ import annotations

from enum import StrEnum


class Backward(StrEnum):
    """How much of a backward a stage has."""

    WHOLE = "whole"  # B, or I and W
    INPUT = "input"  # I alone
    NONE = "none"  # F alone
