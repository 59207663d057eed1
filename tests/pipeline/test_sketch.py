"""Sketches of tensors: they show what differs, and cost no precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drumline.features.check.gradients.sketch import GROUP, distances, norms, sketch
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("check")]


def apart(one: Tensor, other: Tensor) -> float:
    """Return how far sketches are apart, as a part of how far the tensors are."""
    return distances([sketch(one)], [sketch(other)])[0] / float((one - other).norm())


def matrix(rows: int = 256, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_every_wrong_element_shows() -> None:
    one = matrix(60, 60)
    for place in some(range(0, one.numel(), 7)):
        other = one.clone()
        other.view(-1)[place] += 0.01
        assert apart(other, one) > 0.4


def test_what_keeps_sums_and_norms_shows() -> None:
    one = matrix()
    swapped_rows, swapped_elements = one.clone(), one.clone()
    swapped_rows[[3, 4]] = one[[4, 3]]
    swapped_elements[0, [0, 1]] = one[0, [1, 0]]
    rank_one = one + 1e-4 * torch.outer(matrix(256, 1)[:, 0], matrix(1, 256)[0])
    others = [
        one.flip(0),
        one.t(),
        one.roll(1),
        -one,
        one * 1.001,
        one + 1e-3,
        swapped_rows,
        swapped_elements,
        rank_one,
    ]
    for other in some(others):
        assert apart(other, one) > 0.1


def test_a_sketch_is_small_and_about_as_large_as_its_tensor() -> None:
    one = matrix(256, 300)
    made = sketch(one)
    assert made.numel() == one.numel() // GROUP + one.numel() % GROUP
    assert norms([made])[0] == pytest.approx(float(one.norm()), rel=0.1)
    assert norms([sketch(torch.ones(300, 300))])[0] > 30  # of 300: groups of equal elements do not vanish


def test_neither_autocast_nor_the_precision_of_products_changes_a_sketch() -> None:
    one = matrix()
    made = sketch(one)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(sketch(one), made)
    finally:
        torch.set_float32_matmul_precision(before)


def test_all_kinds_of_gradients_have_one() -> None:
    one = matrix()
    torch.testing.assert_close(sketch(one.t()), sketch(one.t().contiguous()))
    torch.testing.assert_close(sketch(one.to_sparse()), sketch(one))
    torch.testing.assert_close(sketch(one.bfloat16()), sketch(one.bfloat16().float()))
    assert sketch(torch.complex(one, one)).numel() == sketch(torch.stack((one, one))).numel()
    assert sketch(one.double()).dtype == torch.float64
    assert norms([sketch(torch.full((80, 80), 1e-30))])[0] > 0
    small = torch.ones(5)
    assert sketch(small).data_ptr() != small.data_ptr()
    assert distances([sketch(one * float("nan"))], [sketch(one)])[0] != 0
