"""Hugging Face models in a pipeline: the losses, gradients and outputs of the unsplit model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drumline.core.errors import BatchError, ModelError
from drumline.engine.loss.own_loss import OwnWeight
from drumline.model.blocks.pieces import pieces_of
from drumline.model.follow.inputs import Inputs
from drumline.pipeline.pipeline import Pipeline
from hf_models import (
    MODELS,
    UNRUNNABLE,
    Batch,
    batch_for,
    families,
    losses_by_microbatch,
    takes_cache,
    text,
    tiny,
    tiny_family,
)
from matrices import ALL, long, matrix
from refused import refused, saying
from some import some

pytestmark = pytest.mark.torch

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1", "zb-v", "dualpipe")
ROWS = 8


def trained(pipe: Pipeline, batch: Batch) -> Tensor:
    loss = pipe.step(**batch).loss
    assert loss is not None
    return loss


def weights_of(model: nn.Module, batch: Batch, num_microbatches: int) -> list[float]:
    """Return how many labels count in each microbatch, told from the model's kind and not by the code under test."""
    name = type(model).__name__
    shift = 1 if name.endswith(("ForCausalLM", "LMHeadModel")) else 0
    labels = [
        value[..., shift:] if value.dim() > 1 else value for value in batch["labels"].tensor_split(num_microbatches)
    ]
    return [float((label != -100).sum()) for label in labels]


def difference(mine: Tensor, wanted: Tensor, whole: float) -> float:
    """Return how far apart two gradients are, by the norm of the one.

    Some gradients are zero but for rounding (a key's bias cancels in the softmax): those count by the whole model's.
    """
    return float((mine - wanted).norm() / max(float(wanted.norm()), 1e-4 * whole))


# What these three show, others here and in test_loading_hf show in less time.
LATER = ("Qwen2ForCausalLM", "BertForSequenceClassification", "T5ForConditionalGeneration")


