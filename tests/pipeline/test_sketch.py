"""Sketches of tensors: they show what differs, and cost no precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drumline.features.check.gradients.sketch import GROUP, distances, norms, sketch
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("check")]


def apart(tensor: Tensor, other: Tensor) -> float:
    """Return how far sketches are apart, as a part of how far the tensors are."""
    return distances([sketch(tensor)], [sketch(other)])[0] / float((tensor - other).norm())


def matrix(rows: int = 256, columns: int = 256) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))


def test_every_wrong_element_shows() -> None:
    tensor = matrix(60, 60)
    for place in some(range(0, tensor.numel(), 7)):
        other = tensor.clone()
        other.view(-1)[place] += 0.01
        assert apart(other, tensor) > 0.4


def test_what_keeps_sums_and_norms_shows() -> None:
    tensor = matrix()
    swapped_rows, swapped_elements = tensor.clone(), tensor.clone()
    swapped_rows[[3, 4]] = tensor[[4, 3]]
    swapped_elements[0, [0, 1]] = tensor[0, [1, 0]]
    rank_one = tensor + 1e-4 * torch.outer(matrix(256, 1)[:, 0], matrix(1, 256)[0])
    others = [
        tensor.flip(0),
        tensor.t(),
        tensor.roll(1),
        -tensor,
        tensor * 1.001,
        tensor + 1e-3,
        swapped_rows,
        swapped_elements,
        rank_one,
    ]
    for other in some(others):
        assert apart(other, tensor) > 0.1


def test_a_sketch_is_small_and_about_as_large_as_its_tensor() -> None:
    tensor = matrix(256, 300)
    made = sketch(tensor)
    assert made.numel() == tensor.numel() // GROUP + tensor.numel() % GROUP
    assert norms([made])[0] == pytest.approx(float(tensor.norm()), rel=0.1)
    assert norms([sketch(torch.ones(300, 300))])[0] > 30  # of 300: groups of equal elements do not vanish


def test_neither_autocast_nor_the_precision_of_products_changes_a_sketch() -> None:
    tensor = matrix()
    made = sketch(tensor)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(sketch(tensor), made)
    finally:
        torch.set_float32_matmul_precision(before)


def test_all_kinds_of_gradients_have_one() -> None:
    tensor = matrix()
    torch.testing.assert_close(sketch(tensor.t()), sketch(tensor.t().contiguous()))
    torch.testing.assert_close(sketch(tensor.to_sparse()), sketch(tensor))
    torch.testing.assert_close(sketch(tensor.bfloat16()), sketch(tensor.bfloat16().float()))
    assert sketch(torch.complex(tensor, tensor)).numel() == sketch(torch.stack((tensor, tensor))).numel()
    assert sketch(tensor.double()).dtype == torch.float64
    assert norms([sketch(torch.full((80, 80), 1e-30))])[0] > 0
    small = torch.ones(5)
    assert sketch(small).data_ptr() != small.data_ptr()
    assert distances([sketch(tensor * float("nan"))], [sketch(tensor)])[0] != 0
