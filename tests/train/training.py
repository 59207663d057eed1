"""Small models and streams to train, written against the contracts of `drumline.train`, and a plain loop over them.

The plain loop is torch alone: one forward over all rows of an update, one mean over all tokens that count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.train.config.settings import TrainSettings
from drumline.train.data.items.batch import Batch, Data
from drumline.train.models.built import IGNORED, Built

VOCABULARY, WIDTH, LENGTH = 13, 16, 6


class Layer(nn.Module):
    """Looks back by a running mean, so that later tokens never reach earlier ones."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        counts = torch.arange(1, x.shape[1] + 1, device=x.device, dtype=x.dtype).unsqueeze(1)
        seen = self.norm(x).cumsum(dim=1) / counts
        added: Tensor = x + self.dropout(self.outer(functional.gelu(self.inner(seen))))
        return added


class Writer(nn.Module):
    """A language model that is no chain: its forward is followed."""

    def __init__(self, dropout: float = 0.0, *, tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.3)
        self.layers = nn.ModuleList(Layer(dropout) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        made: Tensor = self.head(x)
        return made


class OwnLoss(nn.Module):
    """Computes its loss itself, as Hugging Face's models do when they get labels."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Writer()

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(tokens)
        if labels is None:
            return {"logits": logits}
        return {"loss": functional.cross_entropy(logits.transpose(1, 2), labels), "logits": logits}


def mean_loss(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2), target, ignore_index=IGNORED)


class Letters:
    """A tokenizer of thirteen signs."""

    vocabulary, end = VOCABULARY, 0
    signs = "|abcdefghijkl"

    def encode(self, text: str) -> list[int]:
        return [self.signs.index(name) for name in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.signs[token] for token in tokens)


def chain(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(VOCABULARY, WIDTH), *(Layer(dropout) for _ in range(3)), nn.Linear(WIDTH, VOCABULARY)
    )


def made(make: Callable[[], nn.Module]) -> Callable[..., Built]:
    """Return what makes a model by the settings' contract."""

    def make_model(settings: TrainSettings, *, device: str = "cpu") -> Built:
        with torch.device(device):
            model = make()
        loss_fn = None if isinstance(model, OwnLoss) else mean_loss
        return Built(model, loss_fn, Letters(), "tokens")

    return make_model


class Uneven:
    """Batches whose tokens count unevenly: some rows of some batches hardly count at all."""

    def __init__(self, rows: int, *, own: bool = False, start: int = 0) -> None:
        self.rows, self.own, self.position = rows, own, start

    def batch(self, number: int) -> Batch:
        generator = torch.Generator().manual_seed(1000 + number)
        starts = torch.randint(0, VOCABULARY - 1, (self.rows, 1), generator=generator)
        counting = 1 + (starts + torch.arange(LENGTH + 1)) % (VOCABULARY - 1)
        tokens, target = counting[:, :-1].contiguous(), counting[:, 1:].contiguous()
        share = (number % 3 + 1) / 4  # of the targets that count
        target[torch.rand(target.shape, generator=generator) > share] = IGNORED
        target[0, 0], target[1] = 1, IGNORED
        inputs = {"tokens": tokens, "labels": target} if self.own else {"tokens": tokens}
        return Batch(inputs, target, int((target != IGNORED).sum()), target.numel())

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.position += 1
            yield self.batch(self.position - 1)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Ending(Uneven):
    """So many batches, and then no more, which no stream may do."""

    def __init__(self, batches: list[Batch]) -> None:
        super().__init__(0)
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def uneven(settings: TrainSettings, built: Built, *, rank: int = 0, size: int = 1) -> Data:
    """Return streams by the settings' contract."""
    rows = settings.num_microbatches * settings.batch.microbatch
    own = built.loss_fn is None
    held_out = Uneven(rows, own=own, start=50)
    return Data(Uneven(rows, own=own), tuple(held_out.batch(50 + at) for at in range(3)), 10**6)


def plain_run(
    model: nn.Module,
    settings: TrainSettings,
    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]],
    share: Callable[[int], float],
) -> tuple[list[float], list[float], float]:
    """Train without a pipeline; returns losses, gradient norms, and the held-out loss at the end.

    An update's batches are joined to one, so nothing is weighed: torch's mean over all tokens is the loss.
    """
    rows = settings.num_microbatches * settings.batch.microbatch
    stream, made_ones = iter(Uneven(rows)), optimizers(model)
    full = [[group["lr"] for group in made_one.param_groups] for made_one in made_ones]
    losses, norms = [], []
    for step in range(settings.run.steps):
        batches = [next(stream) for _ in range(settings.batch.accumulate)]
        tokens = torch.cat([batch.inputs["tokens"] for batch in batches])
        loss = _loss(model, tokens, torch.cat([batch.target for batch in batches]))
        torch.autograd.backward(loss)
        losses.append(loss.item())
        if settings.optimizer.clip_norm:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), settings.optimizer.clip_norm)))
        for optimizer, rates in zip(made_ones, full, strict=True):
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr * share(step)
            optimizer.step()
            optimizer.zero_grad()
    held_out = [Uneven(rows).batch(50 + at) for at in range(3)]
    with torch.no_grad():
        tokens = torch.cat([batch.inputs["tokens"] for batch in held_out])
        ended = _loss(model.eval(), tokens, torch.cat([batch.target for batch in held_out])).item()
    return losses, norms, ended


def _loss(model: nn.Module, tokens: Tensor, target: Tensor) -> Tensor:
    logits = model.inner(tokens) if isinstance(model, OwnLoss) else model(tokens)
    return functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=IGNORED)


def cosine(step: int, steps: int, warmup: int, final: float) -> float:
    """The share of the full rate, by the book."""
    if step < warmup:
        return (step + 1) / warmup
    done = (step + 1 - warmup) / (steps - warmup)
    return final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
