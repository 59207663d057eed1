"""Hugging Face models, unmodified, materialised part by part: from their folders, or as transformers draws them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.core.errors import ModelError
from drumline.model.block import Block
from drumline.model.blocks.pieces import pieces_of
from drumline.model.follow.inputs import Inputs
from drumline.model.weights.files import Weights
from hf_models import MODELS, batch_for, tiny
from materials import assert_same, by_parts, values
from matrices import ALL
from refused import refused
from some import some
from torch_models import CPU, on_meta

pytestmark = [pytest.mark.torch, pytest.mark.matrix]

CASES: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in MODELS] + [
    ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    ("T5ForConditionalGeneration", {"tie_word_embeddings": False}),
    ("BertForMaskedLM", {"tie_word_embeddings": False}),
]
# Elsewhere than in `make matrices`: an encoder and a decoder that are tied, and experts.
KEPT = CASES if ALL else [("T5ForConditionalGeneration", {}), ("MixtralForCausalLM", {})]
each_model = pytest.mark.parametrize(("name", "changes"), KEPT)
some_models = pytest.mark.parametrize(("name", "changes"), KEPT if ALL else KEPT[1:])  # of what takes long


def cut(name: str, model: nn.Module) -> list[Block]:
    return pieces_of(model, Inputs((), batch_for(name, 4)), device=CPU)


@pytest.mark.parametrize(
    ("name", "changes", "safe"),
    [(*case, safe) for case in (KEPT if ALL else KEPT[1:]) for safe in (True, False)],
)
def test_each_rank_reads_its_own_part_of_a_folder(
    tmp_path: Path, name: str, changes: dict[str, Any], safe: bool
) -> None:
    make = partial(tiny, name, seed=3, **changes)
    whole: Any = make()
    if safe:
        whole.save_pretrained(tmp_path, max_shard_size="40KB")
        assert (tmp_path / "model.safetensors.index.json").exists()
    else:
        torch.save(whole.state_dict(), tmp_path / "pytorch_model.bin")
    assert_same(by_parts(make, partial(cut, name), 3, Weights(tmp_path)), values(whole))
    assert_same(values(dl.materialise(on_meta(make), tmp_path)), values(whole))


@some_models
def test_the_same_model_is_drawn_whatever_the_cut(name: str, changes: dict[str, Any]) -> None:
    make = partial(tiny, name, **changes)
    whole = dl.materialise(on_meta(make), seed=5)
    for num_ranks in (2, 5) if ALL else (3,):
        assert_same(by_parts(make, partial(cut, name), num_ranks, None, seed=5), values(whole))
    again = values(dl.materialise(on_meta(make), seed=6))
    assert any(not torch.equal(again[which], value) for which, value in values(whole).items())


@each_model
def test_values_are_distributed_as_transformers_draws_them(name: str, changes: dict[str, Any]) -> None:
    make: Callable[[], Any] = partial(tiny, name, **changes)
    expected, found = values(make()), values(dl.materialise(on_meta(make)))
    for which, tensor in some(expected.items()):
        mine = found[which]
        if not tensor.is_floating_point() or (tensor.numel() > 1 and tensor.std() == 0) or "inv_freq" in which:
            assert torch.equal(mine, tensor), which
        elif tensor.numel() > 500:
            assert 0.8 < (mine.std() / tensor.std()).item() < 1.25, which
            assert abs((mine.mean() - tensor.mean()).item()) < 0.2 * tensor.std().item(), which


def test_a_model_is_read_from_the_files_of_its_inner_model_and_the_other_way_round(tmp_path: Path) -> None:
    whole: Any = tiny("LlamaForCausalLM")
    whole.model.save_pretrained(tmp_path / "inner")
    whole.save_pretrained(tmp_path / "whole")
    make = partial(tiny, "LlamaForCausalLM", seed=1)
    with refused(ModelError, r"no tensor for the parameter lm_head\.weight", fix=r"fresh=\['lm_head\.weight'\]"):
        dl.materialise(on_meta(make), tmp_path / "inner")
    outer = dl.materialise(on_meta(make), Weights(tmp_path / "inner", fresh=["lm_head.*"]))
    assert torch.equal(outer.model.layers[2].mlp.up_proj.weight, whole.model.layers[2].mlp.up_proj.weight)
    assert torch.equal(outer.lm_head.weight, dl.materialise(on_meta(make)).lm_head.weight)
    inner = on_meta(lambda: type(whole.model)(whole.config))
    with refused(ModelError, r"no place for the tensor 'lm_head\.weight'"):
        dl.materialise(inner, tmp_path / "whole")
    assert_same(values(dl.materialise(inner, Weights(tmp_path / "whole", ignore=["lm_head.*"]))), values(whole.model))


def test_frequencies_in_older_files_are_left_out(tmp_path: Path) -> None:
    whole: Any = tiny("LlamaForCausalLM")
    state = {**whole.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    torch.save(state, tmp_path / "pytorch_model.bin")
    assert_same(values(dl.materialise(on_meta(partial(tiny, "LlamaForCausalLM")), tmp_path)), values(whole))
