"""The reference of every mesh: the plain model in one process, over the same batch, written with torch alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from matrices import ALL

ROWS, LENGTH, WORDS, WIDTH = 16, 8, 11, 16
STEPS = 20 if ALL else 4


def chain() -> nn.Sequential:
    """Return a model of ten blocks."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(8)]
    return nn.Sequential(nn.Embedding(WORDS, WIDTH), *blocks, nn.Linear(WIDTH, WORDS))


def words(step: int) -> tuple[Tensor, Tensor]:
    """Return a step's batch, and labels of which some do not count: their number differs between rows."""
    chance = torch.Generator().manual_seed(step)
    x, y = (torch.randint(WORDS, (ROWS, LENGTH), generator=chance) for _ in range(2))
    y[torch.rand(y.shape, generator=chance) < 0.3] = -100
    y[: ROWS // 4, : LENGTH // 2] = -100  # the first lines of a mesh count fewer
    return x, y


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the labels that count."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def trained(
    model: nn.Module,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    *,
    steps: int = STEPS,
    clip: bool = True,
) -> list[tuple[float, float]]:
    """Train the model on whole batches, and return every step's loss and gradient norm."""
    updates = optimizer(model.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        x, y = words(step)
        loss = loss_fn(model(x), y)
        torch.autograd.backward(loss)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0 if clip else float("inf"))
        updates.step()
        updates.zero_grad()
        found.append((loss.item(), norm.item()))
    return found


def furthest(row: list[tuple[float, float]], other: list[tuple[float, float]]) -> tuple[float, float]:
    """Return the largest relative differences of two runs' losses, and of their norms."""
    losses, norms = (max(abs(a[at] - b[at]) / abs(b[at]) for a, b in zip(row, other, strict=True)) for at in range(2))
    return losses, norms
