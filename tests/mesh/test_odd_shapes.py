"""Lines divide parameters of any shape: one number, fewer elements than lines, elements that lie in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import drumline as dl
from matrices import long
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix]

SAVED, STEPS = 2, 3
MUON, MATRICES = "muon", ["first.weight", "last.weight"]
KINDS = {"adamw": torch.optim.AdamW, "adafactor": torch.optim.Adafactor}
RUNS = {("adamw", 1): (3,), ("adamw", 3): (0, 1), ("adafactor", 1): (0,)}  # zero, and that of runs which go on


class Odd(nn.Module):
    """Is traced, so that its first step is checked."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, (1, 3), padding=(0, 1))
        self.conv.weight = nn.Parameter(self.conv.weight.detach().to(memory_format=torch.channels_last))
        self.first = nn.Linear(20, 6)
        self.first.weight = nn.Parameter(torch.randn(20, 6).t() * 0.2)
        self.scale = Scaled()
        self.last = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.tanh(self.conv(x.unsqueeze(2))).flatten(1)
        found: Tensor = self.last(self.scale(self.first(made)))
        return found


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(0.7))
        self.single = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) * self.number + self.single


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd()


def batch(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    return torch.randn(8, 3, 5, generator=made), torch.randint(5, (8,), generator=made)


def _trained(kind: str, zero: int, folder: Path, *, start: int, steps: int) -> dict[str, Any]:
    options: dict[str, Any] = {"mesh": {"dp": 2}, "zero": zero, "num_microbatches": 2, "timeout": 60.0}
    loss_fn = nn.functional.cross_entropy
    with dl.Pipeline(odd(), loss_fn=loss_fn, example=batch(0)[0][:4], **options) as pipe:
        optimizer = pipe.optimizer(KINDS[kind], lr=0.05)
        if start:
            pipe.load(folder)
        losses = []
        for step in range(start, steps):
            if step == SAVED and not start:
                pipe.save(folder, wait=True)
            number, count = pipe.axes.rows
            x, y = (tensor.chunk(count)[number] for tensor in batch(step))
            loss = pipe.step(x, target=y).loss
            assert loss is not None
            losses.append(loss.item())
            pipe.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        return {"losses": losses, "state": pipe.state_dict()}


def _all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (kind, zero), others in RUNS.items():
        here = folder / f"{kind}-{zero}"
        found[f"{kind}, zero {zero}"] = _trained(kind, zero, here, start=0, steps=STEPS)
        for other in others:
            found[f"{kind}, zero {zero} to {other}"] = _trained(kind, other, here, start=SAVED, steps=STEPS)
    return {**found, MUON: [_by_muon(zero) for zero in (0, 1)]}


def _by_muon(zero: int) -> dict[str, Tensor]:
    """Update the matrices by an optimizer that refuses whatever has not two dimensions; return them all."""
    options: dict[str, Any] = {"mesh": {"dp": 2}, "zero": zero, "num_microbatches": 2, "timeout": 60.0}
    with dl.Pipeline(odd(), loss_fn=nn.functional.cross_entropy, example=batch(0)[0][:4], **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.Muon, names=MATRICES, lr=0.05)
        number, count = pipe.axes.rows
        for step in range(2):
            x, y = (tensor.chunk(count)[number] for tensor in batch(step))
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        return {name: entry for name, entry in pipe.state_dict().items() if name in MATRICES}


def _alone(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    model = odd()
    optimizer, losses = KINDS[kind](model.parameters(), lr=0.05), []
    for step in range(STEPS):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model.state_dict()


@long
def test_parameters_of_any_shape_are_divided_saved_and_loaded(tmp_path: Path) -> None:
    first, second = dl.launch(_all, tmp_path, num_ranks=2)
    for whole, divided in some([first.pop(MUON), second.pop(MUON)]):
        assert divided.keys() == set(MATRICES)
        torch.testing.assert_close(divided, whole, rtol=1e-5, atol=1e-6)
        assert not torch.equal(whole["last.weight"], odd().state_dict()["last.weight"])
    for name in some(first):
        losses, state = _alone(name.split(",")[0])
        assert first[name]["losses"] == second[name]["losses"]
        assert first[name]["losses"] == pytest.approx(losses[-len(first[name]["losses"]) :], rel=1e-5)
        merged = first[name]["state"] | second[name]["state"]
        assert merged.keys() == state.keys()
        torch.testing.assert_close(merged, state, rtol=1e-4, atol=1e-5)
