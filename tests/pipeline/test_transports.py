"""Real ranks over each real transport: the same loss and gradients; failures and bad input reach every rank."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import (
    BatchError,
    MismatchError,
    ModelError,
    NonFiniteError,
    RankFailed,
    RunError,
    ScheduleError,
)
from drumline.pipeline.launch import launch
from drumline.pipeline.pipeline import Pipeline
from torch_models import SYNCHRONOUS, TWO_WAYS, Reference, Unused, data, mlp, programs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]  # starts processes, which takes long on a busy machine


def parity(transport: str, num_ranks: int) -> list[str]:
    """Run every schedule for two steps on these ranks; return what was tried."""
    tried = []
    for name in SYNCHRONOUS:
        for program in programs(name, num_ranks, (2, 6)):
            model = mlp(dropout=0.2)
            reference = Reference(model, program, functional.mse_loss)
            with Pipeline(
                model, loss_fn=functional.mse_loss, schedule=program, transport=transport, checkpoint=["1", "4"]
            ) as pipe:
                for step in range(2):
                    batch, target = data(7 + 2 * step, seed=step)
                    result = pipe.step(batch, target=target)
                    assert result.loss is not None
                    expected = reference.step(batch, target)
                    assert torch.equal(result.loss, expected), name
                    reference.compare(pipe, exact=name not in TWO_WAYS)
                    pipe.clip_grad_norm_(1e9)
                    pipe.zero_grad()
                    reference.model.zero_grad()
                measured = pipe.timeline()
                assert len(measured.tracks) == num_ranks
                assert measured.makespan > 0
                tried.append(f"{name} {program.num_microbatches}")
    return tried


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("transport", ["shared-memory", "gloo"])
def test_every_schedule_gives_one_processs_gradients_on_real_ranks(transport: str, num_ranks: int) -> None:
    tried = launch(parity, transport, num_ranks, num_ranks=num_ranks)
    assert all(one == tried[0] for one in tried)
    assert {one.split()[0] for one in tried[0]} >= set(SYNCHRONOUS) - set(TWO_WAYS if num_ranks % 2 else ())


class Explodes(nn.Module):
    """Fails, dies or makes a NaN when it meets a number that says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "fail":
            raise KeyError("no such layer")
        if self.how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        made: Tensor = self.layer(x)
        return made * float("nan") if self.how == "nan" else made


def with_last(how: str, *, like: int = 8) -> nn.Sequential:
    return nn.Sequential(*list(mlp(like))[:-1], Explodes(how))


def outcome(pipe_of: Any, *, batch: Any = None, target: Any = None) -> tuple[str, str]:
    """Return the error's type and text, or whether the parameters were updated."""
    pipe = None
    before: list[Tensor] = []
    found = ("fine", "")
    try:
        pipe = pipe_of()
        before = [one.detach().clone() for one in pipe.parameters()]
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.step(batch, target=target)
        optimizer.step()
    except (dl.DrumlineError, KeyError) as error:
        found = (type(error).__name__, str(error))
    if pipe is not None:
        if any(not torch.equal(one, other) for one, other in zip(before, pipe.parameters(), strict=True)):
            found = ("updated", found[1])
        pipe.close()
    return found


def goes_on(pipe: Pipeline, batch: Tensor, target: Tensor) -> tuple[str, str]:
    """Meet a NaN when clipping, then go on with the next batch, and see that nothing piles up over many steps."""
    with pipe:
        pipe.step(batch * float("nan"), target=target)
        try:
            pipe.clip_grad_norm_(1.0)
        except NonFiniteError:
            pipe.zero_grad()
        else:
            return "no error", ""
        alive: list[int] = []
        for _ in range(2):
            for _ in range(10 + 40 * len(alive)):
                pipe.step(batch, target=target)
                pipe.clip_grad_norm_(1.0)
                pipe.zero_grad()
            gc.collect()
            alive.append(sum(issubclass(type(one), Tensor) for one in gc.get_objects()))
        return ("fine", "") if alive[0] == alive[1] else ("piles up", str(alive))


