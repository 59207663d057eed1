"""`schedule="auto"` with few microbatches: all ranks take up slices together, with the gradients of one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import BatchError, ModelError
from drumline.features.adapt import auto_schedule, auto_slices
from extras import needed
from matrices import mainly
from refused import refused

transformers: Any = needed("transformers", extra="hf")

pytestmark = [pytest.mark.torch, pytest.mark.features("slices", "adapt")]

WORDS, WIDTH, LENGTH, ROWS = 32, 16, 16, 4
Mix = Callable[[Tensor], Tensor]
ALWAYS, NEVER = -1e9, 2.0  # gains with which slices stay, and with which none do


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let slices count as a gain, whatever this machine measures."""
    monkeypatch.setattr(auto_schedule, "_SECONDS", 0.1)
    monkeypatch.setattr(auto_slices, "LEAST_GAIN", ALWAYS)


def keep_slices() -> None:
    """Do the same in a process of its own."""
    vars(auto_schedule)["_SECONDS"] = 0.1
    vars(auto_slices)["LEAST_GAIN"] = ALWAYS


class Layer(nn.Module):
    """A causal layer that may mix tokens in another way."""

    def __init__(self, mix: Mix | None = None) -> None:
        super().__init__()
        self.inwards, self.out, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mix

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.inwards(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(attended.transpose(1, 2).flatten(2))
        return h if self.mix is None else h + self.mix(h)


class Model(nn.Module):
    """A causal model with learned positions, whose second layer may mix tokens; it may ignore positions."""

    def __init__(self, mix: Mix | None = None, *, ignores: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer(mix)])
        self.head, self.ignores = nn.Linear(WIDTH, WORDS), ignores

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device) if self.ignores else positions
        h = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            h = layer(h)
        output: Tensor = self.head(h)
        return output


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(output.flatten(0, 1), target.flatten())


def first_alone(output: Tensor, target: Tensor) -> Tensor:
    """Return a loss whose first token counts as much as all others."""
    each = functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
    return (each[:, 0] + each[:, 1:].mean(1)).mean()


