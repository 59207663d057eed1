"""Bytes that autograd keeps: each storage once, and none of a trace."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from drumline.runtime.stash import Scale

pytestmark = pytest.mark.torch


def test_tensors_of_a_trace_are_not_weighed_and_their_memory_is_not_asked_for() -> None:
    scale = Scale([])
    with FakeTensorMode():
        traced = torch.ones(8)
    scale.add(traced, +1)  # a warning, which is an error here, if it asked where the tensor lies
    assert scale.weigh() == 0
    held = torch.ones(8)
    scale.add(held, +1)
    assert scale.weigh() == 32
    scale.add(held, -1)
    assert scale.weigh() == 0


def test_a_graph_that_is_left_without_a_backward_is_freed() -> None:
    """A loss that is looked at before the step backpropagates parts of it, and lets the rest go."""
    weigher, layer, x = Scale([]), nn.Linear(4, 3), torch.randn(5, 4)

    def twice() -> tuple[torch.Tensor, torch.Tensor]:
        made = layer(x).log_softmax(1)  # which keeps what it returns
        (first,) = torch.autograd.grad(made.square().sum(), layer.weight, create_graph=True)
        return made, torch.autograd.grad(first.square().sum(), layer.weight, retain_graph=True)[0]

    with weigher.watching():
        made, found = twice()
    assert weigher.kept_bytes()
    del made
    assert not weigher.kept_bytes()
    torch.testing.assert_close(found, twice()[1])
