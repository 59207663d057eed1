"""A small decoder that every axis of a mesh can divide, and what one process makes of it, written with torch alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from matrices import ALL

WORDS, WIDTH, HEADS, LENGTH, ROWS, MICROBATCHES = 12, 16, 4, 8, 16, 4
LAYERS = 4 if ALL else 2  # one of each kind; following a model takes longer than all its steps
PLAN = {
    "tokens": "embedding",
    "*.query": "colwise", "*.key": "colwise", "*.value": "colwise", "*.out": "rowwise",
    "*.up": "colwise", "*.down": "rowwise",
    "head": "colwise_gather",
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        made = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        out: Tensor = self.out(made.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down(functional.gelu(self.up(x)))
        return down


class Layer(nn.Module):
    """Attention, then a feed-forward or experts."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.second = nn.LayerNorm(WIDTH)
        self.inner: nn.Module = dl.MoE(WIDTH, WIDTH, num_experts=4, top_k=2) if sparse else FeedForward()

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.attention(self.norm(x), mask)
        added: Tensor = x + self.inner(self.second(x))
        return added


class Statistics(nn.Module):
    """A norm over rows and tokens, with running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return made


class Decoder(nn.Module):
    """A decoder of which every second layer has experts."""

    def __init__(self, *, tied: bool = False, statistics: bool = False) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(sparse=at % 2 == 1) for at in range(LAYERS)])
        self.statistics = Statistics() if statistics else None
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor, documents: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        if positions is None:
            positions = torch.arange(x.shape[1], device=x.device)[None]
        mask = None
        if documents is not None:
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            mask = ((documents.unsqueeze(2) == documents.unsqueeze(1)) & causal).unsqueeze(1)
        h = self.tokens(x) + self.places(positions)
        for layer in self.layers:
            h = layer(h, mask)
        if self.statistics is not None:
            h = self.statistics(h)
        logits: Tensor = self.head(self.norm(h))
        return logits


def decoder(*, low: bool = False, frozen: bool = False, meta: bool = False, **changes: bool) -> Decoder:
    """Return the model with the values that all processes give it; on the meta device it has none."""
    torch.manual_seed(0)
    if meta:
        with torch.device("meta"):
            return Decoder(**changes)
    model = Decoder(**changes)
    if frozen:
        for part in (model.tokens, model.places, model.layers[0], model.layers[-1].attention):
            part.requires_grad_(False)
    return model.to(torch.bfloat16) if low else model


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean over the labels that count."""
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


Microbatch = tuple[Tensor, Tensor, Tensor | None]


def batch(kind: str, step: int, lines: int) -> list[list[Microbatch]]:
    """Return the microbatches of every line: tokens, labels of which some do not count, and documents if packed."""
    chance = torch.Generator().manual_seed(step)

    def function(rows: int, length: int) -> Microbatch:
        x, y = (torch.randint(WORDS, (rows, length), generator=chance) for _ in range(2))
        y[torch.rand(y.shape, generator=chance) < 0.3] = -100
        documents = torch.arange(length).expand(rows, -1) // 3 if kind == "packed" else None
        return x, y, documents

    lengths = {"lengths": (8, 2, 6, 4), "buckets": (8, 6)}.get(kind, (LENGTH,) * MICROBATCHES)
    return [[function(ROWS // MICROBATCHES // lines, length) for length in lengths] for _ in range(lines)]


def example(mesh: dict[str, int]) -> Tensor:
    """Return tokens of the shape that a line gets: with any other, the first step would follow the model again.

    >>> example({"pp": 2, "dp": 2}).shape
    torch.Size([8, 8])
    """
    return torch.zeros(ROWS // (mesh.get("dp", 1) * mesh.get("ep", 1)), LENGTH, dtype=torch.long)


def count(target: Tensor) -> int:
    """Return the number of labels that count."""
    return int((target != -100).sum())


def alone(what: Any, lines: int, steps: int = 2) -> dict[str, Any]:
    """Train the plain model in this process, over the microbatches of all lines; return what it saw."""
    model = decoder(**{name: value for name, value in what.model.items() if name != "meta"})
    trained = [param for param in model.parameters() if param.requires_grad]
    masters = [param.detach().float().requires_grad_() for param in trained]
    kind: Any = torch.optim.Adafactor if what.after == "adafactor" else torch.optim.SGD
    optimizer, precision = kind(masters, lr=0.1), {"bf16": torch.bfloat16, "fp16": torch.float16}
    dtype = precision.get(what.options.get("precision", ""))
    losses: list[float] = []
    gradients: dict[str, Tensor] = {}
    for step in range(steps):
        every = [entry for line in batch(what.given, step, lines) for entry in line]
        whole, total = sum(count(y) for _, y, _ in every), 0.0
        for x, y, documents in every:
            with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
                loss = loss_fn(model(x, documents), y) * (count(y) / whole)
            torch.autograd.backward(loss)
            total += loss.item()
        losses.append(total)
        if step == 0:
            gradients = {name: param.grad.float() for name, param in model.named_parameters() if param.grad is not None}
            gradients = {name: gradient.clone() for name, gradient in gradients.items()}
        if what.after != "another step" or step:
            for own, param in zip(masters, trained, strict=True):
                own.grad = None if param.grad is None else param.grad.float()
            optimizer.step()
            with torch.no_grad():
                for own, param in zip(masters, trained, strict=True):
                    param.copy_(own)
            model.zero_grad()
    state = {name: entry.detach().float() for name, entry in model.state_dict().items()}
    return {"losses": losses, "gradients": gradients, "state": state}