def troubles(transport: str) -> dict[str, tuple[str, str]]:
    """Meet one trouble after the other on two ranks."""
    rank = int(os.environ["RANK"])
    batch, target = data(8)
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "transport": transport}

    def pipe(model: nn.Sequential | None = None, **more: Any) -> Any:
        return lambda: Pipeline(model if model is not None else mlp(), **{**given, **more})

    unused = nn.Sequential(mlp()[0], Unused(), *list(mlp())[2:])
    return {
        "mismatched schedules": outcome(pipe(schedule="1f1b" if rank else "gpipe")),
        "mismatched models": outcome(pipe(mlp(8 + rank))),
        "mismatched seeds": outcome(pipe(seed=rank)),
        "one bad name": outcome(pipe(schedule="1f1v" if rank else "1f1b")),
        "one bad model": outcome(pipe("model" if rank else None)),  # type: ignore[arg-type]
        "too small a batch": outcome(pipe(), batch=batch[:3], target=target[:3]),
        "no target": outcome(pipe(), batch=batch),
        "no batch": outcome(pipe(), target=target),
        "a block fails": outcome(pipe(with_last("fail")), batch=batch, target=target),
        "a nan": outcome(pipe(with_last("nan")), batch=batch, target=target),
        "a nan and then none": goes_on(pipe()(), batch, target),
        "unused parameters": outcome(pipe(unused), batch=batch, target=target),
        "then all is well": outcome(pipe(), batch=batch, target=target),
    }


@pytest.mark.parametrize("transport", ["shared-memory", "gloo"])
def test_every_rank_learns_of_every_trouble(transport: str) -> None:
    both = launch(troubles, transport, num_ranks=2)
    expected = {
        "mismatched schedules": ("MismatchError", "another schedule"),
        "mismatched models": ("MismatchError", "another model"),
        "mismatched seeds": ("MismatchError", "another seed"),
        "one bad name": (ScheduleError.__name__, "did you mean 1f1b"),
        "one bad model": (ModelError.__name__, "the model is a str"),
        "too small a batch": (BatchError.__name__, "3 rows for 4 microbatches"),
        "no target": (BatchError.__name__, "got no target"),
        "no batch": (BatchError.__name__, "got no batch"),
        "a block fails": ("KeyError", "no such layer"),
        "a nan": (NonFiniteError.__name__, "NaN or infinite"),
        "a nan and then none": ("fine", ""),
        "unused parameters": (ModelError.__name__, "no loss reaches 1.unused.bias, 1.unused.weight"),
        "then all is well": ("updated", ""),
    }
    alike = ("mismatched schedules", "mismatched models", "mismatched seeds", "a nan", "unused parameters")
    for what, (kind, says) in expected.items():
        found = [told[what] for told in both]
        assert kind in [one for one, _ in found], (what, found)
        for one, text in found:
            assert one in (kind, RankFailed.__name__), (what, found)
            assert says in text, (what, found)
        if what in alike:
            assert all(one == kind for one, _ in found), (what, found)
        if what == "a block fails":
            assert any("rank 1" in text and "7F0" not in text and "1F0" in text for _, text in found), found


def dies(folder: Path) -> None:
    (folder / f"{os.getpid()}").touch()
    batch, target = data(8)
    model = with_last("die")
    pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, transport="shared-memory")
    pipe.step(batch, target=target)


def test_a_killed_rank_ends_the_others_and_leaves_nothing_behind(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    with pytest.raises(RankFailed, match=r"rank 1 was killed by SIGKILL|rank 1"):
        launch(dies, tmp_path, num_ranks=2)
    ranks = sorted(one.name for one in tmp_path.iterdir())
    assert len(ranks) == 2
    assert not any(Path("/proc", pid).exists() for pid in ranks)
    # Other programs come and go there; what is ours has our name, or that of a rank's process.
    added = set(os.listdir("/dev/shm")) - before if Path("/dev/shm").exists() else set()
    assert [name for name in added if "drumline" in name or any(pid in name for pid in ranks)] == []


def waits() -> tuple[str, str]:
    """Let rank 0 wait for a rank that never comes."""
    rank = int(os.environ["RANK"])
    batch, target = data(8)
    pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=4, transport="shared-memory")
    import torch.distributed as dist

    dist.barrier()
    found = ("fine", "")
    if rank == 0:
        pipe._crew.timeout = 0.5  # only now: how long starting takes is no part of the test
        try:
            pipe.step(batch, target=target)
        except RunError as error:
            found = (type(error).__name__, str(error))
    dist.barrier()
    return found


def test_a_rank_that_waits_too_long_says_for_what(capfd: pytest.CaptureFixture[str]) -> None:
    (kind, text), _ = launch(waits, num_ranks=2)
    assert kind == "WaitTimeout"
    assert "rank 0 at 0B0 waits for 1B0" in text
    assert "of rank 1" in text
    assert "File " in capfd.readouterr().err, "the stacks are printed"


@pytest.mark.usefixtures("patient")
def test_mismatch_is_caught_by_its_own_type() -> None:
    def different() -> None:
        Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=2 + int(os.environ["RANK"]))

    with pytest.raises(MismatchError):
        launch(different, num_ranks=2)
