"""What an action needs while it runs, held against the allocations that PyTorch's own profiler saw."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity
from torch.profiler import profile as traced

import drumline as dl
from drumline.model.block import Block
from drumline.profile.working import working
from extras import needed

pytestmark = pytest.mark.torch
HOST = torch.device("cpu")


def most_allocated(call: Callable[[], Any]) -> int:
    """Return the most bytes above those at the beginning, by the profiler's record of each allocation."""
    with traced(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as trace:
        call()
    changes = sorted(
        (event.start_ns(), event.nbytes()) for event in trace.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )  # fmt: skip
    assert changes, "no allocation was seen"
    now = most = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


class Wide(nn.Module):
    """Widens by far more than it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 4000), nn.Linear(4000, 16)

    def forward(self, x: Tensor) -> Tensor:
        wide: Tensor = functional.gelu(self.up(x)).exp().sin()
        value: Tensor = x + self.down(wide)
        return value


def loss_of(value: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(value, target)


@pytest.mark.parametrize("split", [False, True])
def test_it_is_what_the_profiler_sees_allocated(split: bool) -> None:
    torch.manual_seed(0)
    blocks = [Block("wide", Wide()), Block("head", nn.Linear(16, 3000))]
    x, target = torch.randn(32, 16), torch.randint(3000, (32,))
    found = working(blocks, x, device=HOST, target=target, loss_fn=loss_of, split=split)

    wide, head = (block.module for block in blocks)
    for module in (wide, head):
        module(x).sum().backward()
    leaf = torch.randn(32, 16, requires_grad=True)
    kept: dict[str, Tensor] = {}

    def forward() -> None:
        kept["loss"] = loss_of(head(leaf), target)

    def backward() -> None:
        torch.autograd.backward(kept.pop("loss"))

    # A kernel's own scratch memory is not counted: some kilobytes here.
    assert found[1].forward == pytest.approx(most_allocated(forward), rel=0.05)
    assert found[1].backward == pytest.approx(most_allocated(backward), rel=0.05)

    def forward_of_wide() -> None:
        kept["value"] = wide(leaf)

    leaf.grad = None
    assert found[0].forward == pytest.approx(most_allocated(forward_of_wide), rel=0.05)
    value, gradient = kept.pop("value"), torch.randn(32, 16)
    back = partial(torch.autograd.backward, value, gradient)
    del value
    assert found[0].backward == pytest.approx(most_allocated(back), rel=0.05)
    if split:
        assert found[0].backward_weight >= 4000 * 16 * 4, "the larger weight's gradient, before it is added"
        assert found[0].backward_input >= found[0].backward, "it keeps what W needs"
    else:
        assert found[0].backward_input == found[0].backward_weight == 0


def test_gradients_buffers_and_random_numbers_are_as_before() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    module[0].weight.grad = torch.ones(4, 4)
    x, before = torch.randn(8, 4), torch.get_rng_state()
    working([Block("all", module)], x, device=HOST, loss_fn=lambda value, _: value.sum())
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(module[0].weight.grad, torch.ones(4, 4))
    assert module[0].bias.grad is None
    assert module[1].num_batches_tracked == 0


def test_a_weight_that_is_unpacked_for_a_product_counts() -> None:
    needed("torchao", extra="tune")
    packed = dl.quantise(nn.Sequential(nn.Linear(512, 512, bias=False)), "int8")
    plain = nn.Sequential(nn.Linear(512, 512, bias=False).requires_grad_(False))
    sizes = [
        working([Block("all", module)], torch.ones(1, 512), device=HOST, loss_fn=lambda value, _: value.sum())
        for module in (packed, plain)
    ]
    assert sizes[0][0].forward - sizes[1][0].forward == pytest.approx(512 * 512 * 4, rel=0.01)