@matrix("name, schedule, num_ranks", MODELS, SCHEDULES, (2, 4), times=1, later=LATER)
def test_three_steps_like_the_unsplit_model(name: str, schedule: str, num_ranks: int) -> None:
    model = tiny(name)
    reference = copy.deepcopy(model)
    num_microbatches = 8 if schedule == "dualpipe" and num_ranks == 4 else 4
    pipe = Pipeline(
        model,
        schedule=schedule,
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        example=batch_for(name, ROWS),
        balance="even",
    )
    weights = dict(reference.named_parameters(remove_duplicate=False))
    exact = schedule != "dualpipe" and len(set(map(id, weights.values()))) == len(weights)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.05, momentum=0.9)
    own = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for step in range(3):
        batch = batch_for(name, ROWS, seed=step)
        loss = trained(pipe, batch)
        losses = losses_by_microbatch(
            reference, batch, num_microbatches, weights_of(reference, batch, num_microbatches)
        )
        wanted = {path: param.grad for path, param in reference.named_parameters(remove_duplicate=False)}
        whole = float(torch.stack([tensor.norm() for tensor in wanted.values() if tensor is not None]).norm())
        assert torch.equal(loss, sum(losses[1:], losses[0])) or not exact
        assert abs(float(loss) - float(sum(losses))) <= 1e-6 * abs(float(loss))
        seen = set()
        for path, param in pipe.named_parameters():
            expected = wanted[path]
            assert param.grad is not None, path
            assert expected is not None, path
            assert torch.equal(param.grad, expected) or not exact, path
            assert difference(param.grad, expected, whole) <= 1e-6, path
            seen.add(path)
        assert seen == {path for path, _ in reference.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
        own.step()
        own.zero_grad()
        # Where sums have another order the two drift apart by rounding: gradients are compared at the same weights.
        with torch.no_grad():
            for path, param in pipe.named_parameters():
                assert torch.equal(param, weights[path]) or not exact, path
                weights[path].copy_(param)


# All of them take minutes: `make matrices` runs all, every other test run some. One that goes through its tokens one by
# one is not among these: it takes longer than all the others.
FAMILIES = [name for name in families() if name not in UNRUNNABLE][:: 1 if ALL else 8]
FAMILIES = [name for name in FAMILIES if ALL or name != "kimi_linear"]


@pytest.mark.matrix
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_with_a_pipeline_plan_runs_piece_by_piece(family: str) -> None:
    model = tiny_family(family)
    batch = text(4)
    extra = {"use_cache": False} if takes_cache(model) else {}
    torch.manual_seed(1)
    wanted = model(**batch, **extra)
    blocks = pieces_of(model, Inputs((), batch))
    assert len(blocks) > 3
    value: Any = Inputs((), batch)
    torch.manual_seed(1)
    for block in blocks:
        piece: Any = block.module
        value = piece.seal(piece(value))
    assert torch.equal(value.logits, wanted.logits)
    assert torch.equal(value.loss, wanted.loss)
    named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    trained = [param for _, param in named]
    mine = torch.autograd.grad(value.loss, trained, allow_unused=True)
    theirs = torch.autograd.grad(wanted.loss, trained, allow_unused=True)
    for (path, _), tensor, other in some(zip(named, mine, theirs, strict=True)):
        assert (tensor is None) == (other is None), path
        assert tensor is None or torch.equal(tensor, other), path
    covered = {id(param) for block in blocks for param in block.module.parameters()}
    assert covered == {id(param) for param in model.parameters()}


def test_it_needs_no_example_and_the_numbers_are_the_same() -> None:
    model = tiny("LlamaForCausalLM")
    reference = copy.deepcopy(model)
    pipe = Pipeline(model, schedule="1f1b", num_ranks=2, num_microbatches=2)
    batch = text(4)
    loss = trained(pipe, batch)
    wanted = losses_by_microbatch(reference, batch, 2, weights_of(reference, batch, 2))
    assert torch.equal(loss, wanted[0] + wanted[1])


def test_the_loss_is_the_mean_over_all_tokens_that_count_as_in_one_call() -> None:
    model = tiny("LlamaForCausalLM")
    batch = text(6)
    batch["labels"][3:] = -100  # the second half has nothing to learn from
    batch["labels"][5, 4] = 7
    whole = model(**batch, use_cache=False).loss
    pipe = Pipeline(model, schedule="1f1b", num_ranks=2, num_microbatches=3, balance="even")
    assert torch.allclose(trained(pipe, batch), whole, rtol=1e-6)


def test_a_microbatch_without_a_label_that_counts_adds_nothing() -> None:
    model = tiny("LlamaForCausalLM")
    batch = text(4)
    batch["labels"][2:] = -100
    whole = model(**batch, use_cache=False).loss
    whole.backward()
    wanted = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad()
    pipe = Pipeline(model, schedule="zb-h1", num_ranks=2, num_microbatches=2, balance="even")
    assert torch.allclose(trained(pipe, batch), whole, rtol=1e-6)
    for name, param in pipe.named_parameters():
        assert param.grad is not None
        assert torch.allclose(param.grad, wanted[name], atol=1e-6), name


def test_evaluation_returns_the_models_own_output() -> None:
    model = tiny("BertForSequenceClassification")
    pipe = Pipeline(model, schedule="1f1b", num_ranks=2, num_microbatches=3, balance="even")
    batch = batch_for("BertForSequenceClassification", 7)
    result = pipe.eval_step(**batch)
    wanted = model.eval()(**batch)
    assert type(result.output) is type(wanted)
    assert torch.allclose(result.output.logits, wanted.logits, atol=1e-6)
    assert torch.allclose(result.output.loss, wanted.loss, rtol=1e-6)
    assert result.loss is not None
    assert torch.allclose(result.loss, wanted.loss, rtol=1e-6)
    without = pipe.eval_step(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    assert without.loss is None
    assert torch.allclose(without.output.logits, wanted.logits, atol=1e-6)


@long
def test_lengths_may_change_from_step_to_step() -> None:
    model = tiny("LlamaForCausalLM")
    reference = copy.deepcopy(model)
    pipe = Pipeline(model, schedule="1f1b", num_ranks=2, num_microbatches=2, balance="even")
    for length in (10, 7, 10, 13):
        batch = text(5, length)
        loss = trained(pipe, batch)
        losses = losses_by_microbatch(reference, batch, 2, weights_of(reference, batch, 2))
        assert torch.equal(loss, losses[0] + losses[1])
    wanted = dict(reference.named_parameters())
    for name, param in pipe.named_parameters():
        expected = wanted[name].grad
        assert param.grad is not None
        assert expected is not None
        assert torch.equal(param.grad, expected), name


@long
def test_dropout_does_not_depend_on_the_cut_or_the_schedule() -> None:
    def losses(schedule: str, num_ranks: int, checkpoint: str = "none") -> list[Tensor]:
        model = tiny("BertForMaskedLM", hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.2)
        pipe = Pipeline(
            model, schedule=schedule, num_ranks=num_ranks, num_microbatches=4, balance="even", checkpoint=checkpoint
        )
        return [trained(pipe, text(8)) for _ in range(2)]

    first = losses("1f1b", 1)
    assert first[0] != first[1]
    assert first == losses("1f1b", 4) == losses("zb-v", 2) == losses("zb-h1", 3, "full")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "ViTForImageClassification"])
