"""The built-in decoder: parameters as the planner counts them, packed documents apart, cut by any schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import drumline as dl
from drumline.core.errors import ConfigError, DrumlineError, ModelError
from drumline.model.blocks.pieces import pieces_of
from drumline.model.follow.inputs import Inputs
from drumline.plan.cluster.models import model as named_model
from drumline.plan.cluster.transformer import Transformer
from drumline.train.config.settings import BatchSettings, ModelSettings, RunSettings, TrainSettings
from drumline.train.models.build import build_model, count_parameters, next_token_loss
from drumline.train.models.gpt import GPT, GPTSizes
from refused import refused, saying
from some import some

OLD = GPTSizes(num_layers=4, hidden=16, num_heads=2, vocabulary=31, sequence=12, tied=True)
NEW = replace(
    OLD, num_heads=4, num_key_value_heads=2, head_width=6, feedforward=20, gated=True, tied=False,
    learned_positions=False, biased=False, qk_norm=True, qkv_bias=True,
)  # fmt: skip
LENGTHS = ((5, 7), (12,), (1, 3, 8), (4, 4, 2, 2))


def packed_rows() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(31, (len(LENGTHS), 12), generator=generator)
    target = torch.randint(31, (len(LENGTHS), 12), generator=generator)
    target[1, 3:6] = -100
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in LENGTHS])
    return tokens, target, ids


def made(sizes: GPTSizes) -> GPT:
    torch.manual_seed(1)
    return GPT(sizes)


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: param.grad.clone() for name, param in model.named_parameters()}


def small(plan: Transformer) -> Transformer:
    """Return a plan's transformer with everything divided, heads and their ratios kept."""
    heads = 8
    return replace(
        plan, num_layers=3, hidden=64, num_heads=heads, vocabulary=301, sequence=32, head_width=0,
        num_key_value_heads=max(heads * plan.num_key_value_heads // plan.num_heads, 1),
        feedforward=64 * plan.feedforward // plan.hidden, num_dense_layers=0,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["gpt-1.7b", "gpt-175b", "mt-nlg-530b", "llama-3-8b", "llama-3-405b"])
def test_it_has_exactly_the_parameters_that_a_plan_counts(name: str) -> None:
    plan = small(named_model(name))
    names = "num_layers hidden num_heads vocabulary num_key_value_heads feedforward head_width gated tied biased"
    shared = [*names.split(), "learned_positions"]
    model = ModelSettings(**{text: getattr(plan, text) for text in shared})
    built = build_model(TrainSettings(model=model, batch=BatchSettings(sequence=plan.sequence)), device="meta")
    head = plan.head_parameters - (plan.hidden * plan.vocabulary if plan.tied else 0)
    counted = plan.embedding_parameters + plan.num_layers * plan.dense_layer_parameters + head
    assert count_parameters(built.model) == counted


@pytest.mark.parametrize("sizes", [OLD, NEW], ids=["gpt", "llama"])
def test_packed_documents_have_the_gradients_of_documents_one_by_one(sizes: GPTSizes) -> None:
    tokens, target, ids = packed_rows()
    model, alone = made(sizes), made(sizes)
    torch.autograd.backward(next_token_loss(model(tokens, ids), target))
    counted = (target != -100).sum()
    for row, lengths in enumerate(LENGTHS):
        start = 0
        for length in lengths:
            piece = slice(start, start + length)
            loss = next_token_loss(alone(tokens[row : row + 1, piece]), target[row : row + 1, piece])
            torch.autograd.backward(loss * (target[row, piece] != -100).sum() / counted)
            start += length
    want = gradients(alone)
    for name, gradient in some(gradients(model).items()):
        assert torch.allclose(gradient, want[name], atol=1e-6, rtol=1e-4), name


def in_pipeline(schedule: str, ranks: int, batch: dict[str, Tensor], target: Tensor) -> dict[str, Tensor]:
    pipe = dl.Pipeline(
        made(NEW), loss_fn=next_token_loss, schedule=schedule, num_microbatches=4, num_ranks=ranks, balance="even",
        example=batch, transport="in-process", check_model=False,
    )  # fmt: skip
    pipe.step(**batch, target=target)
    return gradients(pipe)


@pytest.mark.features("check")
@pytest.mark.parametrize(("schedule", "ranks"), [("zb-h1", 4), ("zb-v", 2), ("dualpipe", 2)])
def test_every_kind_of_schedule_gives_its_gradients(schedule: str, ranks: int) -> None:
    tokens, target, ids = packed_rows()
    batch = {"tokens": tokens, "document_ids": ids}
    model = made(NEW)
    torch.autograd.backward(next_token_loss(model(**batch), target))
    found, want = in_pipeline(schedule, ranks, batch, target), gradients(model)
    assert found.keys() == want.keys()
    for name, tensor in found.items():
        assert torch.allclose(tensor, want[name], atol=1e-6, rtol=1e-4), name


@pytest.mark.parametrize("sizes", [OLD, NEW], ids=["gpt", "llama"])
def test_only_the_hidden_state_and_the_documents_numbers_travel_over_a_cut(sizes: GPTSizes) -> None:
    tokens, _, ids = packed_rows()
    value: Any = Inputs((), {"tokens": tokens, "document_ids": ids})
    blocks = pieces_of(made(sizes), value)
    for block in blocks[: len(blocks) // 2]:
        piece: Any = block.module
        value = piece.seal(piece(value))
    assert sorted(tuple(tensor.shape) for tensor in value.tensors) == [(4, 12), (4, 12, 16)]


def test_dropout_trains_and_is_off_in_evaluation() -> None:
    model = made(replace(NEW, dropout=0.5))
    tokens, _, ids = packed_rows()
    assert not torch.equal(model(tokens, ids), model(tokens, ids))
    model.eval()
    assert torch.equal(model(tokens, ids), model(tokens, ids))


def test_a_model_has_the_same_values_whole_and_in_stages() -> None:
    settings = TrainSettings(
        model=ModelSettings(num_layers=3, hidden=16, num_heads=2, tied=True), run=RunSettings(seed=5)
    )
    whole = build_model(settings).model.state_dict()
    built = build_model(settings, device="meta")
    batch = {"tokens": torch.zeros(2, 8, dtype=torch.long)}
    pipe = dl.Pipeline(
        built.model, loss_fn=built.loss_fn, num_microbatches=2, num_ranks=2, seed=5, example=batch, balance="even",
        transport="in-process",
    )  # fmt: skip
    for name, param in pipe.named_parameters():
        assert torch.equal(param, whole[name]), name
    assert 0 < whole["blocks.0.attention.out.weight"].std() < 0.02 / 2 < whole["head.weight"].std()


def test_what_it_cannot_be_is_refused() -> None:
    cases: list[tuple[dict[str, Any], type[DrumlineError], dict[str, str]]] = [
        (
            {"num_key_value_heads": 4},
            ConfigError,
            saying("num_key_value_heads is 4", expected="divides model.num_heads, 6"),
        ),
        ({"learned_positions": False, "head_width": 7}, ModelError, saying("heads are 7 wide")),
        ({"dropout": 1.0}, ConfigError, saying("model.dropout is 1.0")),
        ({"vocabulary": 200}, ModelError, saying("the tokenizer has 257 tokens, and the model 200")),
        ({"others": {"experts_num_experts": 8}}, ConfigError, saying("experts_num_experts is 8, which the built-in")),
        ({"num_layers": 0}, ConfigError, saying("model.num_layers is 0")),
    ]
    for changes, kind, said in cases:
        with refused(kind, **said):
            build_model(TrainSettings(model=ModelSettings(**changes)), device="meta")
    with refused(ModelError, "a row has 13 tokens, and the model has 12 learned positions"):
        made(OLD)(torch.zeros(1, 13, dtype=torch.long))
