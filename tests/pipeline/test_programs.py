"""Several programs in one run: each step's gradients, the same program on all ranks, and records that say which."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import drumline as dl
from drumline.channel.launch.launch import launch
from drumline.core.errors import DrumlineError, MismatchError, ProgramError, RankFailed, UsageError
from drumline.core.measured.run import read_run
from drumline.core.program import Program
from drumline.pipeline.pipeline import Pipeline
from drumline.report.run.live import LiveRun
from drumline.report.run.report import report_of
from drumline.report.run.text import report_text
from refused import refused, saying
from some import some
from torch_models import TWO_WAYS, Reference, data, mlp, programs

pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]


def small(**settings: Any) -> Pipeline:
    given: dict[str, Any] = {"num_microbatches": 4, "num_ranks": 2, **settings}
    return Pipeline(mlp(), loss_fn=functional.mse_loss, **given)


@pytest.mark.features("record")
@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-zb", "dualpipe"])
def test_each_step_has_the_gradients_of_its_program(name: str) -> None:
    first, second, third = programs(name, 2, (4, 8, 6))
    model = mlp(dropout=0.2)
    references = {candidate: Reference(model, candidate, functional.mse_loss) for candidate in (first, second, third)}
    named = {"long": second}
    pipe = Pipeline(model, loss_fn=functional.mse_loss, schedule=first, num_ranks=2, programs=named)
    assert pipe.programs == named
    for number, (given, program) in enumerate(
        [(None, first), ("long", second), (third, third), (None, first), (second, second), ("long", second)]
    ):
        batch, target = data(11, seed=number)
        reference = references[program]
        reference.randomness.step = number
        for param in reference.model.parameters():
            param.grad = None
        pipe.zero_grad()
        loss = pipe.step(batch, target=target, program=given).loss
        assert loss is not None
        assert torch.equal(loss, reference.step(batch, target))
        reference.compare(pipe, exact=name not in TWO_WAYS)
        assert pipe.timeline().program.num_microbatches == program.num_microbatches
        assert pipe.program == first
    output = pipe.eval_step(data(8)[0], program="long").output
    assert len(output) == 8


@pytest.mark.features("adapt")
@pytest.mark.parametrize(
    ("settings", "given", "kind", "said"),
    [
        ({}, "long", UsageError, saying("no program 'long'", fix="name programs")),
        ({"programs": {"long": 2}}, "lnog", UsageError, saying("no program 'lnog'", fix="did you mean long")),
        ({}, 3, UsageError, saying("program is 3", expected="programs=")),
        ({}, dl.generate("1f1b", num_ranks=3, num_microbatches=4), ProgramError, saying("is for 3 ranks")),
        (
            {},
            dl.generate("zb-v", num_ranks=2, num_microbatches=4),
            ProgramError,
            saying("stages on other ranks than '1f1b'"),
        ),
        (
            {"schedule": "auto"},
            dl.generate("1f1b", num_ranks=2, num_microbatches=2),
            UsageError,
            saying("schedule is 'auto'", expected="one program"),
        ),
    ],
)
def test_a_program_that_does_not_fit_is_refused(settings: Any, given: Any, kind: Any, said: dict[str, str]) -> None:
    batch, target = data(8)
    pipe = small(**settings)
    with refused(kind, **said):
        pipe.step(batch, target=target, program=given)
    assert pipe.step(batch, target=target).loss is not None


@pytest.mark.features("adapt")
@pytest.mark.parametrize(
    ("settings", "kind", "said"),
    [
        ({"programs": [4]}, UsageError, saying(r"programs is \[4\]")),
        ({"programs": {"": 4}}, UsageError, saying("programs has the name ''")),
        (
            {"programs": {"long": "gpipe"}},
            ProgramError,
            saying("'gpipe' as 'long'", expected="a Program or a CSV file"),
        ),
        (
            {"programs": {"long": 2}, "schedule": "auto"},
            UsageError,
            saying("programs is set, and schedule is 'auto'"),
        ),
        (
            {"programs": {"a": 2}, "schedule": dl.generate("1f1b", num_ranks=2, num_microbatches=4)},
            ProgramError,
            saying("the schedule is a program already"),
        ),
    ],
)
def test_programs_that_cannot_be_named_are_refused(settings: Any, kind: Any, said: dict[str, str]) -> None:
    with refused(kind, **said):
        small(**settings)


@pytest.mark.features("record")
def test_a_run_says_by_which_program_each_step_ran(tmp_path: Path) -> None:
    batch, target = data(8)
    brought = dl.generate("gpipe", num_ranks=2, num_microbatches=3)
    with small(record=tmp_path / "run", programs={"long": 2}) as pipe:
        for given in (None, "long", brought, "long", "long"):
            pipe.step(batch, target=target, program=given)
            pipe.settle()
    run = read_run(tmp_path / "run")
    names = ["1f1b", "long", "program 2", "long", "long"]
    assert [run.program_of(step).name for step in run.steps] == names
    assert [run.timeline(step).program.num_microbatches for step in run.steps] == [4, 2, 3, 2, 2]
    assert run.program_of(2) == brought
    assert [metric.get("program") for metric in run.metrics()] == [None, 1, 2, 1, 1]
    report = report_of(run)
    assert report.step.program.name == "long"
    assert set(report.step.pooled) <= {1, 3, 4}
    assert [value["program"] for value in report.to_json()["per_step"]] == [0, 1, 2, 1, 1]
    assert "long, 2 ranks" in report_text(report)
    live = LiveRun("run", run.program, name_of=run.name_of)
    live.add(run.metrics()[2])
    assert "by program 2" in live.row()
    (tmp_path / "run" / "program-1.csv").write_text("0F0,0B0\n")
    with refused(DrumlineError, r"program-1\.csv is for other ranks or stages"):
        read_run(tmp_path / "run").timeline(1)


def different(transport: str, rank_of_other: int) -> str:
    """Run another program on one of two ranks, and return what each is told."""
    batch, target = data(8)
    pipe = small(num_ranks=None, transport=transport, programs={"long": 2, "deep": 8}, timeout=60)
    assert pipe.step(batch, target=target, program="deep").loss is not None
    started = time.monotonic()
    try:
        pipe.step(batch, target=target, program="long" if pipe.rank == rank_of_other else None)
        pipe.settle()
    except (MismatchError, RankFailed) as error:
        assert time.monotonic() - started < 30, "told at once, and not when time was up"
        return str(error)
    return "nothing"


def all_different() -> list[str]:
    return [different("shared-memory", 1), different("gloo", 0)]


def other_sets() -> str:
    """Make a pipeline with other programs on each rank."""
    import os

    try:
        small(num_ranks=None, programs={"long": 2 + int(os.environ["RANK"])})
    except MismatchError as error:
        return str(error)
    return "nothing"


def test_ranks_that_run_different_programs_are_told_at_once() -> None:
    for told in launch(all_different, num_ranks=2):
        assert all("program" in name for name in some(told)), told
    assert all("set of programs" in name for name in some(launch(other_sets, num_ranks=2)))


def test_a_program_is_the_same_by_its_rows_whatever_it_is_called() -> None:
    pipe, (batch, target) = small(), data(8)
    for name in ("one", "other"):
        made = dl.generate("gpipe", num_ranks=2, num_microbatches=2)
        pipe.step(batch, target=target, program=Program(made.rows, name))
    assert len(list(pipe._run.programs)) == 2
