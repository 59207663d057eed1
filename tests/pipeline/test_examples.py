"""Hugging Face models without an example: traced with a guessed example, or refused with a fix."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.pipeline.pipeline import Pipeline
from hf_matrix import apart, material, plain
from matrices import long
from refused import refused

pytestmark = pytest.mark.torch


@long
@pytest.mark.parametrize("name", ["convnext", "pegasus", "whisper"])
def test_a_model_is_followed_without_an_example(name: str) -> None:
    model, batch, _ = material(name, own=True)
    loss, wanted = plain(material(name, own=True)[0], batch, None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipe = Pipeline(model, num_ranks=2, num_microbatches=4, balance="even")
        found = pipe.step(**batch).loss
    assert found is not None
    assert abs(float(found) - loss) < 1e-5 * loss
    far, where = apart({path: param.grad for path, param in pipe.named_parameters()}, wanted)
    assert far < 1e-4, where


def test_a_model_for_which_no_guess_works_says_to_pass_an_example() -> None:
    class Config:
        is_encoder_decoder = False

    class Picky(nn.Module):
        config = Config()
        dummy_inputs = {"input_ids": torch.ones(2, 3, dtype=torch.long)}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, table: Tensor) -> Tensor:
            made: Tensor = self.layer(table)
            return made

    with refused(ModelError, "no example of the inputs of Picky, and its forward", fix="pass example=, a batch"):
        Pipeline(Picky(), num_ranks=1, num_microbatches=1)
