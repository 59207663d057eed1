"""What a loss counts, told from its own calls: against the plain model on the whole batch."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.engine.loss.own_loss import OwnWeight
from drumline.pipeline.pipeline import Pipeline
from matrices import long, matrix
from refused import refused, saying

pytestmark = pytest.mark.torch

ROWS, LENGTH, WORDS = 7, 6, 11
SCHEDULES = ("1f1b", "zb-h1", "zb-v")


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.head = nn.Linear(8, WORDS)

    def hidden(self, ids: Tensor) -> Tensor:
        x: Tensor = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def text(*, seed: int = 0) -> dict[str, Tensor]:
    """Return ids and labels of which other rows have other numbers that count; those of two rows have none."""
    ids = torch.randint(WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for row in range(ROWS):
        labels[row, : (row * 2) % (LENGTH + 1)] = -100
    labels[2:4] = -100
    return {"input_ids": ids, "labels": labels}


class Shifted(Body):
    """Shifts labels by hand."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.hidden(input_ids))
        loss = functional.cross_entropy(logits[:, :-1].reshape(-1, WORDS), labels[:, 1:].reshape(-1))
        return {"loss": loss, "logits": logits}


class Masked(Body):
    """Divides a sum by the number of labels that count."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.hidden(input_ids))
        each = functional.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
        mask = (labels != -100).float()
        return (each * mask).sum() / mask.sum().clamp(min=1.0)


class Criterion(Body):
    """Has its loss as a module, with weights of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.2, 2.0, WORDS), ignore_index=-100)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(self.hidden(input_ids))
        return self.criterion(logits.flatten(0, 1), labels.flatten()), logits


class Padded(Body):
    """Leaves out a word of its own."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.hidden(input_ids))
        target = labels.clamp(min=0).flatten()
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), target, ignore_index=0)}


class Summed(Body):
    """Adds up all words' losses."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.hidden(input_ids))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")}


class Two(Body):
    """Adds up a mean over words and one over rows."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(input_ids)
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss += 0.5 * functional.mse_loss(hidden[:, 0].sum(-1), torch.ones(len(hidden)))
        return {"loss": loss, "logits": logits}


class Decayed(Body):
    """Multiplies in place, and adds a penalty on its parameters."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.hidden(input_ids))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss *= 2.0
        return {"loss": loss + 0.1 * self.head.weight.square().sum()}


class Penalised(Body):
    """Adds a penalty on its parameters to a sum."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.hidden(input_ids))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": loss + 10 * self.head.weight.square().sum()}


class Divided(Body):
    """Is told by how much to divide."""

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> dict[str, Tensor]:
        logits = self.head(self.hidden(input_ids))
        total = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        return {"loss": total / num_items_in_batch}


class Contrastive(Body):
    """Compares every row with all others."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        tensor = self.hidden(input_ids).mean(1)
        logits = tensor @ self.head(tensor)[:, :8].t()
        return {"loss": functional.cross_entropy(logits, torch.arange(len(tensor)))}


class Focal(Body):
    """Has a loss that is no mean of anything."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.hidden(input_ids))
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": (1 - torch.exp(-loss)) ** 2 * loss}


class Balanced(Body):
    """Adds a penalty on what all rows do together, as mixtures of experts do."""

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.hidden(input_ids)
        logits = self.head(hidden)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        use = hidden.softmax(-1).flatten(0, 1).mean(0)
        return {"loss": loss + 0.1 * (use * use).sum()}


class Judged(nn.Linear):
    """A block that calls losses inside itself, row by row; a hook of it does too."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_forward_hook(lambda _, given, made: made + functional.mse_loss(made, given[0], reduction="none"))

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x)
        first = torch.zeros(made.shape[:2], dtype=torch.long)
        return made * functional.cross_entropy(made.transpose(1, 2), first, reduction="none")[..., None]