def by_rows(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean of two microbatches with as many rows, however many labels count in each."""
    pairs = zip(output.chunk(2), target.chunk(2), strict=True)
    return torch.stack([loss_fn(part, wanted) for part, wanted in pairs]).mean()


def batch(number: int, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens after them; labels that do not count are spread unevenly."""
    text = torch.randint(3, WORDS, (ROWS, length + 1), generator=torch.Generator().manual_seed(number))
    target = text[:, 1:].clone()
    target[0, 2:7] = target[1, -4:] = -100
    return text[:, :-1], target


def called(number: int, length: int = LENGTH) -> dict[str, Tensor]:
    x, target = batch(number, length)
    return {"tokens": x, "positions": torch.arange(length).expand(ROWS, -1), "target": target}


def piped(model: nn.Module, **settings: Any) -> dl.Pipeline:
    example = {name: value for name, value in called(0).items() if name != "target"}
    how: dict[str, Any] = {"loss_fn": loss_fn, "num_microbatches": 2, "balance": "even", "stages_per_rank": 1}
    return dl.Pipeline(model, schedule="auto", example=example, **{**how, **settings})


def in_turns(model: nn.Module, **settings: Any) -> dl.Pipeline:
    return piped(model, num_ranks=2, transport="in-process", **settings)


def compare(pipe: dl.Pipeline, plain: nn.Module, number: int, length: int = LENGTH, loss: Any = loss_fn) -> None:
    """Run a step, and compare loss and gradients of this process's parameters with the model's own."""
    given = called(number, length)
    result = pipe.step(**given)
    target = given.pop("target")
    plain.zero_grad()
    wanted = loss(plain(**given), target)
    torch.autograd.backward(wanted)
    own = dict(plain.named_parameters())
    assert result.loss is not None
    assert result.loss.item() == pytest.approx(wanted.item(), rel=1e-10)
    for name, param in pipe.named_parameters():
        wanted_gradient = own[name].grad
        assert param.grad is not None
        assert wanted_gradient is not None
        assert torch.allclose(param.grad, wanted_gradient, rtol=1e-8, atol=1e-12), (number, name, pipe.program.name)
    pipe.zero_grad()


def steps(pipe: dl.Pipeline, plain: nn.Module, count: int, **how: Any) -> list[str]:
    """Run and compare so many steps; return the programs after each, without repetitions."""
    names = []
    for number in range(count):
        compare(pipe, plain, number, **how)
        names.append(pipe.program.name)
    return [name for at, name in enumerate(names) if not at or name != names[at - 1]]


@pytest.mark.parametrize("keeps", [True, False])
def test_gradients_are_exact_before_within_and_after_slices(
    keeps: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model().double()
    plain = copy.deepcopy(model)
    pipe = in_turns(model)
    names, numbers, checks = [], [], []
    for number in range(44):
        compare(pipe, plain, number)
        names.append(pipe.program.name)
        numbers.append(pipe.slices)
        checks.append(pipe.checked)
        if pipe.slices > 1 and not keeps:
            monkeypatch.setattr(auto_slices, "LEAST_GAIN", NEVER)
    assert 4 in numbers  # what is measured first
    first = numbers.index(4) + 1  # the first step in slices, which is checked
    assert checks[first] is not checks[first - 1]
    said, found = capsys.readouterr().err, pipe.searched_slices
    assert found is not None
    assert found.is_kept is keeps
    assert (pipe.slices > 1) is keeps
    assert (names[-1] == found.program.name) is keeps
    assert f"{found.program.name}: a measured step takes" in said
    assert ("; back to" in said.splitlines()[-1]) is not keeps
    evaluated = pipe.eval_step(**called(3))
    given = called(3)
    wanted = loss_fn(plain(given["tokens"], given["positions"]), given["target"])
    assert evaluated.loss is not None
    assert evaluated.loss.item() == pytest.approx(wanted.item(), rel=1e-10)


def test_sequences_that_do_not_divide_run_in_one_piece(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model().double()
    plain = copy.deepcopy(model)
    pipe = in_turns(model)
    steps(pipe, plain, 45)
    kept = pipe.program
    assert kept.num_slices > 1
    for length in (LENGTH - 1, LENGTH, LENGTH - 3, LENGTH):
        compare(pipe, plain, 1, length)
        assert pipe.timeline().program.num_slices == (kept.num_slices if length == LENGTH else 1)
        given = called(2, length)
        whole = plain(given["tokens"], given["positions"])
        output = pipe.eval_step(**given).output
        assert torch.allclose(output, whole, rtol=1e-8, atol=1e-12)
    assert pipe.program == kept
    assert capsys.readouterr().err.count("slices: a step runs whole sequences") == 1


def averaged(h: Tensor) -> Tensor:
    return h.mean(1, keepdim=True)


def summed(h: Tensor) -> Tensor:
    return h.cumsum(1) * 0.1


def attended(h: Tensor) -> Tensor:
    return (h @ h.mT).tril().relu() @ h


def fixed(h: Tensor) -> Tensor:
    return h * torch.ones(LENGTH, 1, dtype=h.dtype)


@pytest.mark.parametrize(
    ("model", "settings", "reason"),
    [
        ({"mix": averaged}, {}, "head compute something else in slices"),
        ({"mix": summed}, {}, "`cumsum` over a sequence"),
        ({"mix": attended}, {}, "head compute something else in slices"),
        ({"mix": fixed}, {}, "at non-singleton dimension 1"),
        ({"ignores": True}, {}, "compute something else in slices"),
        ({}, {"loss_fn": first_alone}, "the loss of slices: loss_fn averages over something"),
        ({}, {"loss_weight": len}, "the loss in 2 slices is"),
        ({}, {"arrange": True}, "slices have one order"),
    ],
)
def test_a_model_that_does_not_run_in_slices_trains_on_and_says_why(
    model: dict[str, Any], settings: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Model(**model).double()
    plain = copy.deepcopy(made)
    pipe = in_turns(made, **settings)
    loss = settings.get("loss_fn", by_rows if "loss_weight" in settings else loss_fn)
    names = steps(pipe, plain, 23, loss=loss)
    assert not any("slices" in name for name in names)
    said = [line for line in capsys.readouterr().err.splitlines() if "no slices of sequences" in line]
    assert len(said) == 1
    assert reason in said[0]
    assert pipe.searched_slices is None


def test_slices_that_the_user_asked_for_stay(capsys: pytest.CaptureFixture[str]) -> None:
    model = Model().double()
    plain = copy.deepcopy(model)
    pipe = in_turns(model, slices=4)
    names = steps(pipe, plain, 26)
    assert names[0] == "zb-h1 in 4 slices"
    assert all("in 4 slices" in name for name in names)
    assert pipe.searched is not None
    assert "no slices" not in capsys.readouterr().err
    with refused(ModelError, "takes no position_ids"):
        dl.Pipeline([nn.Linear(2, 2)], loss_fn=loss_fn, schedule="auto", num_microbatches=2, num_ranks=1, slices=2)


@pytest.mark.slow
def test_a_model_of_transformers_takes_up_slices_with_its_own_loss() -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": WIDTH, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, **sizes, max_position_embeddings=LENGTH, use_cache=False)
    model = transformers.LlamaForCausalLM(config).double()
    plain = copy.deepcopy(model)
    settings: dict[str, Any] = {"num_microbatches": 2, "balance": "parameters", "stages_per_rank": 1}
    pipe = dl.Pipeline(model, schedule="auto", num_ranks=2, transport="in-process", **settings)
    for number in range(32):
        x, labels = batch(number)[0], batch(number)[0].clone()
        labels[1, 3:9] = -100
        result = pipe.step(input_ids=x, labels=labels)
        plain.zero_grad()
        wanted = plain(input_ids=x, labels=labels).loss
        wanted.backward()
        own = dict(plain.named_parameters())
        assert result.loss is not None
        assert result.loss.item() == pytest.approx(wanted.item(), rel=1e-5)  # it computes in float32
        for name, param in pipe.named_parameters():
            gradient = own[name].grad
            assert param.grad is not None
            assert gradient is not None
            assert torch.allclose(param.grad, gradient, rtol=1e-4, atol=1e-7), (number, name)
        pipe.zero_grad()
    assert pipe.slices > 1
    packed = torch.arange(LENGTH).remainder(LENGTH // 2).expand(ROWS, -1)
    with refused(BatchError, "position_ids do not count up by one", fix="leave position_ids out"):
        pipe.step(input_ids=x, labels=labels, position_ids=packed)


def trained(mix: bool, mesh: dict[str, int] | None) -> tuple[list[str], int]:
    keep_slices()
    model = Model(averaged if mix else None).double()
    plain = copy.deepcopy(model)
    pipe = piped(model, mesh=mesh, timeout=120.0)
    names = steps(pipe, plain, 42)
    return names, pipe.slices


@pytest.mark.slow
@mainly("mix", False, True)
def test_ranks_of_their_own_take_up_slices_together(mix: bool) -> None:
    (names, slices), (others, same) = dl.launch(trained, mix, None, num_ranks=2)
    assert names == others
    assert slices == same
    assert (slices == 1) is mix