def test_hidden_states_that_hooks_collect_are_the_models_own(name: str) -> None:
    model, batch = tiny(name).eval(), {**batch_for(name, 4), "output_hidden_states": True}
    found = []
    for blocks in (None, pieces_of(model, Inputs((), batch))):
        value: Any = model(**batch) if blocks is None else Inputs((), batch)
        for block in blocks or ():
            value = block.module(value)
        model.zero_grad()
        torch.autograd.backward(sum(state.square().mean() for state in value.hidden_states))
        found.append({key: param.grad.clone() for key, param in model.named_parameters() if param.grad is not None})
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[0])


def test_a_loss_of_ones_own_takes_the_models_output() -> None:
    def loss_fn(output: Any, target: Tensor) -> Tensor:
        return nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())

    model = tiny("LlamaForCausalLM")
    batch = text(4)
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    pipe = Pipeline(model, loss_fn=loss_fn, schedule="1f1b", num_ranks=2, num_microbatches=2, balance="even")
    loss = pipe.step(**inputs, target=batch["input_ids"]).loss
    assert loss is not None
    assert torch.allclose(loss, loss_fn(model(**inputs), batch["input_ids"]), rtol=1e-6)


def test_cuts_by_the_names_of_the_model() -> None:
    model = tiny("T5ForConditionalGeneration")
    pipe = Pipeline(model, schedule="1f1b", num_ranks=3, num_microbatches=2, cuts=["encoder.block.2", "decoder"])
    starts = [stage[0].name for stage in pipe._engine.assembly.cuts]
    assert starts == ["encoder.embed_tokens", "encoder.block.2", "decoder.embed_tokens"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"cuts": ["model.layer.3"]},
            saying("cuts names block 'model.layer.3', which the model does not have", fix="did you mean"),
        ),
        (
            {"cuts": ["model.layers.3", "model.layers.1"], "num_ranks": 3},
            saying("cuts names block 'model.layers.1' after"),
        ),
        ({"num_ranks": 12}, saying("the model has 9 blocks for 12 stages")),
        ({"balance": [3, 3]}, saying(r"balance is \[3, 3\]", expected="9 blocks")),
    ],
)
def test_cuts_that_cannot_be_are_refused(settings: dict[str, Any], words: dict[str, str]) -> None:
    with refused(ModelError, **words):
        Pipeline(tiny("LlamaForCausalLM"), num_microbatches=2, **{"num_ranks": 2, **settings})


def test_a_step_without_labels_or_loss_says_so() -> None:
    pipe = Pipeline(tiny("LlamaForCausalLM"), num_ranks=2, num_microbatches=2, balance="even")
    with refused(ModelError, "without a loss, and the pipeline has no loss_fn", fix="labels= to step"):
        pipe.step(input_ids=text(4)["input_ids"])


def test_a_step_without_anything_says_so() -> None:
    pipe = Pipeline(tiny("LlamaForCausalLM"), num_ranks=2, num_microbatches=2, balance="even")
    with refused(BatchError, "holds the first stage but got no batch"):
        pipe.step()


def test_a_loss_that_is_divided_by_a_count_of_the_users_is_the_whole_batchs() -> None:
    model = tiny("LlamaForCausalLM")
    batch = text(5)
    whole = model(**batch, num_items_in_batch=36, use_cache=False).loss
    pipe = Pipeline(model, num_ranks=2, num_microbatches=2, balance="even")
    loss = pipe.step(**batch, num_items_in_batch=36).loss
    assert loss is not None
    assert torch.allclose(loss, whole, rtol=1e-6)


def test_a_wrapper_around_a_model_is_weighed_like_the_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            return self.model(**inputs, use_cache=False).loss

    model = Wrapper(tiny("LlamaForCausalLM"))
    batch = text(5)
    batch["labels"][0, 2:] = -100
    whole = model(**batch)
    pipe = Pipeline(model, num_ranks=2, num_microbatches=2, balance="even", example=batch)
    assert torch.allclose(trained(pipe, batch), whole, rtol=1e-6)


def test_labels_are_counted_as_a_plain_models_loss_counts_them() -> None:
    labels = torch.tensor([[5, -100, 7], [-100, 6, -100]])
    inputs = Inputs((), {"input_ids": labels.clamp(min=3), "labels": labels})
    assert OwnWeight(tiny("LlamaForCausalLM"))(inputs) == 2
    assert OwnWeight(tiny("T5ForConditionalGeneration"))(inputs) == 3
    assert OwnWeight(tiny("BertForMaskedLM"))(inputs) == 3
