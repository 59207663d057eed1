"""The check of the first step with slices: whole sequences, which the model by itself runs, against its units."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.cli.main import main
from drumline.core.errors import ModelError
from drumline.verification.verify import verify
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("slices", "check")]

WORDS, WIDTH, LENGTH, ROWS = 32, 16, 16, 4
Mix = Callable[[Tensor], Tensor]


class Turn(torch.autograd.Function):
    """Every token gets what the one before it had, by an op that nobody looks for."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        turned_tokens: Tensor = torch.ops.aten.roll.default(h, [1], [1])
        return turned_tokens

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        back: Tensor = torch.ops.aten.roll.default(gradients[0], [-1], [1])
        return back


class Centred(torch.autograd.Function):
    """Its backward alone looks at all tokens."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] - gradients[0].mean(1, keepdim=True)


def turned(h: Tensor) -> Tensor:
    result: Tensor = Turn.apply(h)  # type: ignore[no-untyped-call]
    return result


def centred(h: Tensor) -> Tensor:
    result: Tensor = Centred.apply(h)  # type: ignore[no-untyped-call]
    return result


def attended(h: Tensor) -> Tensor:
    """Attention without a softmax, which is not scaled_dot_product_attention."""
    return (h @ h.mT).tril().relu() @ h


def averaged(h: Tensor) -> Tensor:
    return h - h.mean(1, keepdim=True)


class Layer(nn.Module):
    """A layer that may mix tokens; `limit` says how many it has memory for while gradients are wanted."""

    def __init__(self, mix: Mix | None = None, dropout: float = 0.0) -> None:
        super().__init__()
        self.inwards, self.out, self.mix = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), mix
        self.dropout, self.limit = nn.Dropout(dropout), LENGTH

    def forward(self, h: Tensor) -> Tensor:
        if h.shape[1] > self.limit and torch.is_grad_enabled():
            raise torch.OutOfMemoryError("no memory for so many tokens")
        q, k, v = self.inwards(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.dropout(self.out(seen.transpose(1, 2).flatten(2)))
        return h if self.mix is None else h + self.mix(h)


class Model(nn.Module):
    """A causal model of three layers, of which the second may mix tokens; it may ignore positions."""

    def __init__(self, mix: Mix | None = None, *, ignores: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer(mix, dropout), Layer()])
        self.head, self.ignores = nn.Linear(WIDTH, WORDS), ignores

    def forward(self, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        if self.ignores:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        h = self.tokens(tokens) + self.places(positions)
        for layer in self.layers:
            h = layer(h)
        return {"logits": self.head(h)}


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def summed(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten(), reduction="sum")


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens after them; labels that do not count are spread unevenly."""
    text = torch.randint(3, WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    target = text[:, 1:].clone()
    target[0, 2:7] = target[1, -4:] = -100
    return text[:, :-1], target


def piped(model: nn.Module, slices: Any = 4, **settings: Any) -> dl.Pipeline:
    x, _ = batch()
    example = {"tokens": x, "positions": torch.arange(LENGTH).expand(ROWS, -1)}
    how: dict[str, Any] = {
        "loss_fn": loss_fn, "num_microbatches": 2, "balance": "even", "record": False, "num_ranks": 2,
        "transport": "in-process",
    }  # fmt: skip
    return dl.Pipeline(model, slices=slices, example=example, **{**how, **settings})


def checked(pipe: dl.Pipeline) -> Any:
    x, target = batch()
    with pipe:
        assert pipe.step(tokens=x, target=target).loss is not None
        return pipe.checked


RIGHT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unequal slices": ({}, {"slices": (7, 6, 3), "schedule": "zb-h1"}),
    "recomputed dropout": ({"dropout": 0.3}, {"checkpoint": "full"}),
    "a sum": ({}, {"loss_fn": summed, "schedule": "gpipe", "num_microbatches": 1}),
    "bfloat16": ({}, {"precision": "bf16", "merge_weight_gradients": True, "schedule": "zb-h1"}),
}


@pytest.mark.parametrize("kind", RIGHT)
def test_what_slices_compute_as_whole_sequences_passes_in_full(kind: str) -> None:
    of_model, settings = RIGHT[kind]
    result = checked(piped(Model(**of_model), **settings))
    assert (result.wrong, result.unchecked) == ((), "")
    assert result.num_parameters == len(list(Model().parameters()))
    assert result.num_microbatches == settings.get("num_microbatches", 2)


def in_two_parts(output: Any, target: Tensor) -> Tensor:
    """A mean over labels, and one over all tokens: their shares differ where labels do not count."""
    logits: Tensor = output["logits"]
    return loss_fn(output, target) + 0.01 * logits.logsumexp(-1).square().mean()


