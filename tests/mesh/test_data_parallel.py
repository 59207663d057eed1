"""Several lines of a pipeline train as one process does: data parallel, with divided state, with divided sequences."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import drumline as dl
from drumline.core.errors import DrumlineError, RankFailed
from drumline.train.models.gpt import GPT, GPTSizes
from matrices import ALL
from mesh.plain import STEPS, chain, furthest, loss_fn, trained, words
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.matrix]

DP = {"pp": 2, "dp": 2}
CASES: dict[str, tuple[dict[str, Any], int]] = {
    # name: what is given to Pipeline, and the number of steps
    "1f1b": ({"mesh": DP, "schedule": "1f1b"}, STEPS),
    "zb-v": ({"mesh": DP, "schedule": "zb-v"}, STEPS),
    "interleaved-zb": ({"mesh": DP, "schedule": "interleaved-zb"}, STEPS),
    "dualpipe-v": ({"mesh": DP, "schedule": "dualpipe-v"}, STEPS),
    "two copies": ({"mesh": DP, "schedule": "dualpipe"}, STEPS),
    "zero 1": ({"mesh": DP, "schedule": "1f1b", "zero": 1}, STEPS),
    "zero 1, zb-v": ({"mesh": DP, "schedule": "zb-v", "zero": 1}, STEPS),
    "zero 3": ({"mesh": DP, "schedule": "1f1b", "zero": 3}, STEPS),
    "zero 3, zb-v": ({"mesh": DP, "schedule": "zb-v", "zero": 3}, STEPS),
    "zero 3, dualpipe-v": ({"mesh": DP, "schedule": "dualpipe-v", "zero": 3}, STEPS),
    "by stage": ({"mesh": DP, "schedule": "interleaved-zb", "zero": {0: 3, 1: 1}}, STEPS),
    "no pipeline": ({"mesh": {"dp": 4}, "schedule": "1f1b"}, STEPS),
}
CONTEXT: dict[str, tuple[dict[str, Any], int]] = {
    "1f1b": ({"mesh": {"pp": 2, "cp": 2}, "schedule": "1f1b"}, STEPS),
    "zb-v": ({"mesh": {"pp": 2, "cp": 2}, "schedule": "zb-v"}, STEPS),
    "cp and dp": ({"mesh": {"dp": 2, "cp": 2}, "schedule": "1f1b", "zero": 1}, STEPS),
}
# `make matrices` runs all of them over 20 steps, other runs those that together have every part, over fewer.
if not ALL:
    KEPT = ("1f1b", "two copies", "zero 1", "zero 3", "by stage")
    CASES = {name: CASES[name] for name in KEPT}
    CONTEXT = {name: CONTEXT[name] for name in ("cp and dp",)}


def gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTSizes(num_layers=4 if ALL else 2, hidden=16, num_heads=2, vocabulary=11, sequence=8))


def _train(model: nn.Module, options: dict[str, Any], steps: int, **more: Any) -> dict[str, Any]:
    """Train on this rank's part of the batch; return what it saw and what it holds."""
    line = words(0)[0].chunk(options["mesh"].get("dp", 1))[0]  # with the shape of a step's, it is followed once
    example = {"example": line, "balance": "even"} if isinstance(model, GPT) else {}
    options = {"loss_fn": loss_fn, "num_microbatches": 4, "timeout": 120.0, **example, **options, **more}
    with dl.Pipeline(model, **options) as pipe:
        del model  # a rank keeps its own stages alone
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        seen = []
        for step in range(steps):
            number, count = pipe.axes.rows
            x, y = (word.chunk(count)[number] for word in words(step))
            loss = pipe.step(x, target=y).loss
            norm = pipe.clip_grad_norm_(1.0)
            if step == steps - 1:
                held = _held(pipe, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            assert loss is not None
            seen.append((loss.item(), norm.item()))
        text = pipe.program.format()
        evaluated = pipe.eval_step(x, target=y, outputs=False).loss
        assert evaluated is not None
        return {
            "seen": seen,
            "held": held,
            "program": text,
            "state": pipe.state_dict(),
            "evaluated": evaluated.item(),
            "rows": pipe.axes.rows,
        }


def _held(pipe: dl.Pipeline, optimizer: torch.optim.Optimizer) -> tuple[int, int]:
    """Return the bytes of parameters and gradients, and of the optimizer's state, that this rank holds."""
    modules = [param for stage in pipe._engine.stages() for param in stage.all_parameters]
    held = [tensor for parameter in [*modules, *pipe.parameters()] for tensor in (parameter, parameter.grad)]
    return _bytes(held), _bytes([value for state in optimizer.state.values() for value in state.values()])


def _bytes(tensors: list[Any]) -> int:
    storages = {value.untyped_storage().data_ptr(): value.untyped_storage() for value in tensors if value is not None}
    return sum(storage.nbytes() for storage in storages.values())


def _all_cases() -> dict[str, Any]:
    found = {f"chain, {name}": _train(chain(), *case) for name, case in CASES.items()}
    return found | {f"gpt, {name}": _train(gpt(), *case) for name, case in CONTEXT.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return dl.launch(_all_cases, num_ranks=4)


@pytest.mark.features("mesh")
@pytest.mark.parametrize("name", [*(f"chain, {name}" for name in CASES), *(f"gpt, {name}" for name in CONTEXT)])
def test_losses_and_norms_are_those_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    plain = trained(chain() if name.startswith("chain") else gpt())
    for rank in some(ranks):
        losses, norms = furthest(rank[name]["seen"], plain)
        assert losses < 1e-5
        assert norms < 1e-4
        assert rank[name]["seen"] == ranks[0][name]["seen"]
        assert rank[name]["evaluated"] == pytest.approx(ranks[0][name]["evaluated"], rel=1e-6)


def test_lines_end_with_the_parameters_of_one_process(ranks: list[dict[str, Any]]) -> None:
    model = chain()
    trained(model)
    for name in some(CASES):
        merged = {key: value for rank in ranks for key, value in rank[f"chain, {name}"]["state"].items()}
        assert merged.keys() == model.state_dict().keys()
        for key, value in model.state_dict().items():
            torch.testing.assert_close(merged[key], value, rtol=1e-4, atol=1e-5)


def test_divided_state_takes_the_bytes_that_its_formula_says(ranks: list[dict[str, Any]]) -> None:
    for rank in some(ranks):
        whole, zero1, zero3 = (rank[f"chain, {name}"]["held"] for name in ("1f1b", "zero 1", "zero 3"))
        assert zero1[0] == whole[0]
        assert zero1[1] == pytest.approx(whole[1] / 2, rel=0.05)
        assert zero3[0] == pytest.approx(whole[0] / 2, rel=0.05)
        assert zero3[1] == pytest.approx(whole[1] / 2, rel=0.05)


def test_exchanges_are_actions_of_the_program(ranks: list[dict[str, Any]]) -> None:
    plain, divided = (ranks[0][f"chain, {name}"]["program"] for name in ("1f1b", "zero 3"))
    assert [row.endswith(f"{at}REDUCE_GRAD") for at, row in enumerate(plain.splitlines())] == [True, True]
    assert all(f"{at}UNSHARD" in row and f"{at}RESHARD" in row for at, row in enumerate(divided.splitlines()))


def _refused() -> list[str]:
    rank = int(os.environ["RANK"])
    wrong: list[dict[str, Any]] = [
        {"mesh": {"pp": 2, "dp": 3}},
        {"mesh": {"pp": 2, "dp": 2} if rank else {"pp": 4}},
        {"mesh": {"pp": 4}, "zero": 1},
        {"mesh": DP, "zero": 3, "schedule": "dualpipe"},
        {"mesh": DP, "num_ranks": 4},
        {"mesh": DP, "zero": 3},
        {"mesh": {"pp": 2, "cp": 2}},
        {"mesh": DP, "zero": {5: 1}},
    ]
    return [*(_error(options) for options in wrong), _stepped(counts_rows=True), _stepped(counts_rows=False)]


class Counts(nn.Module):
    """Counts rows, which are others on each line, or calls, which are the same."""

    seen: torch.Tensor

    def __init__(self, *, rows: bool) -> None:
        super().__init__()
        self.rows = rows
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += x.sum() if self.rows else 1
        return x


def _stepped(*, counts_rows: bool) -> str:
    """Run two steps; after the second one, rank 3 leaves with an error of its own."""
    model = nn.Sequential(nn.Linear(4, 4), Counts(rows=counts_rows))
    options: dict[str, Any] = {"num_microbatches": 2, "mesh": {"dp": 4}, "timeout": 60.0}
    try:
        with dl.Pipeline(model, loss_fn=nn.functional.mse_loss, **options) as pipe:
            for step in range(3):
                x = torch.randn(2, 4) + pipe.axes.rank
                if step == 2 and pipe.axes.rank == 3:
                    raise ValueError("no more data")
                pipe.step(x, target=x)
                pipe.settle()
    except (DrumlineError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


def _error(options: dict[str, Any]) -> str:
    try:
        with dl.Pipeline(chain(), loss_fn=loss_fn, num_microbatches=4, timeout=60.0, **options) as pipe:
            pipe.optimizer(torch.optim.Adafactor)
    except DrumlineError as error:
        return f"{type(error).__name__}: {error}"
    return "accepted"


@pytest.mark.features("mesh")
def test_what_does_not_fit_is_refused_on_all_ranks() -> None:
    for rank, told in some(enumerate(dl.launch(_refused, num_ranks=4))):
        product, other, alone, copies, counts, matrices, positions, stages, buffers, left = told
        assert buffers.startswith("ModelError: a forward changes the buffer 1.seen, and rank 0 (pp 0, dp 0) and rank 1")
        gone = "RankFailed: rank 3 (pp 0, dp 3) failed at its own code: ValueError: no more data"
        assert left == ("ValueError: no more data" if rank == 3 else gone)
        assert "UsageError: zero names stage 5; expected stages from 0 to 1" in stages
        assert positions.startswith("ModelError: Sequential takes no position_ids or positions, and cp divides its")
        assert matrices.startswith("RunError: Adafactor may need whole matrices, and zero is 3")
        assert product.startswith("MismatchError: the mesh pp2 x dp3 has 6 ranks, and 4 were started")
        assert other.startswith("MismatchError: ranks 0 and 1 have different meshes: pp4 and pp2 x dp2")
        assert alone.startswith("UsageError: zero is 1, and the mesh has no dp")
        # A rank may hear of another's refusal before it comes to its own.
        assert "UsageError: zero is 3, and dualpipe holds each stage on two ranks of a line" in copies
        assert counts.startswith("MismatchError: num_ranks is 4; expected 2, the mesh's pp")


@pytest.mark.features("capture", "mesh")
def test_a_mesh_is_checked_before_anything_starts() -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"mesh": {"pp": 2, "data": 2}}, "the mesh has an axis 'data'"),
        ({"mesh": {"pp": 2, "dp": 0}}, "the mesh's axis dp is 0"),
        ({"mesh": 4}, "mesh is 4"),
        ({"mesh": {"pp": 2, "dp": 2}}, "all ranks are in this process"),
        ({"mesh": {"pp": 2, "dp": 2}, "capture": True}, "capture is True, and the mesh is pp2 x dp2"),
        ({"zero": 2}, "zero is 2"),
        ({"zero": True}, "zero is True"),
    ]
    for options, text in some(wrong):
        with refused(DrumlineError, text):
            dl.Pipeline(chain(), loss_fn=loss_fn, num_microbatches=4, **options)


def _dies() -> None:
    with dl.Pipeline(chain(), loss_fn=loss_fn, num_microbatches=4, mesh=DP, timeout=120.0) as pipe:
        for step in range(3):
            number, count = pipe.axes.rows
            x, y = (word.chunk(count)[number] for word in words(step))
            if step == 1 and pipe.axes.rank == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            pipe.step(x, target=y)
            pipe.settle()


@pytest.mark.features("mesh")
def test_a_rank_that_dies_ends_all_lines_and_is_named() -> None:
    with pytest.raises(RankFailed, match="rank 3"):
        dl.launch(_dies, num_ranks=4)
