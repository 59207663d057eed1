"""Every family of the zoo under several schedules against the plain model on the whole batch: right, refused, or wrong.

`python tests/hf_matrix.py` runs all of them, in one process and on two, and writes the table of docs/models.md.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import DrumlineError
from hf_zoo import FAMILIES, Batch, made

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v")
ROWS = 6
MICROBATCHES = 4
LABELS = ("labels", "mc_labels", "start_positions", "end_positions", "future_values")
Gradients = dict[str, Tensor | None]


def first_numbers(output: Any) -> Tensor:
    """Return what a loss_fn takes of a model's output: its logits, or the first numbers with a row each."""
    found = output.values() if isinstance(output, Mapping) else [output]
    return next(one for one in found if isinstance(one, Tensor) and one.is_floating_point() and one.dim() > 1)


def squared(output: Any, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(first_numbers(output), target)


def plain(model: nn.Module, batch: Batch, target: Tensor | None) -> tuple[float, Gradients]:
    """Return loss and gradients of the model itself on the whole batch."""
    output = model(**batch)
    loss = output.loss if target is None else squared(output, target)
    model.zero_grad()
    loss.backward()
    found = {name: one.grad for name, one in model.named_parameters()}
    return float(loss.detach()), {name: None if one is None else one.clone() for name, one in found.items()}


def microbatched(model: nn.Module, batch: Batch, rows: int) -> tuple[float, Gradients]:
    """Return the same of a model whose loss has a part over each microbatch by itself: by rows."""
    raise NotImplementedError


def material(name: str, own: bool) -> tuple[nn.Module, Batch, Tensor | None]:
    """Return a family's model, what step gets, and the target of a loss_fn."""
    family = FAMILIES[name]
    model = made(name)
    batch = family.batch(ROWS) | dict(family.extra)
    if own:
        return model, batch, None
    kept = {key: value for key, value in batch.items() if key not in LABELS and key != "return_loss"}
    if "decoder_input_ids" not in kept and getattr(model.config, "is_encoder_decoder", False):
        kept["decoder_input_ids"] = batch["labels"].clamp(min=3)
    with torch.no_grad():
        shape = first_numbers(model(**kept)).shape
    return model, kept, torch.randn(shape, generator=torch.Generator().manual_seed(9))


def apart(mine: Mapping[str, Tensor | None], wanted: Gradients) -> tuple[float, str]:
    """Return the largest difference of a gradient, by its norm or by a little of the whole's, and where it is."""
    whole = float(torch.stack([one.norm() for one in wanted.values() if one is not None]).norm())
    worst, where = 0.0, ""
    for name, one in mine.items():
        other = wanted[name]
        if one is None or other is None:
            present = one if other is None else other
            far = 0.0 if present is None else float(present.norm()) / (1e-3 * whole)
        else:
            far = float((one - other).norm()) / max(float(other.norm()), 1e-3 * whole)
        if far > worst:
            worst, where = far, name
    return worst, where


def settings(name: str) -> dict[str, Any]:
    return {}


def outcome(name: str, own: bool, schedule: str, *, num_ranks: int | None = 2) -> str:
    """Return "right", "refused: ..." or "wrong: ..." for this process's part of a family's model."""
    model, batch, target = material(name, own)
    reference = copy.deepcopy(model)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pipe = dl.Pipeline(
                model,
                loss_fn=None if own else squared,
                schedule=schedule,
                num_ranks=num_ranks,
                num_microbatches=MICROBATCHES,
                example=batch,
                balance="even",
                **settings(name),
            )
            with pipe:
                result = pipe.step(**batch, target=target)
                loss = float(result.loss)
                pipe.settle()
                mine = {path: one.grad for path, one in pipe.named_parameters()}
    except DrumlineError as error:
        return f"refused: {error}"
    wanted_loss, wanted = plain(reference, batch, target)
    far, where = apart(mine, wanted)
    if abs(loss - wanted_loss) > 1e-5 * abs(wanted_loss):
        return f"wrong: loss {loss:.6f} and not {wanted_loss:.6f}, gradients {far:.2g} at {where}"
    return "right" if far < 1e-4 else f"wrong: {where} is {far:.2g} off"
