"""Models with weights that several blocks share, and a look at every rank's copy of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.pipeline.pipeline import Pipeline

NUM_TOKENS, WIDTH = 13, 6


def layer(dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU(), nn.Dropout(dropout))


def language_model(*, dropout: float = 0.0, num_tokens: int = NUM_TOKENS, seed: int = 1) -> nn.Sequential:
    """An embedding whose weight is the head's too."""
    torch.manual_seed(seed)
    embedding, head = nn.Embedding(num_tokens, WIDTH), nn.Linear(WIDTH, num_tokens)
    head.weight = embedding.weight
    return nn.Sequential(embedding, *(layer(dropout) for _ in range(6)), head)


def repeated(*, dropout: float = 0.0, seed: int = 1) -> nn.Sequential:
    """One block that is used three times."""
    torch.manual_seed(seed)
    embedding, head, again = nn.Embedding(NUM_TOKENS, WIDTH), nn.Linear(WIDTH, NUM_TOKENS), layer(dropout)
    return nn.Sequential(embedding, again, layer(dropout), again, layer(dropout), layer(dropout), again, head)


def neighbours(*, dropout: float = 0.0, seed: int = 1) -> nn.Sequential:
    """Two blocks side by side with one weight, and a block that uses one layer twice."""
    torch.manual_seed(seed)
    first, second, inner = layer(dropout), layer(dropout), nn.Linear(WIDTH, WIDTH)
    second[0].weight = first[0].weight
    twice = nn.Sequential(inner, nn.Tanh(), inner)
    rest = (layer(dropout) for _ in range(3))
    return nn.Sequential(nn.Embedding(NUM_TOKENS, WIDTH), first, second, twice, *rest, nn.Linear(WIDTH, NUM_TOKENS))


MODELS = {"language model": language_model, "repeated": repeated, "neighbours": neighbours}


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def tokens(rows: int, *, seed: int = 0, num_tokens: int = NUM_TOKENS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(seed)
    return torch.randint(0, num_tokens, (rows, 5)), torch.randint(0, num_tokens, (rows, 5))


def everywhere(pipe: Pipeline) -> list[dict[str, nn.Parameter]]:
    """Return each of this process's ranks' parameters by first name, copies included."""
    return [
        {name: tensor for name, (_, tensor) in found.items() if isinstance(tensor, nn.Parameter)}
        for found in (
            pipe._engine.assembly.ties.on(
                (index, block) for index, stage in executor.stages.items() for block in stage.blocks
            )
            for executor in pipe._engine.executors
        )
    ]
