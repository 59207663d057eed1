"""LoRA of PEFT on a Llama by schedules that split backwards: B is whole, gradients have the bits of a plain loop."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from drumline.core.action import Op
from drumline.pipeline.pipeline import Pipeline
from drumline.plan.cluster.adapters import lora_parameters
from drumline.plan.cluster.transformer import Transformer
from drumline.schedules import generate
from extras import needed
from some import some

peft = needed("peft", "tune")
transformers = needed("transformers", "hf")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

SHAPE = {"num_key_value_heads": 2, "vocabulary": 64, "sequence": 16, "feedforward": 96, "gated": True}
LLAMA = Transformer("llama", 4, hidden=64, num_heads=4, **SHAPE)  # type: ignore[arg-type]
MICROBATCHES = 4


def tuned(rank: int, targets: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=LLAMA.hidden,
        intermediate_size=LLAMA.feedforward,
        num_hidden_layers=LLAMA.num_layers,
        num_attention_heads=LLAMA.num_heads,
        num_key_value_heads=LLAMA.num_key_value_heads,
        vocab_size=LLAMA.vocabulary,
        max_position_embeddings=LLAMA.sequence,
        use_cache=False,
    )
    adapters = peft.LoraConfig(r=rank, target_modules=targets, task_type="CAUSAL_LM", init_lora_weights=False)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), adapters)


def loss_of(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


def test_gradients_are_those_of_a_plain_loop_and_no_backward_is_split() -> None:
    model = tuned(1, ["q_proj", "v_proj", "down_proj"])
    plain = copy.deepcopy(model)
    tokens = torch.randint(0, LLAMA.vocabulary, (MICROBATCHES, LLAMA.sequence))
    for row in some(tokens.split(1)):
        (loss_of(plain(row), row) / MICROBATCHES).backward()
    wanted = gradients(plain)
    assert len(wanted) == 4 * 3 * 2
    split = generate("zb-h1", num_ranks=2, num_microbatches=MICROBATCHES)
    for schedule, is_split in (("zb-v", False), (split, True)):
        settings: dict[str, Any] = {"loss_fn": loss_of, "example": tokens, "balance": "even", "num_ranks": 2}
        pipe = Pipeline(model, schedule=schedule, num_microbatches=MICROBATCHES, transport="in-process", **settings)
        assert any(part.op is Op.BACKWARD_WEIGHT for part in pipe.program.work()) is is_split
        pipe.step(tokens, target=tokens)
        found = gradients(model)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in some(wanted))
        pipe.settle()
        model.zero_grad()


def test_the_planner_counts_the_parameters_that_peft_makes() -> None:
    for rank, targets in ((4, "all-linear"), (2, ["q_proj", "v_proj"]), (3, ["o_proj", "gate_proj", "k_proj"])):
        trained = sum(param.numel() for param in tuned(rank, targets).parameters() if param.requires_grad)
        assert lora_parameters(LLAMA, rank, targets) == trained