def test_parts_of_a_loss_with_shares_of_their_own_are_right_and_compared_by_outputs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    x, target = batch()
    target[:, :6] = target[0] = -100
    whole = Model()
    wanted = in_two_parts(whole(x, torch.arange(LENGTH).expand(ROWS, -1)), target)
    torch.autograd.backward(wanted)
    with piped(Model(), loss_fn=in_two_parts) as pipe:
        loss = pipe.step(tokens=x, target=target).loss
        assert loss is not None
        assert loss.item() == pytest.approx(wanted.item(), rel=5e-6)
        found = dict(pipe.named_parameters())
        for name, param in some(list(whole.named_parameters())):
            torch.testing.assert_close(found[name].grad, param.grad, rtol=0.0, atol=5e-6)
        assert pipe.checked is not None
        assert (pipe.checked.wrong, pipe.checked.num_parameters, pipe.checked.num_tokens) == ((), 0, LENGTH)
    assert "parts of loss_fn have shares of their own" in capsys.readouterr().err


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a turn": ({"mix": turned}, "its forward differs from block 'layers.1' on"),
    "attention of its own": ({"mix": attended}, "its forward differs from block 'layers.1' on"),
    "a mean": ({"mix": averaged}, "its forward differs from block 'layers.1' on"),
    "a backward": ({"mix": centred}, "its backward differs from block 'layers.1' on"),
    "positions that are ignored": ({"ignores": True}, "its forward differs from block 'layers.0' on"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_slices_compute_otherwise_is_refused_where_it_begins(kind: str) -> None:
    settings, where = WRONG[kind]
    x, target = batch()
    for schedule in ("1f1b", "zb-h1"):
        with piped(Model(**settings), schedule=schedule) as pipe:
            for _ in range(2):  # nothing may be built on it
                with refused(ModelError, where, fix="use slices=1"):
                    pipe.step(tokens=x, target=target)


def test_a_loss_that_tokens_do_not_share_is_refused() -> None:
    """With so many rows as its weight, a short slice counts as much as a long one."""
    x, target = batch()
    with (
        piped(Model(), (10, 4, 2), loss_weight=len) as pipe,
        refused(ModelError, "its output is the same", fix="loss_weight="),
    ):
        pipe.step(tokens=x, target=target)


@pytest.mark.parametrize("ignores", [False, True])
def test_without_memory_for_whole_sequences_outputs_of_their_first_tokens_are_compared(
    ignores: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Model(ignores=ignores)
    x, target = batch()
    with piped(model) as pipe:
        for layer in some(model.layers):
            assert isinstance(layer, Layer)
            layer.limit = LENGTH // 2
        if ignores:
            with refused(ModelError, "its output is", fix="slices=1"):
                pipe.step(tokens=x, target=target)
            return
        assert pipe.step(tokens=x, target=target).loss is not None
        assert pipe.checked is not None
        assert (pipe.checked.num_parameters, pipe.checked.num_tokens) == (0, LENGTH)
        assert "by the outputs of each sequence's first 16 tokens alone" in capsys.readouterr().err


def test_later_steps_are_checked_too() -> None:
    model = Model()
    x, target = batch()
    with piped(model, check_model=2) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01)
        for _ in range(3):
            assert pipe.step(tokens=x, target=target).loss is not None
            optimizer.step()
            optimizer.zero_grad()
        assert pipe.checked is not None
        assert pipe.checked.step == 2
        layer = model.layers[1]
        assert isinstance(layer, Layer)
        layer.mix = averaged
        with refused(ModelError, "in step 3; its forward differs from block 'layers.1' on", fix="slices=1"):
            pipe.step(tokens=x, target=target)


def material(ignores: bool) -> Any:
    x, target = batch()
    return Model(ignores=ignores), loss_fn, {"tokens": x, "positions": torch.arange(LENGTH).expand(ROWS, -1)}, target


def test_verify_compares_slices_with_whole_sequences() -> None:
    settings: dict[str, Any] = {"num_microbatches": 2, "transport": "in-process", "num_steps": 1}
    result = verify("zb-h1", model=partial(material, ignores=False), slices=(7, 6, 3), **settings)
    assert result.passes
    assert 0 < result.gradient_difference < 5e-6
    assert (result.num_microbatches, result.num_slices) == (2, 3)
    wrong = verify("1f1b", model=partial(material, ignores=True), slices=4, **settings)
    assert not wrong.passes
    assert wrong.loss_difference > 1e-3


def test_verify_has_a_small_model_of_its_own_for_slices(capsys: pytest.CaptureFixture[str]) -> None:
    command = "verify 1f1b --microbatches 2 --slices 5,3 --dropout 0.1 --steps 1 --transport in-process --json"
    assert main(command.split()) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["microbatches"], found["slices"], found["passes"]) == (2, 2, True)
    assert main(["verify", "zb-v", "--slices", "2", "--mesh", "pp=2,cp=2"]) == 2
    assert "use slices=1" in capsys.readouterr().err


def _on_ranks() -> list[str]:
    x, target = batch()
    found = []
    for mix in (None, turned, centred):
        with piped(Model(mix), num_ranks=None, transport="auto", timeout=60.0) as pipe:
            own_x, own_target = (x if pipe.rank == 0 else None), (target if pipe.rank == 1 else None)
            try:
                assert pipe.step(tokens=own_x, target=own_target).loss is not None
                assert pipe.checked is not None
                found.append(f"{pipe.checked.wrong} {pipe.checked.unchecked}{pipe.checked.num_parameters}")
            except ModelError as error:
                found.append(str(error))
    return found


@pytest.mark.slow
def test_ranks_with_parts_of_the_batch_check_together() -> None:
    for fine, turn, backward in dl.launch(_on_ranks, num_ranks=2):
        assert fine == f"() {len(list(Model().parameters()))}"
        assert "its forward differs from block 'layers.1' on" in turn
        assert "its backward differs from block 'layers.1' on" in backward
