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
from drumline.channel.launch.launch import launch
from drumline.core.errors import (
    BatchError,
    MismatchError,
    ModelError,
    NonFiniteError,
    RankFailed,
    RunError,
    ScheduleError,
)
from drumline.pipeline.pipeline import Pipeline
from matrices import KINDS, chosen, left, long, some_of
from torch_models import SYNCHRONOUS, TWO_WAYS, Reference, Unused, data, mlp, programs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]  # starts processes, which takes long on a busy machine


def schedules_on(transport: str, num_ranks: int) -> list[str]:
    """Return the schedules to try: all of them on two ranks over shared memory, elsewhere those that stand for them."""
    return list(SYNCHRONOUS) if (transport, num_ranks) == ("shared-memory", 2) else some_of(SYNCHRONOUS, KINDS)


def parity(transport: str, num_ranks: int) -> list[str]:
    """Run schedules for two steps on these ranks; return what was tried."""
    tried = []
    for name, count in chosen(schedules_on(transport, num_ranks), (2, 6), times=1):
        for program in programs(name, num_ranks, (count,)):
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


@pytest.mark.features("record")
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("transport", "num_ranks"),
    [
        ("shared-memory", 2),
        ("gloo", 4),
        *left(("shared-memory", 3), ("shared-memory", 4), ("gloo", 2), ("gloo", 3)),
    ],
)
def test_every_schedule_gives_one_processs_gradients_on_real_ranks(transport: str, num_ranks: int) -> None:
    tried = launch(parity, transport, num_ranks, num_ranks=num_ranks)
    assert all(row == tried[0] for row in tried)
    expected = set(schedules_on(transport, num_ranks))
    assert {name.split()[0] for name in tried[0]} == expected - set(TWO_WAYS if num_ranks % 2 else ())


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


class OwnSlope(nn.Module):
    """Adds nothing, but the gradient of its own parameter is infinite, and only that."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own.sqrt()


def with_one(at: int, block: nn.Module) -> nn.Sequential:
    """Return the model with another block in the place of one; of the eight, four are on either of two ranks."""
    blocks = list(mlp())
    blocks[at] = block
    return nn.Sequential(*blocks)


def outcome(pipe_of: Any, *, batch: Any = None, target: Any = None) -> tuple[str, str]:
    """Return the error's type and text, or whether the parameters were updated."""
    pipe = None
    before: list[Tensor] = []
    found = ("fine", "")
    try:
        pipe = pipe_of()
        before = [param.detach().clone() for param in pipe.parameters()]
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        pipe.step(batch, target=target)
        optimizer.step()
    except (dl.DrumlineError, KeyError) as error:
        found = (type(error).__name__, str(error))
    if pipe is not None:
        if any(not torch.equal(tensor, other) for tensor, other in zip(before, pipe.parameters(), strict=True)):
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
            alive.append(sum(issubclass(type(value), Tensor) for value in gc.get_objects()))
        return ("fine", "") if alive[0] == alive[1] else ("piles up", str(alive))


def troubles(transport: str) -> dict[str, tuple[str, str]]:
    """Meet one trouble after the other on two ranks."""
    rank = int(os.environ["RANK"])
    batch, target = data(8)
    given: dict[str, Any] = {"loss_fn": functional.mse_loss, "num_microbatches": 4, "transport": transport}

    def pipe(model: nn.Sequential | None = None, **more: Any) -> Any:
        return lambda: Pipeline(model if model is not None else mlp(), **{**given, **more})

    either = {
        f"{what} on rank {at}": outcome(pipe(with_one(-at, block), unused="raise"), batch=batch, target=target)
        for at in (0, 1)
        for what, block in (
            ("a block fails", Explodes("fail")),
            ("a nan", Explodes("nan")),
            ("a slope that is infinite", OwnSlope()),
            ("unused parameters", Unused()),
        )
    }
    return (
        either
        | {
            "mismatched schedules": outcome(pipe(schedule="1f1b" if rank else "gpipe")),
            "mismatched models": outcome(pipe(mlp(8 + rank))),
            "mismatched seeds": outcome(pipe(seed=rank)),
            "one bad name": outcome(pipe(schedule="1f1v" if rank else "1f1b")),
            "one bad model": outcome(pipe("model" if rank else None)),  # type: ignore[arg-type]
            "too small a batch": outcome(pipe(), batch=batch[:3], target=target[:3]),
            "no target": outcome(pipe(), batch=batch),
            "no batch": outcome(pipe(), target=target),
            "a nan and then none": goes_on(pipe()(), batch, target),
            "then all is well": outcome(pipe(), batch=batch, target=target),
        }
    )


