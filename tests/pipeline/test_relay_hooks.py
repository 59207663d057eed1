"""Hooks of blocks where no rank has the whole model: what they only compute is checked, what they remember is not."""

from __future__ import annotations

import contextlib
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.channel.launch.launch import launch
from drumline.features.check.verdict import CheckReport
from drumline.pipeline.pipeline import Pipeline
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("check")]
WIDTH, NUM_STEPS = 4, 3


def times(gradients: Any, factor: float) -> Any:
    return tuple(None if gradient is None else gradient * factor for gradient in gradients)


class Layers(nn.Module):
    """Has hooks on each block, of its output and of its input's gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        for layer in self.layers:
            self.hook(layer)

    def hook(self, layer: nn.Module) -> None:
        layer.register_forward_hook(lambda module, inputs, output: output.tanh())
        layer.register_full_backward_hook(lambda module, gradients, outer: times(gradients, 0.5))

    def forward(self, x: Tensor) -> Any:
        x = x * self.gain
        for layer in self.layers:
            x = layer(x)
        return x


class CountsForwards(Layers):
    def hook(self, layer: nn.Module) -> None:
        calls: list[int] = []

        def scaled(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            calls.append(1)
            return output * (1 + len(calls) % 5)

        layer.register_forward_hook(scaled)


class CountsBackwards(Layers):
    def hook(self, layer: nn.Module) -> None:
        calls: list[int] = []

        def scaled(module: nn.Module, gradients: Any, outer: Any) -> Any:
            calls.append(1)
            return times(gradients, 1 + len(calls) % 5)

        layer.register_full_backward_hook(scaled)


def trained(kind: type[Layers]) -> tuple[str, list[CheckReport | None]]:
    chance = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, WIDTH, generator=chance) for _ in range(2))
    said, reports = io.StringIO(), []
    with contextlib.redirect_stderr(said):
        pipe = Pipeline(
            kind(), example=x, num_microbatches=4, loss_fn=functional.mse_loss, balance="even", timeout=60, record=False
        )
        with pipe:
            for _ in range(NUM_STEPS):
                pipe.step(x, target=y)
                reports.append(pipe.checked)
    return said.getvalue(), reports


def on_a_rank() -> list[tuple[str, list[CheckReport | None]]]:
    return [trained(kind) for kind in (Layers, CountsForwards, CountsBackwards)]


def test_hooks_that_remember_are_left_unchecked_by_name_once_ranks_have_only_their_parts() -> None:
    (first, forwards, backwards), _ = launch(on_a_rank, num_ranks=2, timeout=240)
    assert first[0] == ""
    for _, reports in (first, forwards, backwards):
        assert all(report is not None and report.wrong == () for report in some(reports))
    last = [each[1][-1] for each in (first, forwards, backwards)]
    assert [report.step for report in last if report is not None] == [2, 2, 2]
    assert [report.num_parameters for report in last if report is not None] == [9, 0, 0]
    assert "hooks of 'layers.0' make something else of its output than in its own process" in forwards[0]
    assert "make something else of its inputs' gradients than in its own process" in backwards[0]
