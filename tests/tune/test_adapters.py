"""Models with adapters by PEFT train as in a plain loop: a part of the matrix of tests/adapter_matrix.py."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import drumline as dl
from adapter_matrix import BASES, FAMILIES, KINDS, MICROBATCHES, adapted, batch_of, outcome, peft, plain_gradients
from hf_zoo import made
from matrices import matrix

pytestmark = pytest.mark.torch
SCHEDULES = ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v")
# What PEFT itself does not take: layers of another class than nn.Linear.
NOT_PEFTS = {("loha", "gpt2"), ("lokr", "gpt2")}


@matrix("kind, family, base, schedule", KINDS, FAMILIES, BASES, SCHEDULES, times=1, later=("qwen3", "phi3", "opt"))
def test_gradients_are_those_of_a_plain_loop(kind: str, family: str, base: str, schedule: str) -> None:
    told = outcome(kind, family, base, schedule)
    if (kind, family) in NOT_PEFTS:
        assert told.startswith("PEFT: TypeError")
    elif kind == "prefix tuning":
        assert "prefix tuning always passes a cache of keys" in told or told.startswith("PEFT")
    elif base == "plain":
        assert told == "equal"
    else:
        assert told.partition(":")[0] in ("equal", "close"), told


def test_dora_takes_its_norms_from_four_bits() -> None:
    assert outcome("dora", "llama", "nf4") == "equal"


def test_heads_that_are_tied_have_adapters_of_their_own() -> None:
    batch = batch_of("qwen2")
    base: Any = made("qwen2")
    assert base.lm_head.weight is base.model.embed_tokens.weight
    config = peft.LoraConfig(r=4, target_modules=["lm_head", "embed_tokens"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = peft.get_peft_model(base, config)
        expected = plain_gradients(copy.deepcopy(model), batch)
        pipeline_of(model, example=batch).step(**batch)
    ours = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    assert len(expected) == 4
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[name], grad) for name, grad in expected.items())


def pipeline_of(model: Any, **settings: Any) -> dl.Pipeline:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dl.Pipeline(
            model, num_ranks=2, num_microbatches=MICROBATCHES, transport="in-process", balance="parameters", **settings
        )


def test_an_adapter_that_is_switched_on_or_off_between_steps_is_noticed() -> None:
    batch = batch_of("llama")
    model: Any = adapted("two adapters", "llama")
    plain = copy.deepcopy(model)
    pipe = pipeline_of(model, example=batch)
    for names in (["default", "second"], ["second"], ["default"]):
        for tuned in (model, plain):
            tuned.base_model.set_adapter(names)
            tuned.zero_grad()
        pipe.step(**batch)
        for at in range(MICROBATCHES):
            part = {name: value.tensor_split(MICROBATCHES)[at] for name, value in batch.items()}
            torch.autograd.backward(plain(**part).loss / MICROBATCHES)
        expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        ours = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        assert ours.keys() == expected.keys()
        assert all(torch.equal(ours[name], grad) for name, grad in expected.items())
    with model.disable_adapter():
        loss = pipe.eval_step(**batch).loss
        assert loss is not None
        with torch.no_grad(), plain.disable_adapter():
            assert float(loss) == pytest.approx(float(plain(**batch).loss), rel=1e-6)


def test_a_state_has_the_names_of_peft_and_its_adapter_gives_equal_logits(tmp_path: Any) -> None:
    batch = batch_of("llama")
    model: Any = adapted("lora with a task", "llama")
    pipe = pipeline_of(model, example=batch)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.step(**batch)
    optimizer.step()
    assert pipe.state_dict().keys() == model.state_dict().keys()
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(made("llama"), tmp_path)
    ids = batch["input_ids"]
    with torch.no_grad():
        assert torch.equal(loaded.eval()(input_ids=ids).logits, model.eval()(input_ids=ids).logits)
