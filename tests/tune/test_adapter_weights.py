"""Adapted models on the meta device: the base is read from its own files, adapters start as PEFT starts them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.core.errors import ModelError
from matrices import ALL
from refused import refused
from tune.llama import SIZES, peft, transformers

CONFIGS: dict[str, Any] = {
    "lora": peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], modules_to_save=["lm_head"]),
    "gaussian": peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="gaussian"),
    "dora": peft.LoraConfig(r=4, target_modules="all-linear", use_dora=True, task_type="CAUSAL_LM"),
    "ia3": peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "loha": peft.LoHaConfig(r=4, target_modules=["q_proj"]),
    "lokr": peft.LoKrConfig(r=4, target_modules=["q_proj"]),
}


def adapted(config: Any) -> Any:
    """Return the model on the meta device, as PEFT wraps it."""
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
        return peft.get_peft_model(model, config)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("inner", [False, True])
def test_an_adapted_model_starts_as_its_base(name: str, inner: bool, llama: Path) -> None:
    model = adapted(CONFIGS[name])
    model = dl.materialise(model.get_base_model() if inner else model, llama)
    tokens = torch.arange(12).reshape(2, 6)
    base = transformers.LlamaForCausalLM.from_pretrained(llama)
    difference = (model(input_ids=tokens).logits - base(input_ids=tokens).logits).detach().abs().max()
    assert float(difference) < 1e-6, "DoRA divides by the norm that it multiplies with"
    trained = {key: param for key, param in model.named_parameters() if param.requires_grad}
    assert trained
    assert not any(param.isnan().any() for param in trained.values())


def test_adapters_are_drawn_as_peft_draws_them(llama: Path) -> None:
    found = dl.materialise(adapted(CONFIGS["lora"]), llama, seed=1)
    other = dl.materialise(adapted(CONFIGS["lora"]), llama, seed=2)
    layer: Any = found.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    twin: Any = other.get_submodule("base_model.model.model.layers.0.self_attn.q_proj")
    assert not layer.lora_B["default"].weight.any()
    weight = layer.lora_A["default"].weight.detach()
    bound = SIZES["hidden_size"] ** -0.5  # of kaiming_uniform with a = sqrt(5)
    assert 0.9 * bound < float(weight.abs().max()) <= bound
    assert not torch.equal(weight, twin.lora_A["default"].weight), "seeds differ"
    gaussian = dl.materialise(adapted(CONFIGS["gaussian"]), llama)
    drawn = torch.cat([param.detach().flatten() for key, param in gaussian.named_parameters() if "lora_A" in key])
    assert float(drawn.std()) == pytest.approx(1 / 4, rel=0.1)


def test_any_cut_draws_the_same_adapters(llama: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], use_dora=True)
    whole = dl.materialise(adapted(config).get_base_model(), llama, seed=3)
    expected = dict(whole.named_parameters())
    for num_ranks in (2, 4) if ALL else (2,):
        options: dict[str, Any] = {"num_ranks": num_ranks, "transport": "in-process", "check_model": False}
        tokens = torch.arange(32).reshape(8, 4)
        with dl.Pipeline(
            adapted(config).get_base_model(), loss_fn=lambda output, target: output[0].float().mean(),
            num_microbatches=4, seed=3, weights=llama, example={"input_ids": tokens}, example_target=tokens,
            balance="parameters", **options,
        ) as pipe:  # fmt: skip
            found = dict(pipe.named_parameters())
            assert found.keys() == expected.keys()
            for name, param in found.items():
                assert torch.equal(param, expected[name]), name


def test_starting_values_that_need_the_whole_base_are_refused(llama: Path) -> None:
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=True)
    model = adapted(config)
    config.init_lora_weights = "pissa"
    with refused(ModelError, "init_lora_weights is 'pissa'", expected="gaussian"):
        dl.materialise(model, llama)


def test_a_kind_of_adapter_without_a_known_start_is_refused_by_name(llama: Path) -> None:
    with refused(ModelError, r"peft\.tuners\.hra.* has no initialiser that is known here", expected="LoRA, IA3"):
        dl.materialise(adapted(peft.HRAConfig(r=4, target_modules=["q_proj"])), llama)


def test_a_plain_model_is_read_as_before(llama: Path) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    found: nn.Module = dl.materialise(model, llama)
    base = transformers.LlamaForCausalLM.from_pretrained(llama)
    assert all(torch.equal(param, base.get_parameter(name)) for name, param in found.named_parameters())
