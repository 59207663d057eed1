"""Slices of sequences on two ranks, and on two lines with divided state: the gradients of one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from matrices import ALL
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.features("slices")]

WORDS, WIDTH, LENGTH, ROWS = 32, 16, 16, 4
Division = int | Sequence[int]
SCHEDULES = ("1f1b", "zb-h1", "gpipe") if ALL else ("1f1b", "zb-h1")
DIVISIONS: tuple[Division, ...] = (2, 4, 8, (7, 6, 3))


def loss_fn(output: Any, target: Tensor) -> Tensor:
    return functional.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and the tokens after them; labels that do not count are spread unevenly."""
    text = torch.randint(3, WORDS, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    target = text[:, 1:].clone()
    target[0, 2:7] = target[1, -4:] = -100
    return text[:, :-1], target


class Layer(nn.Module):
    """Attention and a product, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.inwards, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor) -> Tensor:
        q, k, v = self.inwards(h).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        output: Tensor = h + self.out(attended.transpose(1, 2).flatten(2))
        return output


class Small(nn.Module):
    """A causal model with learned positions that ranks make without another library."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: Tensor, positions: Tensor) -> dict[str, Tensor]:
        h = self.tokens(input_ids) + self.places(positions)
        for layer in self.layers:
            h = layer(h)
        return {"logits": self.head(h)}


def small() -> nn.Module:
    torch.manual_seed(0)
    return Small().double()


def piped(slices: Division, **settings: Any) -> dl.Pipeline:
    x, _ = batch()
    example = {"input_ids": x, "positions": torch.arange(LENGTH).expand(ROWS, -1)}
    how: dict[str, Any] = {"num_microbatches": 2, "balance": "even", "record": False, "timeout": 60.0}
    return dl.Pipeline(small(), loss_fn=loss_fn, slices=slices, example=example, **{**how, **settings})


Found = tuple[float, dict[str, Tensor]]


def _of_ranks(cases: Sequence[tuple[str, Division]]) -> list[Found]:
    x, target = batch()
    found: list[Found] = []
    for schedule, slices in cases:
        with piped(slices, schedule=schedule) as pipe:
            loss = pipe.step(input_ids=x, target=target).loss
            assert loss is not None
            own = {name: param.grad.clone() for name, param in pipe.named_parameters() if param.grad is not None}
            found.append((loss.item(), own))
    with piped(4, mesh={"pp": 1, "dp": 2}, zero=3) as pipe:
        number, count = pipe.axes.rows
        loss = pipe.step(input_ids=x.chunk(count)[number], target=target.chunk(count)[number]).loss
        assert loss is not None
        norm = pipe.clip_grad_norm_(1e9)
    return [*found, (loss.item(), {"norm": norm})]


def test_ranks_and_lines_give_the_gradients_of_one_process() -> None:
    model, (x, target) = small(), batch()
    loss = loss_fn(model(x, torch.arange(LENGTH).expand(ROWS, -1)), target)
    torch.autograd.backward(loss)
    wanted = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    cases = [(schedule, DIVISIONS[at]) for at, schedule in zip((1, 3), SCHEDULES, strict=False)]
    cases = [(schedule, slices) for schedule in SCHEDULES for slices in DIVISIONS] if ALL else cases
    ranks = dl.launch(_of_ranks, cases, num_ranks=2)
    for number, _ in enumerate(some(cases)):
        found = {name: gradient for rank in ranks for name, gradient in rank[number][1].items()}
        assert ranks[0][number][0] == pytest.approx(loss.item(), rel=1e-12)
        assert found.keys() == wanted.keys()
        for name, gradient in some(wanted.items()):
            torch.testing.assert_close(found[name], gradient, rtol=1e-10, atol=1e-12)
    norm = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    assert ranks[0][-1][0] == pytest.approx(loss.item(), rel=1e-12)
    torch.testing.assert_close(ranks[0][-1][1]["norm"].double(), norm, rtol=1e-10, atol=0.0)
