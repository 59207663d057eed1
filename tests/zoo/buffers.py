"""Buffers that change while others read them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from refused import saying
from zoo.entry import WIDTH, ZOO, Entry, Stack, linear, refused
from zoo.memory import CountsTwice
from zoo.modes import Normed


class Averages(nn.Module):
    """Keeps an average of what it sees, as normalisations do."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Any:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return self.layer(x - self.mean)


ZOO["averages inside of blocks"] = Entry(lambda: Stack(Averages))


class ReadsMean(nn.Module):
    def __init__(self, other: Averages) -> None:
        super().__init__()
        self.layer = linear()
        self.mean = other.mean

    def forward(self, x: Tensor) -> Any:
        return self.layer(x + self.mean)


class SharesMean(ReadsMean):
    def __init__(self, other: Averages) -> None:
        super().__init__(other)
        del self.mean
        self.register_buffer("mean", other.mean)


def _shares_buffer(kind: Any) -> Any:
    model = Stack(count=8)
    averages = Averages()
    model.blocks[0], model.blocks[7] = averages, kind(averages)
    return model


BUFFER = "buffer.*mean.*changes|changes.*mean"
ZOO["a buffer changed in one stage and read in another"] = Entry(lambda: _shares_buffer(SharesMean), saying(BUFFER))
ZOO["a buffer read as an attribute in another stage"] = Entry(
    lambda: _shares_buffer(ReadsMean),
    saying("'blocks.0' changes 'blocks.0.mean' in place, which is used there", fix="fewer stages"),
)
ZOO["a buffer of a Sequential read as an attribute in another stage"] = Entry(
    lambda: nn.Sequential(*_shares_buffer(ReadsMean).blocks),
    saying("'7' holds the buffer '0.mean' of another stage in its attribute 'mean'", fix="register it there"),
)
ZOO["a buffer of a Sequential changed in one stage and read in another"] = Entry(
    lambda: nn.Sequential(*_shares_buffer(SharesMean).blocks),
    saying(BUFFER),
)


@refused("a block with an average called on several stages", BUFFER)
class AveragesTwice(CountsTwice):
    def __init__(self) -> None:
        super().__init__()
        self.block = Averages()  # type: ignore[assignment]


@refused(
    "a block with running statistics called on several stages",
    "'block' changes 'block.norm.* in place, which is used there",
)
class NormsTwice(CountsTwice):
    def __init__(self) -> None:
        super().__init__()
        self.block = Normed()  # type: ignore[assignment]


@refused("a buffer changed between blocks of two stages", BUFFER)
class ChangesBetween(Stack):
    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def between(self, x: Tensor, at: int) -> Any:
        self.mean.mul_(0.5).add_(x.detach().mean(0), alpha=0.5)
        return x - self.mean


@refused("a buffer exchanged between blocks", "replaces the buffer 'mean'", fix="copy_")
class ExchangesBetween(ChangesBetween):
    def between(self, x: Tensor, at: int) -> Any:
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return x - self.mean
