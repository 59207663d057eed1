"""Modes that are set, flipped and asked for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from zoo.entry import WIDTH, ZOO, Entry, Stack, linear, refused, right


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = linear(), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.layer(x))


@refused("a block's mode set between blocks", "training.*'blocks.2.norm'")
class SetsMode(Stack):
    def __init__(self) -> None:
        super().__init__(Normed)

    def between(self, x: Tensor, at: int) -> Any:
        if at == 1:
            self.blocks[2].norm.eval()
        return x


@refused("a block's mode flipped and put back", "training.*'blocks.2'")
class FlipsMode(Stack):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(linear(), nn.Dropout(0.5)))

    def forward(self, x: Tensor) -> Any:
        self.blocks[2].eval()
        made = super().forward(x)
        self.blocks[2].train()
        return made


class UsesMode(Stack):
    """Dropout and the like between blocks, by the model's own mode and a child's."""

    def __init__(self) -> None:
        super().__init__(Normed)

    def between(self, x: Tensor, at: int) -> Any:
        x = x * 2 if self.training else x
        return x * 3 if self.blocks[2].training else x


def _evaluates_child(model: Any, step: int) -> None:
    model.blocks[2].train(step != 1)


def _evaluates(model: Any, step: int) -> None:
    model.train(step == 1)


ZOO["a child is put into eval mode between steps"] = Entry(UsesMode, change=_evaluates_child)
ZOO["the model is put into eval mode between steps"] = Entry(UsesMode, change=_evaluates)


@right("autocast around blocks", settings={"tolerance": 1e-2})
class Autocasts(Stack):
    def forward(self, x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for block in self.blocks[:3]:
                x = block(x)
        for block in self.blocks[3:]:
            x = block(x.float())
        return x


@right("a branch on autocast", settings={"precision": "bf16"})
class AsksAutocast(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        return x * 2 if torch.is_autocast_enabled("cpu") else x


@right("regions without gradient")
class WithoutGradient(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        with torch.no_grad():
            largest = x.abs().max()
            most = self.blocks[0](x).mean()
        return x / largest + most


@right("an inference region")
class Infers(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        with torch.inference_mode():
            largest = float(WIDTH) + 0 * torch.ones(1)
        return x / largest.clone()


@right("a gradient switched off and on")
class SwitchesGradient(Stack):
    def between(self, x: Tensor, at: int) -> Any:
        torch.set_grad_enabled(at != 2)
        made = x * 2 if torch.is_grad_enabled() else x + self.blocks[0](x)
        torch.set_grad_enabled(True)
        return made + x
