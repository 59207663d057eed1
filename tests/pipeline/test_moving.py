"""Layers move between ranks while they train: all goes on to the last bit, and who cannot move says so."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.channel import transfer
from drumline.core.errors import DrumlineError, MismatchError, ModelError, RankFailed, UsageError
from drumline.pipeline.pipeline import Pipeline
from host_recorder import HostRecorder
from matrices import long, mainly
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("moving")]

WIDTH, STEPS = 8, 6
HERE: dict[str, Any] = {"transport": "in-process", "num_ranks": 2}
Moves = dict[int, Any]  # before which step which cut is taken
BACK: Moves = {2: [3, 5], 3: [6, 2], 5: [4, 4]}


def linear(model: nn.Module, at: int) -> nn.Linear:
    found = model.get_submodule(f"{at}.0")
    assert isinstance(found, nn.Linear)
    return found


def chain(*, dropout: float = 0.2, tied: Sequence[int] = (), frozen: int = 0) -> nn.Sequential:
    """Return eight blocks with weights, running statistics and random numbers."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Dropout(dropout))
            for _ in range(8)
        )
    )
    for at in tied[1:]:
        linear(model, at).weight = linear(model, tied[0]).weight
    for block in list(model.children())[:frozen]:
        block.requires_grad_(False)
    return model


class Residual(nn.Module):
    """A model that is traced: values go round its blocks, and a parameter is used between them."""

    def __init__(self, uses: Sequence[int] = (0, 7)) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.uses = uses
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(8)])
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for at, layer in enumerate(self.layers):
            x = layer(x) + first * (self.scale if at in self.uses else 1.0) + self.shift
        return x


