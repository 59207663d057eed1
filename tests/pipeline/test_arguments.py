"""Arguments of `Pipeline`: each wrong one is refused by its name, and the page lists them all."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from drumline.core.errors import DrumlineError
from drumline.pipeline.options import Options
from drumline.pipeline.pipeline import Pipeline
from refused import refused
from some import some

pytestmark = pytest.mark.torch


def made(**more: Any) -> Pipeline:
    settings = {"loss_fn": functional.mse_loss, "num_microbatches": 2, "num_ranks": 2, **more}
    return Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), **settings)


WRONG = [
    ("num_ranks", "2", "integer of at least 1"),
    ("num_ranks", 2.0, "integer of at least 1"),
    ("num_ranks", 0, "integer of at least 1"),
    ("num_microbatches", True, "integer of at least 1"),
    ("num_microbatches", 0, "integer of at least 1"),
    ("stages_per_rank", -1, "integer of at least 1"),
    ("ahead", 1.5, "integer of at least 1"),
    ("seed", "a", "integer"),
    ("seed", None, "integer"),
    ("timeout", -1, "a positive number of seconds"),
    ("timeout", "1", "a positive number of seconds"),
    ("timeout", float("nan"), "a positive number of seconds"),
    ("master_weights", "yes", "True or False"),
    ("capture", 1, "True or False"),
    ("schedule", 1, "a schedule name, a Program, or a CSV file"),
    ("transport", None, ""),
    ("device", "gpu", "a PyTorch device"),
    ("device", 1.5, "a PyTorch device"),
]


@pytest.mark.features("capture", "precision")
@pytest.mark.parametrize(("name", "value", "expected"), WRONG)
def test_an_argument_of_the_wrong_kind_is_refused_by_its_name(name: str, value: Any, expected: str) -> None:
    with pytest.raises(DrumlineError) as caught:
        made(**{name: value})
    assert caught.value.error.startswith(f"{name} is {value!r}")
    assert expected in caught.value.expected


def test_the_page_of_arguments_has_all_of_them() -> None:
    page = (Path(__file__).parents[2] / "docs" / "pipeline.md").read_text()
    rows = "".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| `"))
    assert all(some(f"`{field.name}" in rows for field in fields(Options)))


def test_a_device_that_is_not_there_is_refused() -> None:
    with refused(DrumlineError, "device is 'cuda', but PyTorch finds no such device", expected="cpu"):
        made(device="cuda")


def test_a_compiled_model_is_refused_with_the_mend() -> None:
    model = torch.compile(nn.Linear(2, 2), backend="eager")
    with refused(DrumlineError, "compiled by torch.compile", fix="compile=True"):
        Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(("max_norm", "norm_type"), [(-1.0, 2.0), ("1", 2.0), (1.0, "l2"), (1.0, 0)])
def test_a_norm_that_is_none_is_refused(max_norm: Any, norm_type: Any) -> None:
    pipe = made()
    pipe.step(torch.ones(4, 2), target=torch.ones(4, 2))
    with refused(DrumlineError, r"(max_norm|norm_type) is "):
        pipe.clip_grad_norm_(max_norm, norm_type)
