"""The function that `drumline profile FILE.py:NAME` measured, as model and data of a training run.

It returns (model, loss_fn, batch, target). Training on its one batch again and again shows that a plan runs and how
fast; for more, name your own data in the config.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from drumline.core.errors import ModelError
from drumline.engine.model.sources import Material, material_from
from drumline.model.block import blocks_of
from drumline.pipeline.profiling import rows_of
from drumline.train.config.settings import TrainSettings


def model(source: str) -> Any:
    """Return the function's model with its loss."""
    material = material_from(source)
    module = material.model
    whole = module if isinstance(module, nn.Module) else nn.Sequential(*(block.module for block in blocks_of(module)))
    return whole if material.loss_fn is None else (whole, material.loss_fn)


def data(source: str, settings: TrainSettings) -> list[tuple[Any, Any]]:
    """Return the function's batch, its rows repeated to as many as a pipeline step takes."""
    material: Material = material_from(source)
    if material.target is None:
        raise ModelError(
            f"{source} returns no target",
            expected="a loss_fn and a target, for a batch to train on",
            fix="name your own data: data.kind, and data.files or data.function",
        )
    count = settings.batch.sequences // settings.batch.accumulate
    return [(rows_of(material.batch, count), rows_of(material.target, count))]
