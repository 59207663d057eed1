"""Every cell of the table in docs/meshes.md: what runs trains as one process does, the rest is refused for a reason."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import drumline as dl
from drumline.channel.lines.slices import put_together, slice_of
from drumline.core.errors import DrumlineError
from matrices import ALL, thinned
from mesh.cells import BEGIN, END, WAYS, WHATS, Cell, cells, table
from mesh.small import MICROBATCHES, PLAN, alone, batch, decoder, example, loss_fn
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix, pytest.mark.features("mesh")]

DOCS = Path(__file__).parents[2] / "docs" / "meshes.md"
CELLS = {cell.name: cell for cell in cells()}
# `make matrices` runs all of them, other runs some refusals and a diagonal through every third row in which every
# column occurs, without compiling, which takes longer than all the others together.
KEPT = [row for row, what in WHATS.items() if "compile" not in what.options][::3]
SHORT = {f"{row} x {column}".replace("`", "") for row, column in thinned([KEPT, list(WAYS)], 1)}
SHORT |= {
    "master_weights x zero=3",  # whose pieces have gradients of another type
    "model on the meta device, weights x ep",  # of which lines check experts that no rank has all of
}
RUNS = {name: cell for name, cell in CELLS.items() if not cell.refusal and (ALL or name in SHORT)}
REFUSED = {name: cell for name, cell in CELLS.items() if cell.refusal}
if not ALL:  # of those that are refused for the same reason, the first and the last
    ENDS = {cell.refusal: name for name, cell in REFUSED.items()} | {
        f"{cell.refusal}, first": name for name, cell in reversed(REFUSED.items())
    }
    REFUSED = {name: cell for name, cell in REFUSED.items() if name in ENDS.values()}


def pipeline(cell: Cell, weights: Path) -> dl.Pipeline:
    """Return the pipeline of a cell."""
    options = {
        "loss_fn": loss_fn,
        "num_microbatches": MICROBATCHES,
        "balance": "even",
        "timeout": 120.0,
        **cell.options,
    }
    x = example(cell.options["mesh"])
    options["example"] = {"x": x, "documents": x} if cell.what.given == "packed" else x
    if cell.options["mesh"].get("tp", 1) > 1:
        options["tensor_parallel"] = PLAN
    if cell.what.model.get("meta"):
        options["weights"] = weights
    return dl.Pipeline(decoder(**cell.what.model), **options)


def stepped(pipe: dl.Pipeline, cell: Cell, step: int) -> float:
    """Run a step on this line's microbatches; return its loss."""
    number, lines = pipe.axes.rows
    x, y, documents = zip(*batch(cell.what.given, step, lines)[number], strict=True)
    given: dict[str, Any] = {"program": "few"} if cell.what.given == "buckets" else {}
    if cell.what.given in ("lengths", "buckets"):
        loss = pipe.step(dl.Microbatches(x), target=dl.Microbatches(y), **given).loss
    elif documents[0] is not None:
        loss = pipe.step(torch.cat(x), documents=torch.cat(documents), target=torch.cat(y)).loss
    else:
        loss = pipe.step(torch.cat(x), target=torch.cat(y)).loss
    assert loss is not None
    return loss.item()


def gradients_of(pipe: dl.Pipeline) -> dict[str, Tensor]:
    """Return the whole gradients of this rank's parameters; all lines call it alike."""
    found = {}
    for name, param in pipe.named_parameters():
        if param.grad is not None:
            part = slice_of(param)
            found[name] = put_together(param.grad.detach().float(), part, pipe.axes).clone()
    return found


def trained(cell: Cell, weights: Path) -> dict[str, Any]:
    """Train two steps by a cell; return the losses, the first gradients and their norm, and the state in the end."""
    kind: Any = torch.optim.Adafactor if cell.what.after == "adafactor" else torch.optim.SGD
    with pipeline(cell, weights) as pipe:
        optimizer = pipe.optimizer(kind, lr=0.1)
        losses = [stepped(pipe, cell, 0)]
        gradients, norm = gradients_of(pipe), float(pipe.clip_grad_norm_(float("inf")))
        if cell.what.after != "another step":
            optimizer.step()
            optimizer.zero_grad()
        losses.append(stepped(pipe, cell, 1))
        optimizer.step()
        return {"losses": losses, "gradients": gradients, "norm": norm, "state": pipe.state_dict()}


def all_trained(names: list[str], weights: Path) -> dict[str, Any]:
    """Train by every cell; one that fails tells so, and the others run."""
    return {name: trained(CELLS[name], weights) for name in names}


def all_refused(names: list[str], weights: Path) -> dict[str, str]:
    """Return how every cell is refused before its first step."""
    return {name: refused(CELLS[name], weights) for name in names}


def refused(cell: Cell, weights: Path) -> str:
    try:
        with pipeline(cell, weights) as pipe:
            pipe.optimizer(torch.optim.Adafactor if cell.what.after == "adafactor" else torch.optim.SGD)
    except DrumlineError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    torch.save(decoder().state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.fixture(scope="module")
def ranks(weights: Path) -> list[dict[str, Any]]:
    return dl.launch(all_trained, list(RUNS), weights, num_ranks=4)


@pytest.fixture(scope="module")
def refusals(weights: Path) -> list[dict[str, str]]:
    return dl.launch(all_refused, list(REFUSED), weights, num_ranks=4)


@pytest.mark.features("capture", "lengths", "precision")
@pytest.mark.parametrize("name", RUNS)
def test_a_combination_trains_as_one_process_does(ranks: list[dict[str, Any]], name: str) -> None:
    cell = RUNS[name]
    mesh, near = cell.options["mesh"], cell.what.near
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about products in bf16 on some processors
        wanted = alone(cell.what, mesh.get("dp", 1) * mesh.get("ep", 1))
    for rank in some(ranks):
        assert rank[name]["losses"] == pytest.approx(wanted["losses"], rel=near)
        assert rank[name]["losses"] == ranks[0][name]["losses"]
        assert rank[name]["norm"] == pytest.approx(norm_of(wanted["gradients"]), rel=10 * near)
    for what in ("gradients", "state"):
        found = {key: value for rank in ranks for key, value in rank[name][what].items()}
        assert found.keys() == set(wanted[what])
        scale = norm_of(wanted["gradients"]) if what == "gradients" else 10 * changed(cell, wanted["state"])
        for key, value in some(found.items()):
            assert float((value.float() - wanted[what][key]).norm()) <= near * scale, (what, key)


def changed(cell: Cell, state: dict[str, Tensor]) -> float:
    """Return by how much the steps changed the parameters; of parameters in bf16, which hardly take it, their size."""
    if cell.what.model.get("low"):
        return norm_of(state)
    before = decoder(**{name: value for name, value in cell.what.model.items() if name != "meta"}).state_dict()
    return norm_of({name: tensor - before[name] for name, tensor in state.items()})


def norm_of(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([tensor.float().norm() for tensor in tensors.values()]).norm())


@pytest.mark.features("capture")
@pytest.mark.parametrize("name", REFUSED)
def test_a_combination_is_refused_before_its_first_step(refusals: list[dict[str, str]], name: str) -> None:
    for rank in some(refusals):
        assert REFUSED[name].refusal in rank[name]


@pytest.mark.features("capture")
def test_the_docs_have_the_table_that_is_tested() -> None:
    text = DOCS.read_text(encoding="utf-8")
    assert text.partition(BEGIN)[2].partition(END)[0].strip() == table()
    assert len(CELLS) > len(WAYS) * (len(WHATS) - 4)


if __name__ == "__main__":
    before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
    DOCS.write_text(f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
