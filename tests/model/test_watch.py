"""What a followed model is watched for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor, nn

from drumline.model.follow.attributes import BETWEEN, Attributes
from drumline.model.values import MISSING
from drumline.model.watch.watch import Surroundings, Watch

pytestmark = pytest.mark.torch


def test_a_hook_in_the_place_of_another_is_a_change() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    first = model[0].register_forward_hook(lambda module, given, made: made * 2)
    watch = Watch(model.named_modules(), frozenset({""}))
    first.remove()
    model[0].register_forward_hook(lambda module, given, made: made * 3)
    assert watch.has_changed()
    assert not watch.has_changed()


def test_what_answers_to_any_name_is_not_asked() -> None:
    class Proxy:
        def __getattr__(self, name: str) -> Any:
            raise KeyboardInterrupt(name)  # which hasattr() lets through

    anything, scales = Proxy(), [1.0]

    @functools.cache
    def scale(at: int) -> float:
        return scales[at]

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale(0) if anything is not None else x

    around = Surroundings([Scaled()])
    before = around.now()
    scales[0] = 2.0
    assert around.changed(before)
    with around.kept():
        scale(0)
    assert scale.cache_info().currsize == 0


def test_an_attribute_that_is_set_before_it_is_read_is_the_forwards_own() -> None:
    module = nn.Linear(1, 1)
    found = Attributes({id(module): "0"}, lambda: BETWEEN)
    found.set(module, "scale", MISSING, 1.0)
    found.read(module, "scale", 1.0)
    found.set(module, "scale", 1.0, 2.0)
    assert found.read_between() == []
    found.judge(str, lambda first, last, why: None)  # refuses nothing
