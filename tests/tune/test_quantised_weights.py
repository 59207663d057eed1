"""Quantised layers without a pipeline: on the meta device, from files, from initialisers; what is refused."""

from __future__ import annotations

import re
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from drumline.core.errors import DrumlineError, ModelError
from drumline.model.quantised.bases import Recipe, quantise, quantised_names, recipe_of
from drumline.model.quantised.packed import is_packed, num_bytes, parts_of
from drumline.model.quantised.state import flattened
from extras import needed
from quantised_models import BASES, are_equal, chain, emptied, plain_llama, settings
from refused import refused

pytestmark = pytest.mark.torch


WIDE = "model.layers.0.self_attn.o_proj.weight"


def on_meta(base: str) -> Any:
    with torch.device("meta"):
        return quantise(plain_llama(), base)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("weights")
    torch.save(plain_llama().state_dict(), path / "pytorch_model.bin")
    return path


@pytest.mark.parametrize("base", BASES)
def test_a_model_on_the_meta_device_gets_the_values_of_one_that_is_quantised_in_memory(base: str, folder: Path) -> None:
    model, expected = on_meta(base), quantise(plain_llama(), base)
    names = [name for name, param in model.named_parameters() if is_packed(param)]
    assert [name.removesuffix(".weight") for name in names] == quantised_names(plain_llama())
    assert len(names) == 21
    assert all(param.is_meta for param in model.parameters())
    sizes = [num_bytes(param) for param in model.parameters()]
    dl.materialise(model, folder)
    assert are_equal(model, expected)
    assert sizes == [num_bytes(param) for param in model.parameters()]


@pytest.mark.parametrize("base", BASES)
def test_a_packed_weight_counts_its_codes_and_scales(base: str) -> None:
    model = nn.Sequential(nn.Linear(128, 64, bias=False))
    layer = quantise(model, base).get_submodule("0")
    assert isinstance(layer, nn.Linear)
    codes = 128 * 64 // (2 if base == "nf4" else 1)
    # One scale a row and (int8) a zero point; 4 bits: 128 blocks of 64, one byte each, a float for them, two tables.
    rest = {"int8": 64 * 4 + 64, "float8": 64 * 4, "llm-int8": 64 * 4, "nf4": 128 + 4 + 4 + 16 * 4 + 256 * 4}[base]
    assert num_bytes(layer.weight) == codes + rest
    assert not layer.weight.requires_grad


@pytest.mark.parametrize("base", BASES)
def test_initialisers_draw_what_they_draw_for_the_plain_model(base: str) -> None:
    with torch.device("meta"):
        plain = plain_llama()
    model = on_meta(base)
    dl.materialise(plain, seed=3)
    dl.materialise(model, seed=3)
    assert are_equal(model, quantise(plain, base))


@pytest.mark.parametrize("base", BASES)
def test_files_that_are_quantised_already_are_read_as_they_are(base: str, tmp_path: Path) -> None:
    expected = quantise(plain_llama(), base)
    torch.save(flattened(expected.state_dict()), tmp_path / "pytorch_model.bin")
    assert are_equal(dl.materialise(on_meta(base), tmp_path), expected)


def test_one_weight_at_a_time_has_full_precision(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []
    most = 0
    pack = Recipe.pack

    def packed(recipe: Recipe, weight: Tensor) -> nn.Parameter:
        nonlocal most
        alive.append(weakref.ref(weight.untyped_storage()))
        most = max(most, sum(storage() is not None for storage in alive))
        return pack(recipe, weight)

    model = on_meta("int8")
    monkeypatch.setattr(Recipe, "pack", packed)
    dl.materialise(model, folder)
    assert len(alive) == 21
    assert most == 1


def test_a_configuration_of_torchao_is_a_base_too() -> None:
    torchao: Any = needed("torchao.quantization", "tune")
    config = torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32))
    weight = quantise(nn.Sequential(nn.Linear(64, 64)), config).get_parameter("0.weight")
    assert parts_of(weight)["scale"].shape == (64, 2)


