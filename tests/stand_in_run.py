"""A small stand-in for what a training run is made from: a GPT of plain modules, batches, and the loop's choices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.train.config.settings import OptimizerGroup, OptimizerSettings, TrainSettings
from drumline.train.data.items.batch import Batch, Data
from drumline.train.models.built import Built


class Layer(nn.Module):
    """A transformer's layer."""

    def __init__(self, hidden: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm, self.second_norm = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.inward, self.outward = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, value: Tensor) -> Tensor:
        rows, length, hidden = value.shape
        split = self.inward(self.norm(value)).view(rows, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        value = value + self.outward(seen.transpose(1, 2).reshape(rows, length, hidden))
        made: Tensor = value + self.down(functional.gelu(self.up(self.second_norm(value))))
        return made


def gpt(settings: TrainSettings) -> Built:
    """Return a GPT of the settings' sizes."""
    torch.manual_seed(settings.run.seed)
    model_settings = settings.model
    layers = (Layer(model_settings.hidden, model_settings.num_heads) for _ in range(model_settings.num_layers))
    model = nn.Sequential(nn.Embedding(256, model_settings.hidden), *layers, nn.Linear(model_settings.hidden, 256))
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[settings.precision.weights]
    return Built(model.to(dtype), next_token, inputs="input")


def next_token(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1).float(), target.flatten())


def batch(settings: TrainSettings, built: Built, *, rank: int = 0, size: int = 1) -> Batch:
    """Return the batch of a pipeline step, or a line's part of it."""
    rows = settings.batch.sequences // settings.batch.accumulate
    tokens = torch.randint(256, (rows, settings.batch.sequence + 1), generator=torch.Generator().manual_seed(1))
    tokens = tokens.chunk(size)[rank]
    return Batch({"input": tokens[:, :-1]}, tokens[:, 1:], tokens[:, 1:].numel(), tokens[:, 1:].numel())


def arguments(settings: TrainSettings, built: Built, example: Batch, folder: Path) -> dict[str, Any]:
    """Return what a pipeline is made with."""
    return {
        "loss_fn": built.loss_fn,
        "num_ranks": settings.mesh.pipeline,
        "schedule": settings.pipeline.schedule,
        "num_microbatches": settings.num_microbatches,
        "stages_per_rank": settings.pipeline.stages_per_rank,
        "checkpoint": settings.memory.recompute,
        "precision": settings.precision.compute,
        "master_weights": settings.precision.master_weights,
        "check_model": settings.pipeline.check_model,
        "record": folder,
    }


@dataclass(frozen=True)
class Chosen:
    """Some parameters, and what updates them."""

    group: OptimizerGroup
    kind: Any
    lr: float
    names: tuple[str, ...]


def optimizers(shapes: dict[str, torch.Size], settings: OptimizerSettings) -> list[Chosen]:
    """Return one optimizer for matrices if there is a group, and one for the rest."""
    matrices = tuple(name for name, shape in shapes.items() if len(shape) == 2) if settings.groups else ()
    rest = OptimizerGroup(kind=settings.kind, settings=settings.settings)
    found = [(group, matrices) for group in settings.groups]
    found.append((rest, tuple(name for name in shapes if name not in matrices)))
    return [Chosen(group, getattr(torch.optim, group.kind), settings.lr, names) for group, names in found]


def data(settings: TrainSettings, built: Built, *, rank: int = 0, size: int = 1) -> Data:
    """Return data of that one batch, or of a line's part of it."""
    return Data(iter(()), (batch(settings, built, rank=rank, size=size),), 0)  # type: ignore[arg-type]


def stand_in(patch: pytest.MonkeyPatch) -> None:
    """Let dry runs be made of these."""
    parts = {
        "build": lambda settings, *_, **__: gpt(settings),
        "build_data": data,
        "pipeline_arguments": arguments,
        "choose": optimizers,
    }
    for name, part in parts.items():
        patch.setattr(f"drumline.train.dry.dry_run.{name}", part)
