"""What lines with parts of matrices, experts or sequences save, other meshes and one process go on from."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

import drumline as dl
from matrices import ALL, long
from mesh.small import MICROBATCHES, PLAN, batch, decoder, example, loss_fn
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix]

# Who saves, and the optimizer; the second kind looks at whole matrices.
SAVERS: dict[str, tuple[dict[str, Any], Any]] = {
    "tp2 x pp2": ({"mesh": {"pp": 2, "tp": 2}, "tensor_parallel": PLAN}, torch.optim.AdamW),
    "pp2 x ep2": ({"mesh": {"pp": 2, "ep": 2}, "schedule": "zb-v"}, torch.optim.AdamW),
    "pp2 x cp2": ({"mesh": {"pp": 2, "cp": 2}}, torch.optim.AdamW),
    "tp2 x pp2, whole matrices": ({"mesh": {"pp": 2, "tp": 2}, "tensor_parallel": PLAN}, torch.optim.Adafactor),
    "dp2 x ep2, zero 1": ({"mesh": {"dp": 2, "ep": 2}, "zero": 1}, torch.optim.AdamW),
    "dp2 x tp2, zero 3": ({"mesh": {"dp": 2, "tp": 2}, "tensor_parallel": PLAN, "zero": 3}, torch.optim.AdamW),
}
GOING_ON: dict[str, dict[str, Any]] = {
    "pp4": {"mesh": {"pp": 4}},
    "dp4": {"mesh": {"dp": 4}},
    "pp2 x dp2": {"mesh": {"pp": 2, "dp": 2}, "schedule": "zb-v"},
    "pp2 x dp2, zero 1": {"mesh": {"pp": 2, "dp": 2}, "zero": 1},
    "tp2 x pp2": {"mesh": {"pp": 2, "tp": 2}, "tensor_parallel": PLAN},
    "pp2 x ep2": {"mesh": {"pp": 2, "ep": 2}},
}
# `make matrices` tries all pairs, other runs a saver of each axis, each with another mesh that goes on.
PAIRS = {(name, other) for name in SAVERS for other in GOING_ON}
if not ALL:
    PAIRS = set(zip(list(SAVERS)[:3], list(GOING_ON)[:3], strict=True))
    SAVERS = {name: entry for name, entry in SAVERS.items() if name in dict(PAIRS)}


def _sums(state: dict[str, Any]) -> dict[str, str]:
    return {name: hashlib.sha256(entry.contiguous().numpy().tobytes()).hexdigest() for name, entry in state.items()}


def _run(options: dict[str, Any], kind: Any, folder: Path, *, saves: bool) -> dict[str, Any]:
    """Train two steps and save, or load and train another one; return losses, and sums of every tensor."""
    x = example(options.get("mesh", {}))
    given = {"loss_fn": loss_fn, "example": x, "balance": "even", "timeout": 120.0, "num_microbatches": MICROBATCHES}
    with dl.Pipeline(decoder(), **{**given, **options}) as pipe:
        optimizer = pipe.optimizer(kind, lr=0.01)
        first = 0
        if not saves:
            first = pipe.load(folder).step
            loaded = _sums(pipe.state_dict())
        losses = []
        for step in range(first, first + (2 if saves else 1)):
            number, lines = pipe.axes.rows
            every = [entry for line in batch("rows", step, 1) for entry in line]
            x, y = (torch.cat(each).chunk(lines)[number] for each in list(zip(*every, strict=True))[:2])
            loss = pipe.step(x, target=y).loss
            assert loss is not None
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if saves:
            pipe.save(folder, wait=True)
            loaded = _sums(pipe.state_dict())
        return {"losses": losses, "sums": loaded}


def going_on_from(name: str) -> list[str]:
    return [other for other in GOING_ON if (name, other) in PAIRS]


def _all(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (options, kind) in SAVERS.items():
        found[name] = _run(options, kind, folder / name, saves=True)
        for other in going_on_from(name):
            found[f"{name} to {other}"] = _run(GOING_ON[other], kind, folder / name, saves=False)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("resumed")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return dl.launch(_all, folder, num_ranks=4)


@long
@pytest.mark.parametrize("name", SAVERS)
def test_other_meshes_and_one_process_go_on(ranks: list[dict[str, Any]], folder: Path, name: str) -> None:
    saved = {key: total for rank in ranks for key, total in rank[name]["sums"].items()}
    assert saved.keys() == decoder().state_dict().keys()
    alone = _run({}, SAVERS[name][1], folder / name, saves=False)
    assert alone["sums"] == saved
    for other in some(going_on_from(name)):
        each = [rank[f"{name} to {other}"] for rank in ranks]
        assert {key: total for rank in each for key, total in rank["sums"].items()} == saved
        assert [rank["losses"] for rank in each] == [pytest.approx(alone["losses"], rel=1e-6)] * 4
