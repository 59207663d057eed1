"""Numbers of microbatches: what fits the memory is counted by the rank that holds most."""

from __future__ import annotations

import pytest

from drumline.adapt.microbatches import Sizing
from drumline.core.program import Program
from drumline.schedules import generate


def one_f_one_b(number: int) -> Program | None:
    return generate("1f1b", num_ranks=4, num_microbatches=number) if number > 1 else None


@pytest.mark.parametrize(
    ("number", "held"),
    [
        (2, 2 * 32),  # both microbatches at once on the first ranks, of 32 rows each; one on the last
        (4, 4 * 16),
        (8, 4 * 8),
        (16, 4 * 4),
    ],
)
def test_the_fullest_rank_decides_whether_a_number_fits(number: int, held: int) -> None:
    """The first of four ranks holds four microbatches of 1F1B, the last one."""
    assert Sizing(64, one_f_one_b, most_rows=held).program(number) == one_f_one_b(number)
    assert Sizing(64, one_f_one_b, most_rows=held - 1).program(number) is None


def test_a_number_without_a_program_fits_nothing() -> None:
    assert Sizing(64, one_f_one_b, most_rows=1e9).program(1) is None