def batch(step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(step)
    return torch.randn(8, WIDTH, generator=random), torch.randn(8, WIDTH, generator=random)


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return functional.mse_loss(output.float(), target)


def made(model: nn.Module, **options: Any) -> Pipeline:
    settings: dict[str, Any] = {"loss_fn": loss_fn, "num_microbatches": 4, "balance": [4, 4], "timeout": 60.0}
    return Pipeline(model, **{**settings, **options})


def trained(
    make: Callable[[], nn.Module],
    moves: Moves,
    *,
    first: int = 0,
    steps: int = STEPS,
    folder: str = "",
    steps_per_update: int = 1,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train with AdamW and clipping, taking other cuts on the way; return all that came of it on this process.

    A later `first` step goes on from what an earlier run saved in the folder before it moved.
    """
    seen = []
    with made(make() if dtype is None else make().to(dtype), **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
        if first:
            pipe.load(folder)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 1.0 if folder else 0.9)
        for step in range(first, steps):
            if folder and not first and step in moves:
                pipe.save(folder, wait=True)
            if step in moves:
                pipe.repartition(balance=moves[step])
            x, y = batch(step)
            loss = pipe.step(x if dtype is None else x.to(dtype), target=y, share=1.0 / steps_per_update).loss
            assert loss is not None
            seen.append(loss.item())
            if step % steps_per_update == steps_per_update - 1:
                seen.append(pipe.clip_grad_norm_(0.5).item())
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        evaluated = pipe.eval_step(x if dtype is None else x.to(dtype), target=y, outputs=False).loss
        assert evaluated is not None
        return {
            "seen": [*seen, evaluated.item()],
            "model": {name: entry.clone() for name, entry in pipe.state_dict().items()},
            "masters": {name: tensor.detach().clone() for name, tensor in pipe.named_master_weights()},
            "optimizer": optimizer.state_dict(),
            "moves": pipe.moves,
            "blocks": pipe.blocks,
        }


def compare(row: Any, other: Any, where: str) -> int:
    """Demand equal bits; return how many tensors were compared."""
    if isinstance(row, Tensor):
        assert torch.equal(row, other), where
        return 1
    if isinstance(row, dict):
        assert row.keys() == other.keys(), where
        return sum(compare(value, other[key], f"{where} {key}") for key, value in row.items())
    if isinstance(row, list):
        assert len(row) == len(other), where
        return sum(compare(*pair, where) for pair in zip(row, other, strict=True))
    assert row == other, where
    return 0


CASES: dict[str, tuple[Callable[[], nn.Module], Moves, dict[str, Any]]] = {
    "dropout, statistics": (chain, BACK, {"schedule": "1f1b"}),
    "tied": (lambda: chain(tied=(0, 7)), BACK, {"schedule": "zb-h1"}),
    "float32 copies": (chain, BACK, {"dtype": torch.bfloat16, "master_weights": True}),
    "loss scale": (lambda: chain(dropout=0.0), BACK, {"precision": "fp16", "schedule": "gpipe"}),
    "gradients on the way": (chain, {1: [2, 6], 3: [5, 3], 5: [4, 4]}, {"steps_per_update": 2}),
    "four stages": (
        lambda: chain(tied=(0, 7)),
        {1: [1, 1, 3, 3], 3: [3, 1, 2, 2], 5: [2, 2, 2, 2]},
        {"schedule": "zb-v", "balance": "even"},
    ),
    "two copies": (lambda: chain_of_norms(), BACK, {"schedule": "dualpipe", "num_microbatches": 8, "balance": [4, 4]}),
    "traced": (Residual, BACK, {"example": batch(0)[0], "checkpoint": ["layers.3", "layers.4"]}),
    "frozen": (lambda: chain(frozen=2), {2: [1, 7], 3: [3, 5], 5: [4, 4]}, {"schedule": "zb-h1"}),
}


# Of tensors that several blocks use, gradients are added rank by rank: in another order once other ranks hold them.
OTHER_SUMS: dict[str, tuple[Callable[[], nn.Module], Moves, dict[str, Any]]] = {
    "tied": (lambda: chain(tied=(0, 3, 5, 7)), {2: [3, 5]}, {"schedule": "1f1b"}),
    "tied, to one rank": (lambda: chain(tied=(2, 5)), {2: [6, 2]}, {"schedule": "zb-h1"}),
    "tied, from one rank": (lambda: chain(tied=(1, 2)), {2: [2, 6]}, {"schedule": "1f1b"}),
    "traced": (lambda: Residual((2, 5)), {2: [6, 2]}, {"example": batch(0)[0]}),
}


def chain_of_norms() -> nn.Sequential:
    """Return blocks without running statistics."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Tanh()) for _ in range(8)))


def moved_and_not(names: list[str], **more: Any) -> dict[str, int]:
    """Train every case with moves and without; return how many tensors were equal, and how many bytes moved."""
    found = {}
    for name in names:
        make, moves, options = CASES[name]
        still, other = (trained(make, each, **{**options, **more}) for each in ({}, moves))
        done = other.pop("moves")
        assert still.pop("moves") == ()
        assert len(done) == len(moves)
        assert done[-1].balance_after == done[0].balance_before
        found[name] = compare(still, other, name)
        found[f"{name}, bytes"] = sum(value.bytes_moved for value in done)
    return found


def moved_and_loaded(names: list[str], folder: str, **more: Any) -> dict[str, int]:
    """Train with a move, and with a new pipeline of the other cut that loads a checkpoint from before the move."""
    found = {}
    for name in names:
        make, moves, options = OTHER_SUMS[name]
        ((step, balance),) = moves.items()
        settings = {**options, **more, "folder": f"{folder}/{name}"}
        here = trained(make, moves, **settings)
        there = trained(make, {}, first=step, **{**settings, "balance": balance})
        here["seen"] = here["seen"][2 * step :]
        assert len(here.pop("moves")) == 1
        there.pop("moves")
        found[name] = compare(here, there, name)
    return found


@pytest.mark.features("saving")
@pytest.mark.parametrize("name", list(OTHER_SUMS))
def test_a_move_is_as_a_checkpoint_that_another_cut_loads(name: str, tmp_path: Path) -> None:
    assert moved_and_loaded([name], str(tmp_path), **HERE)[name] > 40


@pytest.mark.features("precision")
@mainly("name", *CASES)  # the others are in test_moves_between_processes
def test_there_and_back_is_as_never_having_moved(name: str) -> None:
    found = moved_and_not([name], **HERE)
    assert found[name] > 40
    assert found[f"{name}, bytes"] == 0  # all ranks share one model


def test_training_goes_on_as_if_it_had_begun_with_the_new_cut() -> None:
    there = trained(chain, {2: [3, 5]}, **HERE)
    begun = trained(chain, {}, **{**HERE, "balance": [3, 5]})
    (move,) = there.pop("moves")
    assert (move.before, move.after) == (("4",), ("3",))
    begun.pop("moves")
    compare(begun, there, "begun there")


@pytest.mark.parametrize("call", ["repartition", "take_program", "step", "eval_step", "clip_grad_norm_", "gather"])
def test_a_call_inside_of_a_step_is_refused(call: str) -> None:
    """Across processes, it would wait for ranks that are in the middle of their rows."""
    calls: list[Callable[[], object]] = []

    def calling(output: Tensor, target: Tensor) -> Tensor:
        if calls:
            calls.pop()()
        return loss_fn(output, target)

    arguments = {"repartition": ["3"], "take_program": "gpipe", "clip_grad_norm_": 1.0, "gather": None}
    with made(chain(), **{**HERE, "loss_fn": calling}) as pipe:
        pipe.step(batch(0)[0], target=batch(0)[1])
        calls.append(lambda: getattr(pipe, call)(arguments.get(call, batch(1)[0])))
        with refused(UsageError, "called the pipeline inside of a step", fix="after `step`"):
            pipe.step(batch(0)[0], target=batch(0)[1])
        assert pipe.blocks[0] == ["0", "1", "2", "3"]
        pipe.step(batch(1)[0], target=batch(1)[1])  # it goes on


# ---- on ranks of their own -------------------------------------------------------------------------------------------


def told(run: Callable[[], object]) -> tuple[str, str]:
    try:
        run()
    except DrumlineError as error:
        return type(error).__name__, str(error)
    return "fine", ""


def has_memory(parameter: Tensor) -> bool:
    return parameter.untyped_storage().nbytes() >= parameter.numel() * parameter.element_size()


def troubles(folder: str) -> dict[str, Any]:
    """Move, save, load and ask for what is refused; training goes on after each refusal."""
    found: dict[str, Any] = {}
    model = chain(dropout=0.0)
    weights = [linear(model, at).weight for at in range(8)]
    with made(model, record=f"{folder}/run") as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
        pipe.step(batch(0)[0], target=batch(0)[1])
        optimizer.step()
        found["wrong cut"] = told(lambda: pipe.repartition(["4", "5"]))
        found["no block"] = told(lambda: pipe.repartition(["11"]))
        found["measured"] = told(lambda: pipe.repartition(balance="auto"))
        found["none"] = told(pipe.repartition)
        found["different"] = told(lambda: pipe.repartition(balance=[3, 5] if pipe.rank else [2, 6]))
        unused = torch.optim.SGD(list(pipe.parameters()), lr=0.0)  # which has not stepped, so nobody knows of it yet
        move = pipe.repartition(["6"])
        found["left behind"] = told(unused.step)
        del unused
        found["move"] = (move.bytes_moved, sorted(move.seconds), move.step)
        found["held"] = sorted(name for name, _ in pipe.named_parameters())
        found["freed"] = [at for at, weight in enumerate(weights) if not has_memory(weight)]
        if pipe.rank == 0:  # who freezes a block does so in every process
            assert all(has_memory(param) for _, param in pipe.named_parameters())
        linear(model, 5).weight.requires_grad_(False)
        model[6].eval()
        loss = pipe.step(batch(1)[0], target=batch(1)[1]).loss
        optimizer.step()
        assert loss is not None
        named = dict(pipe.named_parameters())
        found["frozen"] = [named[name].requires_grad for name in ("5.0.weight",) if name in named]
        saved = pipe.save(f"{folder}/saved", wait=True)
        found["state"] = {name: entry.clone() for name, entry in pipe.state_dict().items()}
        found["optimizer"] = optimizer.state_dict()["state"]
        model.eval()  # just before layers move back: blocks 4 and 5 are copies of the model's own on rank 0
        pipe.repartition(balance=[4, 4])
        pipe.repartition(balance=[6, 2])
        blocks = [block for stage in pipe._engine.stages() for block in stage.blocks]
        found["modes"] = [(block.name, block.module.training) for block in blocks]
        own = torch.optim.SGD(list(pipe.parameters()), lr=0.0)
        own.step()
        found["own optimizer"] = told(lambda: pipe.repartition(balance=[4, 4]))
        timeline = pipe.timeline()
        found["between"] = sorted({interval.kind for interval in timeline.between} & {"move"})
    with made(chain(dropout=0.0)) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.05)
        pipe.load(saved.path)
        found["loaded"] = {name: entry.clone() for name, entry in pipe.state_dict().items()}
        found["loaded optimizer"] = optimizer.state_dict()["state"]
    with made(Residual(), example=batch(0)[0]) as pipe:
        found["before the check"] = told(lambda: pipe.repartition(balance=[3, 5]))
    return found


def dies() -> None:
    """Leave without a word in the middle of a move."""
    with made(chain(), timeout=20.0) as pipe:
        pipe.step(batch(0)[0], target=batch(0)[1])
        if pipe.rank == 1:
            transfer._messages = lambda *_: os._exit(7)
        pipe.repartition(balance=[6, 2])


def test_a_rank_that_dies_in_a_move_is_named() -> None:
    with pytest.raises(
        RankFailed, match=r"rank 1 exited with code 7 .*\n?.*rank 0 then failed with RankFailed: rank 1 died"
    ):
        dl.launch(dies, num_ranks=2, timeout=60.0)


def on_ranks(folder: str) -> tuple[dict[str, int], dict[str, int], dict[str, Any]]:
    kept = [name for name in CASES if name != "dropout, statistics"]
    there_and_back = moved_and_not(kept) | moved_and_not(["dropout, statistics"], transport="gloo")
    return there_and_back, moved_and_loaded(list(OTHER_SUMS), folder), troubles(folder)


@pytest.mark.features("precision", "record", "saving")
def test_moves_between_processes(tmp_path: Path) -> None:
    (first, loaded, ours), (second, others, theirs) = dl.launch(on_ranks, str(tmp_path), num_ranks=2)
    assert all(min(loaded[name], others[name]) > 15 for name in some(OTHER_SUMS))
    for name in some(CASES):
        assert min(first[name], second[name]) > 15, name
        num_bytes = first[f"{name}, bytes"]
        assert num_bytes == second[f"{name}, bytes"], name
        assert num_bytes > 1000 or (name == "two copies" and num_bytes == 0), name  # both ranks hold all there
    for name, kind in some(
        {
            "wrong cut": ModelError,
            "no block": ModelError,
            "measured": UsageError,
            "none": UsageError,
            "different": MismatchError,
            "own optimizer": UsageError,
            "before the check": UsageError,
        }.items()
    ):
        assert ours[name] == theirs[name]
        assert ours[name][0] == kind.__name__
    assert "cuts" in ours["different"][1]
    assert (ours["left behind"][0], theirs["left behind"][0]) == ("fine", "RunError")  # rank 1 has lost layers
    num_bytes, parts, step = ours["move"]
    # Two blocks: 8 x 8 weights and four vectors, each with two moments and a count; statistics; one gradient of each.
    assert num_bytes > 2 * 4 * (WIDTH * WIDTH + 3 * WIDTH) * 4
    assert (parts, step) == (["agree", "rebuild", "send"], 1)
    assert ours["held"] == sorted(f"{at}.{name}" for at in range(6) for name in PARAMETERS)
    assert theirs["held"] == sorted(f"{at}.{name}" for at in (6, 7) for name in PARAMETERS)
    assert theirs["freed"] == [4, 5]
    assert ours["freed"] == []
    assert ours["frozen"] == [False]
    assert ours["between"] == ["move"]
    assert [*ours["modes"], *theirs["modes"]] == [(str(at), False) for at in range(8)]
    whole = ours["state"] | theirs["state"]
    assert len(whole) == len(ours["state"]) + len(theirs["state"]) == len(chain().state_dict())
    compare(whole, ours["loaded"] | theirs["loaded"], "loaded")
    compare(
        ours["optimizer"] | theirs["optimizer"], ours["loaded optimizer"] | theirs["loaded optimizer"], "its optimizer"
    )
    lines = (tmp_path / "run" / "decisions.jsonl").read_text().splitlines()
    assert len(lines) == 3
    decision = json.loads(lines[0])
    assert (decision["kind"], decision["step"], decision["after"]) == ("move", 1, ["6"])
    assert dl.read_run(tmp_path / "run").num_steps == 2


PARAMETERS = ("0.weight", "0.bias", "1.weight", "1.bias")


@long
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_compiled_stages_are_compiled_again() -> None:
    still, moved = (trained(chain_of_norms, moves, steps=2, compile="aot_eager", **HERE) for moves in ({}, {1: [3, 5]}))
    assert len(moved.pop("moves")) == 1
    still.pop("moves")
    moved.pop("blocks")
    still.pop("blocks")
    assert compare(still, moved, "compiled") > 40


@pytest.mark.features("capture")
def test_captured_steps_are_captured_again() -> None:
    recorder = HostRecorder()
    losses: dict[int, list[float]] = {}
    with mock.patch("drumline.features.capture.engine.recorder_for", return_value=recorder):
        for balance in ([4, 4], [3, 5]):
            pipe = made(chain_of_norms(), capture=True, **HERE)
            for step in range(6):
                if step == 3:
                    before = recorder.num_captures
                    pipe.repartition(balance=balance)
                loss = pipe.step(*batch(step)[:1], target=batch(step)[1]).loss
                assert loss is not None
                losses.setdefault(step, []).append(loss.item())
            assert recorder.num_captures > before
    assert all(first == second for first, second in some(losses.values()))
