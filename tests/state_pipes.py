"""Pipelines of two ranks in this process, for models that keep something."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn import functional

import drumline as dl

_SETTINGS: dict[str, Any] = {
    "loss_fn": functional.mse_loss,
    "num_ranks": 2,
    "num_microbatches": 4,
    "transport": "in-process",
    "balance": "even",
    "record": False,
}


def piped(model: nn.Module, schedule: str = "1f1b", checkpoint: Any = "none", **options: Any) -> dl.Pipeline:
    """Return such a pipeline of a model."""
    return dl.Pipeline(model, schedule=schedule, checkpoint=checkpoint, **(_SETTINGS | options))
