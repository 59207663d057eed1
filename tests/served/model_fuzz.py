"""Models drawn by chance, with what an exporter can get wrong: branches on sizes, rows that mix, lookups, types.

A model is exported or refused. Once it is exported, requests of any size and numbers are sent through what the front
and stages check and compute. Each answer must be what PyTorch computes for that request alone, or be refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from drumline.core.errors import ModelError
from drumline.serve.export.check import Subject, plain_outputs
from drumline.serve.export.export import export
from drumline.serve.session import Session
from drumline.serve.wire.manifest import Manifest
from drumline.serve.wire.tensors import Arrays, Refused, read_inputs
from drumline.train.export_models import _resizing
from served.services import request_of

TABLE, WIDTH, LONGEST = 11, 4, 48
Body = Callable[["Drawn", torch.Tensor, torch.Tensor], torch.Tensor]


def _gather(model: Drawn, h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.gather(h, 2, (x % WIDTH).unsqueeze(-1).expand(-1, -1, WIDTH))


# What a model looks its tokens up by.
LOOKUPS: dict[str, Callable[[Drawn, torch.Tensor], torch.Tensor]] = {
    "embedding": lambda model, x: model.table(x),
    "cast": lambda model, x: model.table(x.long()),
    "shifted": lambda model, x: model.table(x.long() + 1),
    "shifted back": lambda model, x: model.table(x.long() - 1),
    "twice": lambda model, x: model.table(x.long() * 2 - x),
    "absolute": lambda model, x: model.table(x.long().abs()),
    "clamped": lambda model, x: model.table(x.long().clamp(0, TABLE - 1)),
    "clamped above": lambda model, x: model.table(x.long().clamp(max=TABLE - 1)),
    "masked": lambda model, x: model.table(torch.where(x < 0, 0, x).long()),
    "index": lambda model, x: model.table.weight[x.long()],
    "select": lambda model, x: model.table.weight.index_select(0, x.long().flatten()).reshape(*x.shape, WIDTH),
    "one hot": lambda model, x: nn.functional.one_hot(x.long(), TABLE).float() @ model.table.weight,
    "floats": lambda model, x: x.float().unsqueeze(-1) * model.table.weight[0],
    "modulo": lambda model, x: model.table(x.long() % TABLE),
    "first": lambda model, x: model.table(x.long())[:, :1] + model.table(x.long() * 0),
    "gathered": lambda model, x: torch.gather(
        model.table.weight[0].expand(*x.shape, WIDTH), 2, x.long().unsqueeze(-1)
    ).expand(-1, -1, WIDTH),
}

# Branches on sizes, and what sizes do; True: the other branch.
BRANCHES: dict[str, Callable[[torch.Tensor], bool]] = {
    "none": lambda x: False,
    "long": lambda x: x.shape[1] > 24,
    "short": lambda x: x.shape[1] < 4,
    "one token": lambda x: x.shape[1] == 1,
    "many rows": lambda x: x.shape[0] > 8,
    "one row": lambda x: x.shape[0] == 1,
    "eights": lambda x: x.shape[1] % 8 == 0,
    "odd": lambda x: x.shape[1] % 2 == 1,
    "even rows": lambda x: x.shape[0] % 2 == 0,
    "square": lambda x: x.shape[0] == x.shape[1],
    "wide": lambda x: x.shape[0] < x.shape[1],
    "many numbers": lambda x: x.numel() > 200,
    "exactly": lambda x: x.shape[1] == 17,
    "root": lambda x: int(x.shape[1] ** 0.5) == 5,
    "one long row": lambda x: x.shape[0] == 1 and x.shape[1] > 16,
    "middle": lambda x: 10 < x.shape[1] < 20,
    "halves": lambda x: x.shape[1] // 2 > 9,
}

# What happens to hidden states; some mix rows.
STEPS: dict[str, Body] = {
    "none": lambda model, h, x: h,
    "linear": lambda model, h, x: model.first(h),
    "softmax": lambda model, h, x: (h @ h.transpose(1, 2)).softmax(-1) @ h,
    "length mean": lambda model, h, x: h - h.mean(1, keepdim=True),
    "cumulated": lambda model, h, x: h.cumsum(1),
    "positions": lambda model, h, x: h + torch.arange(x.shape[1]).unsqueeze(-1) * 0.1,
    "length": lambda model, h, x: h / x.shape[1],
    "pooled": lambda model, h, x: h + nn.functional.adaptive_avg_pool1d(h.transpose(1, 2), 1).transpose(1, 2),
    "padded": lambda model, h, x: nn.functional.pad(h, (0, 0, 1, 0))[:, :-1] + h,
    "row sum": lambda model, h, x: h + x.float().sum(1).view(-1, 1, 1),
    "gathered": _gather,
    "sorted": lambda model, h, x: h.sort(1).values,
    "batch mean": lambda model, h, x: h - h.mean(0, keepdim=True),
    "tokens' mean": lambda model, h, x: h - x.float().mean(),
    "longest": lambda model, h, x: h / (1 + x.float().abs().sum(1).max()),
    "rows": lambda model, h, x: h / x.shape[0],
    "row above": lambda model, h, x: h + h.roll(1, 0),
    "batch cumulated": lambda model, h, x: h.cumsum(0),
    "largest": lambda model, h, x: h * (x.max() == x).unsqueeze(-1),
    "any": lambda model, h, x: torch.where((x == 3).any(), h, -h),
    "first row": lambda model, h, x: h + h[:1],
    "flipped": lambda model, h, x: h + h.flip(0),
}
ENDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tokens": lambda h: h,
    "last": lambda h: h[:, -1],
    "mean": lambda h: h.mean(1),
    "argmax": lambda h: h.argmax(-1),
    "bool": lambda h: h > 0,
    "double": lambda h: h.double().sum(1),
}
TYPES = (torch.int64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Drawn(nn.Module):
    """A model of a lookup, a branch, two steps and an end."""

    table: nn.Embedding
    first: nn.Linear
    last: nn.Linear

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(TABLE, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.lookup, self.branch = chance.choice(list(LOOKUPS)), chance.choice(["none", *BRANCHES, "none"])
        self.steps = [chance.choice(["none", *list(STEPS)]) for _ in range(2)]
        self.end, self.dtype = chance.choice(list(ENDS)), chance.choice(TYPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = LOOKUPS[self.lookup](self, x)
        if BRANCHES[self.branch](x):
            h = -2 * h
        for step in self.steps:
            h = STEPS[step](self, h, x)
        return ENDS[self.end](self.last(h))

    def __str__(self) -> str:
        return ", ".join([self.lookup, self.branch, *self.steps, self.end, str(self.dtype)])


def drawn_model(seed: int) -> Drawn:
    torch.manual_seed(seed)
    return Drawn(random.Random(seed)).eval()


def exported_or_refused(model: Drawn, folder: Path, seed: int) -> Manifest | str:
    """Return the manifest of a model, or why it was refused."""
    chance = torch.Generator().manual_seed(seed)
    example = {"x": torch.randint(1, TABLE - 1, (2, 12), generator=chance).to(model.dtype)}
    try:
        return export(Subject("drawn", model, _resizing(example), {"length": LONGEST}), folder, num_stages=1, length=12)
    except ModelError as error:
        return str(error)


def wrong_answers(model: Drawn, folder: Path, manifest: Manifest, seed: int, *, requests: int = 30) -> list[str]:
    """Send requests to an exported model, several together; returns what was answered otherwise than by PyTorch."""
    chance = np.random.default_rng(seed)
    sessions = [Session(folder, manifest, number) for number in range(len(manifest.stages))]
    wrong: list[str] = []
    for _ in range(requests):
        length = int(chance.choice([1, 2, 3, int(chance.integers(1, LONGEST + 1))]))
        least, most = (0, TABLE) if chance.random() < 0.7 else (-TABLE - 2, TABLE + 3)
        dtype = torch.zeros(0, dtype=model.dtype).numpy().dtype
        rows = int(chance.choice([1, 1, 2, 3, 9]))
        x = chance.integers(least, most, (rows, length)).astype(dtype)
        found = answered(sessions, manifest, {"x": x})
        for at in range(rows) if found is not None else ():
            wrong += _compared(model, x[at : at + 1], found[at : at + 1])
    return wrong


def answered(sessions: list[Session], manifest: Manifest, arrays: Arrays) -> Any:
    """Return the answer that a service gives, or None if it refuses."""
    with suppress(Refused, ValueError):
        given = read_inputs(request_of(arrays), manifest.inputs, manifest.dimensions)
        for session in sessions:
            given = session.run(given)
        return next(iter(given.values()))
    return None


def _compared(model: Drawn, row: Any, found: Any) -> list[str]:
    try:
        (right,) = plain_outputs(model, {"x": torch.from_numpy(row.copy())})
    except Exception as error:
        return [f"{row.tolist()}: an answer where PyTorch raises {type(error).__name__}"]
    close = found.shape == right.shape and found.dtype == right.dtype
    if close and right.dtype.kind == "f":
        close = bool(np.abs(found - right).max(initial=0) <= 1e-4 * max(1e-3, np.abs(right).max(initial=0)))
    elif close:  # of equal numbers either may be the larger one
        close = bool((found == right).mean() > 0.9)
    return [] if close else [f"{row.tolist()}: {found.tolist()} for {right.tolist()}"]