class JudgedTwo(Two):
    """Has parts with factors of their own, and blocks that call the same losses as these."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = Judged()


class Wrapper(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Tensor) -> Any:
        return self.model(**inputs)


def loss_of(output: Any) -> Tensor:
    found: Tensor = output["loss"] if isinstance(output, dict) else output[0] if isinstance(output, tuple) else output
    return found


def like_the_whole_batch(
    model: nn.Module, batch: dict[str, Any], schedule: str, wanted: Callable[[nn.Module], Tensor], **settings: Any
) -> None:
    """Train a step by a pipeline, and compare loss and gradients with the plain model's on the whole batch."""
    reference = copy.deepcopy(model)
    target = settings.pop("target", None)
    pipe = Pipeline(
        model, schedule=schedule, num_ranks=2, num_microbatches=4, balance="even", example=batch, **settings
    )
    for _ in range(2):  # the second step goes by what the first has seen
        pipe.zero_grad()
        loss = pipe.step(**batch, target=target).loss
    whole = wanted(reference)
    torch.autograd.backward(whole)
    assert loss is not None
    assert torch.allclose(loss, whole, rtol=1e-5), f"{float(loss)} and not {float(whole)}"
    mine = dict(pipe.named_parameters())
    for name, param in reference.named_parameters():
        grad = mine[name].grad
        assert (grad is None) == (param.grad is None), name
        if param.grad is not None and grad is not None:
            assert torch.allclose(grad, param.grad, rtol=1e-4, atol=1e-6), name


@matrix("schedule, kind", SCHEDULES, [Shifted, Masked, Criterion, Padded, Summed, Two, JudgedTwo, Decayed], times=1)
def test_a_models_own_loss_is_that_of_the_whole_batch(kind: type[Body], schedule: str) -> None:
    batch = text()
    like_the_whole_batch(kind(), batch, schedule, lambda model: loss_of(model(**batch)))


@pytest.mark.parametrize("kind", [Shifted, Two])
def test_a_wrapper_around_a_model_changes_nothing(kind: type[Body]) -> None:
    batch = text()
    like_the_whole_batch(Wrapper(kind()), batch, "1f1b", lambda model: loss_of(model(**batch)))


@pytest.mark.parametrize("count", [23, torch.tensor(23)])
def test_a_loss_that_is_divided_by_a_count_of_the_users(count: Any) -> None:
    batch = {**text(), "num_items_in_batch": count}
    like_the_whole_batch(Divided(), batch, "1f1b", lambda model: loss_of(model(**batch)))


def test_parts_of_a_loss_are_recomputed_with_the_same_factors() -> None:
    batch = text()
    like_the_whole_batch(Two(), batch, "zb-h1", lambda model: loss_of(model(**batch)), checkpoint="full")


@long
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch.compile's own
def test_parts_of_a_loss_have_their_factors_in_compiled_stages() -> None:
    batch = text()
    like_the_whole_batch(Two(), batch, "zb-h1", lambda model: loss_of(model(**batch)), compile="aot_eager")


def test_evaluation_weighs_alike() -> None:
    batch = text()
    model = Two()
    pipe = Pipeline(model, num_ranks=2, num_microbatches=4, balance="even", example=batch)
    loss = pipe.eval_step(**batch).loss
    assert loss is not None
    assert torch.allclose(loss, loss_of(model(**batch)), rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (
            Contrastive,
            saying("compares rows of the batch with each other, in", fix="num_microbatches=1; or, .* loss_weight="),
        ),
        (
            Focal,
            saying(
                "comes from mul, so Drumline cannot tell how much each microbatch contributes", fix="pass loss_weight="
            ),
        ),
    ],
)
def test_a_loss_that_cannot_be_weighed_is_refused_before_a_step(kind: type[Body], words: dict[str, str]) -> None:
    batch = text()
    pipe = Pipeline(kind(), num_ranks=2, num_microbatches=4, balance="even", example=batch)
    with refused(ModelError, **words):
        pipe.step(**batch)
    assert all(value.grad is None for value in pipe.parameters())


def test_a_loss_that_cannot_be_weighed_works_with_one_microbatch_or_a_weight() -> None:
    batch = text()
    for settings in ({"num_microbatches": 1}, {"num_microbatches": 4, "loss_weight": lambda inputs: 1.0}):
        pipe = Pipeline(Focal(), num_ranks=2, balance="even", example=batch, **settings)
        assert pipe.step(**text(seed=1) | {"labels": text()["input_ids"]}).loss is not None


def test_a_part_over_each_microbatch_by_itself_is_named() -> None:
    batch = text()
    model = Balanced()
    reference = copy.deepcopy(model)
    pipe = Pipeline(model, num_ranks=2, num_microbatches=4, balance="even", example=batch)
    with pytest.warns(UserWarning, match=r"a part of the model's loss, from .*, is neither a mean nor a sum over rows"):
        loss = pipe.step(**batch).loss
    parts = []
    for rows in torch.arange(ROWS).tensor_split(4):
        entry = {name: value[rows] for name, value in batch.items()}
        use = reference.hidden(entry["input_ids"]).softmax(-1).flatten(0, 1).mean(0)
        parts.append(0.1 * (use * use).sum() * len(rows) / ROWS)
    logits = reference.head(reference.hidden(batch["input_ids"]))
    whole = functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()) + sum(parts)
    assert loss is not None
    assert torch.allclose(loss, whole, rtol=1e-5)


