"""Columns of numbers as text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.report.draw.packed import packed
from unpacking import unpacked

numbers = st.lists(st.integers(-(2**53), 2**53)) | st.lists(st.floats(allow_nan=False, allow_infinity=False))


@given(numbers)
def test_what_is_packed_comes_back(column: list[float]) -> None:
    assert unpacked(packed(column)) == column


@pytest.mark.parametrize(
    ("column", "kind"),
    [
        ([], "u1"),
        ([0, 255], "u1"),
        ([-1], "i2"),
        ([256], "i2"),
        ([2**15], "i4"),
        ([2**31], "f8"),
        ([1.0, 2.0], "u1"),
        ([0.5], "f8"),
    ],
)
def test_the_smallest_kind_that_holds_all_is_taken(column: list[float], kind: str) -> None:
    assert packed(np.array(column)).startswith(f"{kind}:")
