"""Large products that are computed once: what stands in for the others has their form, and takes no memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from drumline.profile.once import Once, OwedClock
from some import some

pytestmark = pytest.mark.torch
WIDE = 512  # a product of such matrices is large


def products(a: Tensor, b: Tensor) -> list[Tensor]:
    return [a @ b, a @ b.t(), torch.bmm(a[None], b[None]), torch.addmm(a[0], a, b)]


def test_what_stands_in_has_shape_strides_dtype_and_bytes_of_the_product() -> None:
    a, b = torch.randn(WIDE, WIDE), torch.randn(WIDE, WIDE)
    plain = products(a, b)
    with Once() as once:
        products(a, b)
        assert once.owed_ns == 0
        again = products(a, b)
    assert once.owed_ns > 0
    for stand_in, product in some(zip(again, plain, strict=True)):
        assert (stand_in.shape, stand_in.stride(), stand_in.dtype) == (product.shape, product.stride(), product.dtype)
        assert stand_in.untyped_storage().nbytes() == product.untyped_storage().nbytes()


def test_a_large_cast_is_made_once_and_takes_no_memory_again() -> None:
    codes = torch.ones(2**24, dtype=torch.int8).view(2**12, 2**12)
    with Once() as once:
        first, again = codes.t().to(torch.bfloat16), codes.t().to(torch.bfloat16)
        other = codes.t().float()
    assert once.is_used
    assert float(first[0, 0]) == float(other[0, 0]) == 1.0, "another number is another cast"
    assert (again.shape, again.stride(), again.dtype) == (first.shape, first.stride(), first.dtype)
    assert again.untyped_storage().data_ptr() != first.untyped_storage().data_ptr(), "it is counted as memory"
    assert not again.any(), "in pages that were never written"


def test_small_products_are_computed_each_time() -> None:
    with Once() as once:
        for value in (1.0, 2.0):
            assert (torch.full((2, 2), value) @ torch.ones(2, 2)).tolist() == [[2 * value] * 2] * 2
    assert not once.is_used


def test_a_model_that_is_traced_inside_leaves_nothing_for_later() -> None:
    """A tensor without data has the form of a real one; what it gives must not stand in for that."""
    fakes, real = FakeTensorMode(), torch.randn(WIDE, WIDE)
    with Once() as once:
        with fakes:
            fake = fakes.from_tensor(real)
            assert isinstance(fake @ fake, FakeTensor)
        product = real @ real
        assert not isinstance(product, FakeTensor)
        assert once.owed_ns == 0
        with fakes:
            assert isinstance(fake @ fake, FakeTensor), "nor the other way around"
    assert torch.equal(product, real @ real)


def test_time_that_was_left_out_counts() -> None:
    with Once() as once:
        clock = OwedClock(once)
        begun = clock.mark()
        once.owed_ns += 10**15
        assert clock.mark() - begun >= 10**15