def test_output_embeddings_tied_and_skipped_layers_stay_as_they_are() -> None:
    model = plain_llama()
    assert "lm_head" not in quantised_names(model)
    assert [name for name in quantised_names(model, ["*.mlp.*"]) if "mlp" in name] == []
    tied = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    tied[1].weight = tied[0].weight
    assert quantised_names(tied) == ["2"]


def refusal(error: type[DrumlineError], call: Any) -> str:
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    state = flattened(quantise(plain_llama(), "nf4").state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    torch.save({key: value for key, value in state.items() if key != name}, tmp_path / "part.bin")
    text = refusal(ModelError, lambda: dl.materialise(on_meta("nf4"), tmp_path / "part.bin"))
    assert text.startswith(f"the files have no {name!r}, a part of {name}")
    torch.save(plain_llama().state_dict() | {name: torch.ones(3, 3)}, tmp_path / "shape.bin")
    text = refusal(ModelError, lambda: dl.materialise(on_meta("nf4"), tmp_path / "shape.bin"))
    wide = {name: torch.cat([value, value], dim=-1) for name, value in plain_llama().state_dict().items()}
    torch.save(plain_llama().state_dict() | {WIDE: wide[WIDE]}, tmp_path / "wide.bin")
    with refused(ModelError, f"{WIDE}' has shape", expected="the shape of"):
        dl.materialise(on_meta("nf4"), tmp_path / "wide.bin")
    assert text == f"the tensor {name!r} has shape (3, 3); expected (128, 64), the shape of {name}"


class Strange(Tensor):
    """A class of tensors of which nobody knows the parts."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*(arg.as_subclass(Tensor) if isinstance(arg, Strange) else arg for arg in args), **(kwargs or {}))


def test_other_weights_are_refused_in_one_line() -> None:
    assert refusal(ModelError, lambda: recipe_of("nf5")).endswith("did you mean nf4?")
    assert refusal(ModelError, lambda: recipe_of(4)).startswith("base is a int; expected int8, float8, nf4, llm-int8")
    model = chain("int8")
    layer: Any = model.get_submodule("1.base")
    layer.weight = nn.Parameter(layer.weight, requires_grad=True)
    text = refusal(ModelError, lambda: dl.Pipeline(model, num_ranks=2, **settings("chain")))
    assert re.match(r"the parameter 1.base.weight is a Int8Tensor, a quantised weight, and trains; .*; freeze it", text)
    strange: Any = torch.zeros(64, 64).as_subclass(Strange)
    strange._is_param = True
    layer._parameters["weight"] = strange
    text = refusal(ModelError, lambda: dl.Pipeline(model, num_ranks=2, **settings("chain")))
    assert text.startswith("the parameter 1.base.weight is a ")
    assert "Strange, a class of tensors without parts" in text


@pytest.mark.features("mesh")
def test_lines_do_not_divide_quantised_weights() -> None:
    for options, words in (
        ({"zero": 3, "mesh": {"pp": 1, "dp": 2}}, "zero is 3; expected parameters that every line holds"),
        ({"mesh": {"pp": 1, "tp": 2}}, "the mesh is pp1 x tp2; expected layers that are not divided"),
    ):
        text = refusal(DrumlineError, lambda options=options: dl.Pipeline(chain("nf4"), **settings("chain"), **options))
        assert text.startswith(f"the model has quantised weights, and {words}")


def test_emptied_models_differ() -> None:
    assert not are_equal(emptied(chain("nf4")), chain("nf4"))


PLAIN = """
import sys
from torch import nn
import torch
import drumline as dl
pipe = dl.Pipeline(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), loss_fn=nn.functional.mse_loss, num_ranks=2,
                   num_microbatches=2, transport="in-process")
pipe.step(torch.ones(2, 2), target=torch.ones(2, 2))
found = {"torchao", "bitsandbytes", "peft", "transformers", "accelerate"} & set(sys.modules)
assert not found, found
"""


def test_a_plain_pipeline_imports_no_library_of_quantised_weights() -> None:
    subprocess.run([sys.executable, "-c", PLAIN], check=True, timeout=120)
