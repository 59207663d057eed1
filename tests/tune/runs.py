"""Runs of `drumline train` with an adapter on a small Llama, and the same by a plain loop over PEFT's own model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drumline.train.config.files.settings_file import read_settings
from drumline.train.config.settings import TrainSettings
from drumline.train.data.build import build_data
from drumline.train.models.built import IGNORED
from drumline.train.tune.build_tuned import build_tuned
from tune.llama import peft, transformers

RATE = 0.05


def settings_of(llama: Path, chats: Path, out: Path, **keys: Any) -> TrainSettings:
    """Return the settings of a short run with plain gradient descent; `keys` are keys of a config, with __ for dots."""
    given: dict[str, Any] = {
        "model.kind": "hf", "model.path": str(llama), "data.files": [str(chats)], "run.out": str(out),
        "batch.sequences": 4, "batch.microbatch": 1, "batch.sequence": 32, "run.steps": 2,
        "pipeline.transport": "in-process", "pipeline.check_model": False, "evaluation.every": 0,
        "adapter.method": "lora", "adapter.rank": 4, "optimizer.kind": "SGD", "optimizer.lr": RATE,
        "optimizer.clip_norm": 0.0, "learning_rate.shape": "constant", "learning_rate.warmup_steps": 0,
    }  # fmt: skip
    return read_settings(None, given | {name.replace("__", "."): value for name, value in keys.items()})


def newest(out: Path) -> Path:
    """Return the newest checkpoint of a run."""
    return max((out / "checkpoints").glob("step-*"))


def loaded(llama: Path, adapter: Path, **how: Any) -> Any:
    """Return the base with an adapter, as PEFT loads it."""
    base = transformers.AutoModelForCausalLM.from_pretrained(llama, **how)
    return peft.PeftModel.from_pretrained(base, str(adapter))


def plain_loop(settings: TrainSettings) -> dict[str, Tensor]:
    """Return the adapter, by PEFT's names, after the same updates in one process without a pipeline."""
    built = build_tuned(settings, device="cpu")
    assert built.adapter is not None
    model: Any = built.model.train()
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=settings.optimizer.lr)
    data = build_data(settings, built)
    batches = iter(data.training)
    for _ in range(settings.run.steps):
        batch = next(batches)
        tokens = (batch.target != IGNORED).sum()
        for row in range(len(batch.target)):
            logits = model(**{name: value[row : row + 1] for name, value in batch.inputs.items()}).logits
            target = batch.target[row]
            loss = torch.nn.functional.cross_entropy(logits[0].float(), target, ignore_index=IGNORED, reduction="sum")
            (loss / tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    data.close()
    found = dict(model.named_parameters())
    return {theirs: found[name].detach() for name, theirs in built.adapter.names.items()}
