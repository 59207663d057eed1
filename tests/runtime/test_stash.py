"""Bytes that autograd keeps: each storage once, and none of a trace."""

from __future__ import annotations

import pytest
import torch
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