@pytest.mark.parametrize("transport", ["shared-memory", "gloo"])
def test_every_rank_learns_of_every_trouble(transport: str) -> None:
    both = launch(troubles, transport, num_ranks=2)
    expected = {
        "mismatched schedules": ("MismatchError", "disagree on schedule"),
        "mismatched models": ("MismatchError", "disagree on model"),
        "mismatched seeds": ("MismatchError", "disagree on seed"),
        "one bad name": (ScheduleError.__name__, "did you mean 1f1b"),
        "one bad model": (ModelError.__name__, "the model is a str"),
        "too small a batch": (BatchError.__name__, "3 rows for 4 microbatches"),
        "no target": (BatchError.__name__, "got no target"),
        "no batch": (BatchError.__name__, "got no batch"),
        "a block fails on rank 0": ("KeyError", "no such layer"),
        "a block fails on rank 1": ("KeyError", "no such layer"),
        "a nan on rank 0": (NonFiniteError.__name__, "NaN or infinite"),
        "a nan on rank 1": (NonFiniteError.__name__, "NaN or infinite"),
        "a slope that is infinite on rank 0": (NonFiniteError.__name__, "on rank 0 is NaN or infinite"),
        "a slope that is infinite on rank 1": (NonFiniteError.__name__, "on rank 1 is NaN or infinite"),
        "a nan and then none": ("fine", ""),
        "unused parameters on rank 0": (ModelError.__name__, "no loss reaches 0.unused.bias, 0.unused.weight"),
        "unused parameters on rank 1": (ModelError.__name__, "no loss reaches 7.unused.bias, 7.unused.weight"),
        "then all is well": ("updated", ""),
    }
    alike = ("mismatched", "a nan on", "a slope", "unused parameters")
    assert both[0].keys() == both[1].keys() == expected.keys()
    for what, (kind, says) in expected.items():
        found = [told[what] for told in both]
        assert kind in [name for name, _ in found], (what, found)
        for name, text in found:
            assert name in (kind, RankFailed.__name__), (what, found)
            assert says in text, (what, found)
        if what.startswith(alike):
            assert all(name == kind for name, _ in found), (what, found)
        if what.startswith("a block fails"):
            (failed,) = {f"rank {rank} failed at {rank}F0" for rank in (0, 1) if what.endswith(str(rank))}
            assert any(failed in text for _, text in found), found


def dies(at: int, folder: Path) -> None:
    (folder / f"{os.getpid()}").touch()
    batch, target = data(8)
    model = with_one(-at, Explodes("die"))
    pipe = Pipeline(model, loss_fn=functional.mse_loss, num_microbatches=4, transport="shared-memory")
    pipe.step(batch, target=target)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_others_and_leaves_nothing_behind(rank: int, tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm")) if Path("/dev/shm").exists() else set()
    with pytest.raises(RankFailed, match=f"rank {rank} "):
        launch(dies, rank, tmp_path, num_ranks=2)
    ranks = sorted(path.name for path in tmp_path.iterdir())
    assert len(ranks) == 2
    assert not any(Path("/proc", pid).exists() for pid in ranks)
    # Other programs come and go there; what is ours has our name, or that of a rank's process.
    added = set(os.listdir("/dev/shm")) - before if Path("/dev/shm").exists() else set()
    assert [name for name in added if "drumline" in name or any(pid in name for pid in ranks)] == []


def waits() -> list[tuple[str, str]]:
    """Let rank 0 wait for a rank that never comes, then rank 1, then rank 0 where the check asks all ranks first."""
    return [waits_on(0), waits_on(1), waits_on(0, check_model=True)]


def waits_on(waiting: int, *, check_model: bool = False) -> tuple[str, str]:
    rank = int(os.environ["RANK"])
    batch, target = data(8)
    given: dict[str, Any] = {"num_microbatches": 4, "transport": "shared-memory", "check_model": check_model}
    pipe = Pipeline(mlp(), loss_fn=functional.mse_loss, **given)
    import torch.distributed as dist

    dist.barrier()
    found = ("fine", "")
    if rank == waiting:
        pipe._crew.timeout = 0.5  # only now: how long starting takes is no part of the test
        try:
            pipe.step(batch, target=target)
        except RunError as error:
            found = (type(error).__name__, str(error))
    dist.barrier()
    return found


@long
def test_a_rank_that_waits_too_long_says_for_what(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = launch(waits, num_ranks=2)
    assert [kind for kind, _ in (first[0], second[1], first[2])] == ["WaitTimeout"] * 3
    assert "rank 0 at 0B0 waits for 1B0 or 1I0 of rank 1" in first[0][1]
    assert "rank 1 at 1F0 waits for 0F0 of rank 0" in second[1][1]
    assert "rank 0 waits for rank 1 to send 'check/" in first[2][1]
    assert "File " in capfd.readouterr().err, "the stacks are printed"


@pytest.mark.usefixtures("patient")
def test_mismatch_is_caught_by_its_own_type() -> None:
    def different() -> None:
        Pipeline(mlp(), loss_fn=functional.mse_loss, num_microbatches=2 + int(os.environ["RANK"]))

    with pytest.raises(MismatchError):
        launch(different, num_ranks=2)