def test_a_penalty_beside_a_sum_is_added_once() -> None:
    batch = text()
    with pytest.warns(UserWarning, match="a part of the model's loss, from a constant beside a sum, is neither"):
        like_the_whole_batch(Penalised(), batch, "1f1b", lambda model: loss_of(model(**batch)))


# ---- a loss_fn -------------------------------------------------------------------------------------------------------


class Logits(Body):
    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(input_ids)).transpose(1, 2)
        return logits


def by_hand(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.transpose(1, 2).flatten(0, 1), target.flatten())


def divided(output: Tensor, target: Tensor) -> Tensor:
    each = functional.cross_entropy(output, target.clamp(min=0), reduction="none")
    return (each * (target != -100)).sum() / (target != -100).sum()


@pytest.mark.parametrize(
    "loss_fn",
    [
        functional.cross_entropy,
        functools.partial(functional.cross_entropy, ignore_index=-100, label_smoothing=0.1),
        nn.CrossEntropyLoss(ignore_index=3),
        nn.CrossEntropyLoss(weight=torch.linspace(0.1, 1.0, WORDS)),
        nn.CrossEntropyLoss(reduction="sum"),
        by_hand,
        divided,
    ],
)
def test_targets_that_are_ignored_do_not_count(loss_fn: Callable[..., Tensor]) -> None:
    batch = text()
    target = batch["labels"].clamp(min=0) if getattr(loss_fn, "ignore_index", None) == 3 else batch["labels"]
    like_the_whole_batch(
        Logits(),
        {"input_ids": batch["input_ids"]},
        "zb-h1",
        lambda model: loss_fn(model(batch["input_ids"]), target),
        loss_fn=loss_fn,
        target=target,
    )


def test_a_plain_run_tells_what_a_loss_counts() -> None:
    batch = text()
    weight = OwnWeight(Logits(), by_hand)
    assert weight(batch["input_ids"], batch["labels"]) == int((batch["labels"] != -100).sum())
    assert OwnWeight(Logits(), functional.mse_loss)(batch["input_ids"], torch.zeros(ROWS, WORDS, LENGTH)) == ROWS


def test_a_loss_fn_that_cannot_be_looked_into_is_compared_and_warns_of_nothing() -> None:
    def odd(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target.clamp(min=0)).pow(1.0)

    batch = text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        like_the_whole_batch(
            Logits(),
            {"input_ids": batch["input_ids"]},
            "1f1b",
            lambda model: odd(model(batch["input_ids"]), batch["labels"]),
            loss_fn=odd,
            target=batch["labels"],
        )


def test_a_loss_fn_over_the_whole_batch_is_refused() -> None:
    def contrastive(output: Tensor, target: Tensor) -> Tensor:
        tensor = output.flatten(1)
        return functional.cross_entropy(tensor @ tensor.t(), torch.arange(len(tensor)))

    ids = text()["input_ids"]
    pipe = Pipeline(Logits(), loss_fn=contrastive, num_ranks=2, num_microbatches=4, balance="even", example=ids)
    with refused(ModelError, "but loss_fn of the full batch is", expected="compares rows with each other"):
        pipe.step(ids, target=ids)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_loss_fn_that_adds_up_different_counts_has_factors_for_each(schedule: str) -> None:
    def both(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output, target) + output.square().mean()

    batch = text()
    like_the_whole_batch(
        Logits(),
        {"input_ids": batch["input_ids"]},
        schedule,
        lambda model: both(model(batch["input_ids"]), batch["labels"]),
        loss_fn=both,
        target=batch["labels"],
    )


def test_after_the_first_step_a_loss_fn_is_called_once_a_microbatch_and_it_keeps_no_trace_of_more() -> None:
    calls = []

    def counted(output: Tensor, target: Tensor) -> Tensor:
        calls.append(output.shape)
        return functional.mse_loss(output, target)

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    pipe = Pipeline(model, loss_fn=counted, num_ranks=2, num_microbatches=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            pipe.step(torch.randn(8, 3), target=torch.randn(8, 3))
    assert len(calls) == 8
