"""The two-stage build: a ten-layer MLP on two ranks, small enough to watch, trained with or without a schedule.

    x ~ N(0, I) ──► layers 1-5 ──► layers 6-10 ──► compared with  y = A x + b + noise
                      rank 0          rank 1

1024 points in batches of 64, each split into M microbatches; Adam. Each schedule is compared with the same loop without
a pipeline: after all epochs, every weight must have the same bits. For a schedule without a flush, that loop uses the
same old weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.pipeline.pipeline import Pipeline
from drumline.train.models.mlp import mlp

NUM_RANKS = 2
Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Build:
    """What to train. The width sets how much a layer computes relative to the cost of calling it."""

    width: int = 512
    num_points: int = 1024
    batch_rows: int = 64
    num_epochs: int = 5
    layers_per_stage: tuple[int, int] = (5, 5)
    learning_rate: float = 1e-3
    noise: float = 0.1
    seed: int = 0

    @property
    def num_steps(self) -> int:
        """The number of steps in all epochs."""
        return self.num_epochs * (self.num_points // self.batch_rows)

    def data(self) -> tuple[Tensor, Tensor]:
        """Return the points, and their images under a linear map with noise.

        >>> [tuple(value.shape) for value in Build(width=8).data()]
        [(1024, 8), (1024, 8)]
        """
        random = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.num_points, self.width, generator=random)
        weight = torch.randn(self.width, self.width, generator=random) / self.width**0.5
        bias = torch.randn(self.width, generator=random)
        return x, x @ weight.T + bias + self.noise * torch.randn(x.shape, generator=random)

    def model(self) -> nn.Sequential:
        """Return the MLP, the same for the same seed: linear layers, each but the last followed by a ReLU.

        >>> len(Build(width=8).model())
        10
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return mlp(sum(self.layers_per_stage), self.width, self.width, self.width)

    def batches(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the epoch and the rows of every step, reshuffled in each epoch."""
        x, y = self.data()
        random = torch.Generator().manual_seed(self.seed + 1)
        for epoch in range(self.num_epochs):
            order = torch.randperm(self.num_points, generator=random)
            for rows in torch.chunk(order, self.num_points // self.batch_rows):
                yield epoch, x[rows], y[rows]


@dataclass(frozen=True, slots=True)
class DemoTrial:
    """One way to train the build."""

    schedule: str
    num_microbatches: int
    checkpoint: str = "none"

    @property
    def name(self) -> str:
        """Its name, also used for its folder.

        >>> DemoTrial("gpipe", 8, "full").name
        'gpipe-8-checkpointed'
        """
        return f"{self.schedule}-{self.num_microbatches}" + ("-checkpointed" if self.checkpoint == "full" else "")


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The result of training: the mean loss of every epoch, and the weights of this process."""

    losses: tuple[float, ...]
    weights: Weights


def train(build: Build, trial: DemoTrial, *, record: str) -> DemoResult:
    """Train with a schedule on this rank, as a run in the folder `record`."""
    losses: list[list[Tensor]] = [[] for _ in range(build.num_epochs)]
    recorded: dict[str, Any] = {"record": record}  # an option of a feature, which may be absent
    with Pipeline(
        build.model(),
        loss_fn=functional.mse_loss,
        schedule=trial.schedule,
        num_microbatches=trial.num_microbatches,
        balance=build.layers_per_stage,
        checkpoint=trial.checkpoint,
        device="cpu",  # where one process computes, too
        **recorded,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=build.learning_rate)
        results = []
        for epoch, x, y in build.batches():
            results.append((epoch, pipe.step(x, target=y)))
            if not pipe.steps_in_flight:  # else optimizers step inside of steps
                optimizer.step()
                optimizer.zero_grad()
        pipe.drain()
        for epoch, result in results:
            assert result.loss is not None, "a step has a loss"
            losses[epoch].append(result.loss)
        weights = {name: tensor.detach().clone() for name, tensor in pipe.state_dict().items()}
    return DemoResult(_means(losses), weights)


def train_unsplit(build: Build, num_microbatches: int, *, is_stale: bool = False) -> DemoResult:
    """Train with a plain loop: one process that accumulates gradients over microbatches.

    With `is_stale`, gradients are those of the weights one update ago, as in PipeDream-2BW.
    """
    model = build.model()
    model_seen = copy.deepcopy(model) if is_stale else model
    optimizer = torch.optim.Adam(model.parameters(), lr=build.learning_rate)
    losses: list[list[Tensor]] = [[] for _ in range(build.num_epochs)]
    for epoch, x, y in build.batches():
        parts = []
        for rows, wanted in zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True):
            loss = functional.mse_loss(model_seen(rows), wanted) * (len(rows) / len(x))
            torch.autograd.backward(loss)
            parts.append(loss.detach())
        if is_stale:
            for newest, param in zip(model.parameters(), model_seen.parameters(), strict=True):
                newest.grad, param.grad = param.grad, None
            model_seen.load_state_dict(model.state_dict())
        optimizer.step()
        optimizer.zero_grad()
        losses[epoch].append(sum(parts[1:], parts[0]))
    return DemoResult(_means(losses), dict(model.state_dict()))


def _means(losses: list[list[Tensor]]) -> tuple[float, ...]:
    return tuple(float(torch.stack(loss).double().mean()) for loss in losses)
