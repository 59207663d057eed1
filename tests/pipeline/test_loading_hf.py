"""Hugging Face models that nobody holds as a whole, trained from their folders."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.pipeline.pipeline import Pipeline
from hf_models import MODELS, batch_for, tiny
from hf_zoo import FAMILIES, made
from matrices import chosen, left, mainly, some_of
from some import some
from torch_models import on_meta

pytestmark = pytest.mark.torch

ROWS = 8


def stepped(name: str, model: nn.Module, schedule: str, folder: Path | None = None) -> dict[str, Any]:
    """Run one step of a pipeline; returns the loss and this process's gradients."""
    batch = batch_for(name, ROWS)
    with Pipeline(
        model, schedule=schedule, num_ranks=2, num_microbatches=4, example=batch, balance="even", weights=folder
    ) as pipe:
        loss = pipe.step(**batch).loss
        return {"loss": loss, **{path: param.grad for path, param in pipe.named_parameters()}}


NOT_TIED = ("LlamaForCausalLM", "MixtralForCausalLM", "ViTForImageClassification")


TIED = [name for name in MODELS if name not in NOT_TIED]
FOLDERS = [
    *((name, "1f1b") for name in some_of(TIED, ("T5ForConditionalGeneration", "GPT2LMHeadModel"))),
    *chosen(NOT_TIED, ("1f1b", "zb-v", "dualpipe"), times=1),
]
LATER = ("T5ForConditionalGeneration", "ViTForImageClassification")


@pytest.mark.matrix
@pytest.mark.parametrize(
    ("name", "schedule"),
    [*(pair for pair in FOLDERS if pair[0] not in LATER), *left(*(pair for pair in FOLDERS if pair[0] in LATER))],
)
def test_a_folder_trains_as_the_model_that_was_saved(tmp_path: Path, name: str, schedule: str) -> None:
    whole: Any = tiny(name, seed=3)
    whole.save_pretrained(tmp_path, max_shard_size="40KB")
    found = stepped(name, on_meta(partial(tiny, name)), schedule, tmp_path)
    wanted = stepped(name, copy.deepcopy(whole), schedule)
    assert set(found) == set(wanted)
    for path, value in wanted.items():
        assert torch.equal(found[path], value), path


@pytest.mark.parametrize("name", some_of(["llava", "clip"], ["llava"]))
def test_a_folder_of_a_model_that_draws_for_its_children_is_loaded(tmp_path: Path, name: str) -> None:
    """CLIP's tower computes numbers of its positions, which no file holds, and draws its children's weights again."""
    whole: Any = made(name)
    whole.save_pretrained(tmp_path)
    batch = FAMILIES[name].batch(ROWS) | dict(FAMILIES[name].extra)
    empty = on_meta(lambda: type(whole)(whole.config))
    with Pipeline(empty, num_ranks=2, num_microbatches=4, example=batch, balance="even", weights=tmp_path) as pipe:
        loaded = dict(pipe.named_parameters())
        for path, value in some(whole.named_parameters()):
            assert torch.equal(loaded[path], value), path


def one_rank(name: str, schedule: str, folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    """Build the model without memory, and take one step with this rank's part of it."""
    with torch.device("meta"):
        model = tiny(name)
    found = stepped(name, model, schedule, folder)
    return found, [path for path, param in model.named_parameters() if not param.is_meta]


@mainly(
    ("name", "schedule", "from_files"),
    ("MixtralForCausalLM", "zb-v", True),
    ("LlamaForCausalLM", "1f1b", True),
    ("LlamaForCausalLM", "dualpipe", False),
)
def test_ranks_of_their_own_read_their_own_layers_alone(
    tmp_path: Path, name: str, schedule: str, from_files: bool
) -> None:
    whole: Any = tiny(name, seed=3) if from_files else dl.materialise(on_meta(partial(tiny, name)))
    if from_files:
        whole.save_pretrained(tmp_path, max_shard_size="40KB")
    ranks = dl.launch(one_rank, name, schedule, tmp_path if from_files else None, num_ranks=2)
    wanted = stepped(name, whole, schedule)
    for found, held in ranks:
        assert set(held) == set(found) - {"loss"}, "what is another rank's got memory"
        for path, value in some(found.items()):
            assert torch.equal(value, wanted[path]), path
    assert set().union(*(found for found, _ in ranks)) == set(wanted)
    assert (len(ranks[0][1]) < len(wanted) - 1) == (schedule != "dualpipe")


class Layer(nn.Module):
    """A decoder layer of Llama as a block by hand: its parts under their own names, called with what Llama gives it."""

    def __init__(self, model: Any, layer: nn.Module) -> None:
        super().__init__()
        for name, part in layer.named_children():
            self.add_module(name, part)
        self.rotary_emb = model.model.rotary_emb
        self._init_weights = model._init_weights  # computes what no file holds: the frequencies
        self._layer = [layer]  # in a list: not a module of this one

    def forward(self, hidden: Tensor) -> Tensor:
        """Run the layer, causal, on positions counted from 0."""
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        made: Tensor = self._layer[0](hidden, position_embeddings=self.rotary_emb(hidden, positions))
        return made


def by_hand(model: Any) -> dict[str, nn.Module]:
    layers = {f"model.layers.{number}": Layer(model, layer) for number, layer in enumerate(model.model.layers)}
    ends = {"model.norm": model.model.norm, "lm_head": model.lm_head}
    return {"model.embed_tokens": model.model.embed_tokens, **layers, **ends}


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


@mainly("schedule", "zb-v", "1f1b", "dualpipe")
def test_a_llama_cut_by_hand_trains_from_its_folder(tmp_path: Path, schedule: str) -> None:
    whole: Any = tiny("LlamaForCausalLM", seed=3)
    whole.save_pretrained(tmp_path)
    ids = batch_for("LlamaForCausalLM", ROWS)["input_ids"]
    gradients = []
    for model, folder in ((on_meta(partial(tiny, "LlamaForCausalLM")), tmp_path), (whole, None)):
        pipe = Pipeline(
            by_hand(model), loss_fn=cross_entropy, schedule=schedule, num_ranks=2, num_microbatches=4, weights=folder
        )
        pipe.step(ids, target=ids)
        gradients.append({path: param.grad for path, param in pipe.named_parameters()})
    mine, wanted = gradients
    for path, tensor in some(wanted.items()):
        found = mine[path]
        assert tensor is not None
        assert found is not None
        assert torch.equal(found, tensor), path
    assert set(mine) == {path for path, _ in whole.named_parameters()}
