"""Training in one process by plain PyTorch: what losses a run must have. It shares no code with Drumline."""

from __future__ import annotations

import copy
import math
from collections.abc import Collection

import torch

from faults.config import Config

STALE = "pipedream-2bw"  # every gradient belongs to the weights one update ago
_LR, _WARMUP, _FINAL, _CLIP, _MICROBATCHES = 0.01, 4, 0.1, 1.0, 4


def plain_losses(config: Config, skipped: Collection[int] = ()) -> list[float]:
    """Return the loss of every step; one `skipped`, or not finite in loss or gradient, is computed and not taken."""
    from faults import user

    assert config.dropout == 0, "the order of random numbers is Drumline's own"
    model, loss_fn = user.build_model(config.width, lines=config.lines, reads=config.slices > 1)
    seen = copy.deepcopy(model) if config.schedule == STALE else model  # the weights that gradients belong to
    batches = user.build_data(config.width, nan_at=config.nan_at, reads=config.slices > 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR)
    losses = []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = _LR * _share(step, config.steps)
        optimizer.zero_grad()
        total = 0.0
        x, y = batches[step % len(batches)]
        for inputs, target in zip(x.chunk(_MICROBATCHES), y.chunk(_MICROBATCHES), strict=True):
            loss = loss_fn(seen(inputs), target) / _MICROBATCHES
            loss.backward()
            total += loss.item()
        if seen is not model:
            for param, old in zip(model.parameters(), seen.parameters(), strict=True):
                param.grad, old.grad = old.grad, None
            seen.load_state_dict(model.state_dict())  # without the update of this step
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
        if step not in skipped and math.isfinite(total) and bool(torch.isfinite(norm)):
            optimizer.step()
        losses.append(total)
    return losses


def _share(step: int, steps: int) -> float:
    if step < _WARMUP:
        return (step + 1) / _WARMUP
    done = (step - _WARMUP + 1) / (steps - _WARMUP)
    return _FINAL + (1 - _FINAL) * (1 + math.cos(math.pi * done)) / 2
