"""`verify` says yes where the pipeline is right, and no, with the parameter's name, where it is not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import follow_faults as faults
from drumline.core.errors import (
    BatchError,
    DrumlineError,
    ModelError,
    ProgramError,
    RunError,
    ScheduleError,
    UsageError,
)
from drumline.engine.model.sources import Material
from drumline.engine.unsplit.comparing import difference
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.steps.result import StepResult
from drumline.schedules import generate
from drumline.verification.result import Verification
from drumline.verification.verify import verify
from follow_faults import FAULTS
from refused import refused, saying
from torch_models import data, mlp

pytestmark = [pytest.mark.torch, pytest.mark.features("check", "record")]

MODEL = """
from dataclasses import dataclass
import torch
from torch import nn
from beside import WIDTH

@dataclass
class Settings:
    width: int = WIDTH

def loss(output, target):
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())

def make():
    width = Settings().width
    middle = [nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1)) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(50, width), *middle, nn.Linear(width, 50))
    return model, loss, torch.randint(50, (9, 4)), torch.randint(50, (9, 4))

def pair():
    return make()[:2]

def not_a_model():
    return "model", loss, torch.ones(8, 2), torch.ones(8, 2)

def no_loss():
    return make()[0], "mse", torch.ones(8, 2), torch.ones(8, 2)

def raises():
    raise KeyError("weights")

def does_not_fit():
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(4, 2)), nn.functional.mse_loss, torch.ones(8, 2), torch.ones(8, 2)

def few_rows():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.functional.mse_loss, torch.ones(3, 2), torch.ones(3, 2)

number = 5
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    (tmp_path / "beside.py").write_text("WIDTH = 8\n")
    path = tmp_path / "own_model.py"
    path.write_text(MODEL)
    return path


def in_process(schedule: Any = "1f1b", **settings: Any) -> Verification:
    return verify(schedule, transport="in-process", **settings)


def made() -> Material:
    return Material(mlp(4), functional.mse_loss, *data(8))


@pytest.mark.parametrize("name", ["1f1b", "zb-v", "interleaved-zb"])
def test_all_bits_agree_where_the_order_of_sums_is_kept(name: str) -> None:
    found = in_process(name, num_microbatches=4, dropout=0.2, num_steps=3)
    assert found.passes
    assert found.identical
    assert (found.loss_difference, found.gradient_difference, found.weight_difference) == (0, 0, 0)
    assert (found.worst_parameter, found.tolerance) == ("", 0)
    assert len(found.gradient_differences) == 8 * 4
    assert 0 < found.bubble < 1


@pytest.mark.parametrize("name", ["dualpipe", "chimera"])
def test_two_copies_of_a_stage_agree_up_to_rounding_however_many_steps_there_are(name: str) -> None:
    found = in_process(name, num_microbatches=16, dropout=0.1, num_steps=6)
    assert found.passes
    assert not found.identical
    assert 0 < found.gradient_difference <= found.tolerance == 1e-6
    assert found.worst_parameter in found.gradient_differences


def test_recomputed_blocks_give_the_same() -> None:
    assert in_process("zb-h1", num_microbatches=3, dropout=0.3, checkpoint="full").identical


def test_the_default_model_has_a_block_for_every_stage() -> None:
    found = in_process("interleaved-1f1b", num_ranks=3, num_microbatches=3, stages_per_rank=4)
    assert (found.num_stages, found.passes) == (12, True)


def test_a_program_and_a_file_bring_their_own_counts(tmp_path: Path) -> None:
    program = generate("gpipe", num_ranks=3, num_microbatches=2)
    path = tmp_path / "own.csv"
    program.save(path)
    for candidate in (program, path, str(path)):
        found = in_process(candidate)
        assert (found.num_ranks, found.num_microbatches, found.passes) == (3, 2, True)


def test_ranks_of_their_own_load_a_model_file_and_agree(
    model_file: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_file.parent)  # a relative path means the same on every rank
    found = verify("zb-h1", num_microbatches=4, model="own_model.py:make")
    assert found.identical
    assert found.transport == "shared-memory"
    assert next(iter(found.gradient_differences)) == "0.weight"
    assert capfd.readouterr() == ("", "")


def test_a_function_will_do_as_a_model_and_nothing_of_the_callers_is_changed() -> None:
    torch.manual_seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    assert in_process(model=made).identical
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def break_step(monkeypatch: pytest.MonkeyPatch, spoil: Any) -> None:
    """Have `spoil(pipe, result)` return what a step returns."""
    right = Pipeline.step

    def step(self: Pipeline, batch: Any = None, *, target: Any = None) -> StepResult:
        result = right(self, batch, target=target)
        return spoil(self, result) or result

    monkeypatch.setattr(Pipeline, "step", step)


def test_every_step_has_another_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Tensor] = []
    right = Pipeline.step

    def step(self: Pipeline, batch: Tensor, **named: Any) -> StepResult:
        seen.append(batch)
        return right(self, batch, **named)

    monkeypatch.setattr(Pipeline, "step", step)
    found = in_process(num_microbatches=4, num_steps=3)
    assert (found.identical, found.num_steps, found.batches_differ, found.summary()["batches_differ"]) == (
        True,
        3,
        True,
        True,
    )
    assert len({tuple(tensor.flatten().tolist()) for tensor in seen}) == 3
    assert not in_process(num_microbatches=4, num_steps=1).batches_differ


def test_a_batch_whose_rows_cannot_trade_places_stays_the_same() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(2)])

        def forward(self, x: Tensor, scale: Tensor) -> Any:
            return self.layers[1](self.layers[0](x) * scale)

    def make() -> Any:
        return Table(), functional.mse_loss, {"x": torch.randn(8, 4), "scale": torch.ones(())}, torch.randn(8, 4)

    found = in_process(model=make, num_microbatches=4)
    assert (found.passes, found.batches_differ) == (True, False)


def test_a_wrong_gradient_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(pipe: Pipeline, _: StepResult) -> None:
        gradient = dict(pipe.named_parameters())["5.1.bias"].grad
        assert gradient is not None
        gradient.mul_(1.001)

    break_step(monkeypatch, spoil)
    for name in ("1f1b", "dualpipe"):
        found = in_process(name, num_microbatches=4)
        assert not found.passes
        assert not found.identical
        assert found.worst_parameter == "5.1.bias"
        assert found.gradient_difference == pytest.approx(1e-3, rel=1e-2)


def test_one_bit_is_a_no_where_bits_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(pipe: Pipeline, result: StepResult) -> None:
        gradient = dict(pipe.named_parameters())["2.0.weight"].grad
        assert gradient is not None
        if result.step == 1:
            gradient[0, 0] = torch.nextafter(gradient[0, 0], torch.tensor(math.inf))

    break_step(monkeypatch, spoil)
    found = in_process(num_microbatches=4)
    assert 0 < found.gradient_difference < 1e-6
    assert not found.passes
    assert [name for name, off in found.gradient_differences.items() if off] == ["2.0.weight"]
    assert in_process(num_microbatches=4, num_steps=1).passes


def test_a_gradient_that_is_missing_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(pipe: Pipeline, _: StepResult) -> None:
        dict(pipe.named_parameters())["7.0.weight"].grad = None

    break_step(monkeypatch, spoil)
    found = in_process(num_microbatches=4)
    assert (found.passes, found.worst_parameter, found.gradient_difference) == (False, "7.0.weight", 1)


def test_a_parameter_that_no_rank_has_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Pipeline.named_parameters
    monkeypatch.setattr(
        Pipeline, "named_parameters", lambda self: (pair for pair in right(self) if pair[0] != "3.1.bias")
    )
    assert in_process(num_microbatches=4).worst_parameter == "3.1.bias"


def test_a_wrong_loss_and_a_wrong_update_are_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        break_step(patch, lambda _, result: StepResult(result.step, lambda: result.loss * 1.01))
        found = in_process(num_microbatches=4)
        assert (found.passes, found.gradient_difference) == (False, 0)
        assert found.loss_difference == pytest.approx(0.01, rel=1e-3)
    right = Pipeline.optimizer
    monkeypatch.setattr(Pipeline, "optimizer", lambda self, kind, **settings: right(self, kind, lr=0.02))
    found = in_process(num_microbatches=4)
    assert (found.passes, found.gradient_difference) == (False, 0)
    assert found.weight_difference > 0


def test_a_pipeline_that_fails_is_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(pipe: Pipeline, _: StepResult) -> None:
        raise RuntimeError("a stage broke")

    break_step(monkeypatch, spoil)
    with refused(RunError, "the pipeline failed with RuntimeError: a stage broke"):
        in_process(num_microbatches=4)


@pytest.mark.parametrize(
    ("model", "error", "text"),
    [
        ("own_model.py", ModelError, saying("the model is 'own_model.py'", expected="FILE.py:NAME")),
        ("absent.py:make", ModelError, saying("absent.py: no such file")),
        (".:make", ModelError, saying("not a file")),
        ("own_model.py:mak", ModelError, saying("mak does not exist", fix="did you mean make?")),
        ("own_model.py:number", ModelError, saying("number is not a function")),
        ("own_model.py:pair", ModelError, saying("own_model.py:pair returned 2 values", expected=r"\(model, loss_fn")),
        ("own_model.py:loss", ModelError, saying("loss failed with TypeError", expected="runs without arguments")),
        ("own_model.py:not_a_model", ModelError, saying("the model is a str")),
        ("own_model.py:no_loss", ModelError, saying("a str as loss_fn")),
        ("own_model.py:raises", ModelError, saying("raises failed with KeyError: 'weights'")),
        ("own_model.py:does_not_fit", ModelError, saying("fails in a single process too, with RuntimeError: mat1")),
        ("own_model.py:few_rows", BatchError, saying("3 rows for 4 microbatches")),
        ("broken.py:make", ModelError, saying("broken.py failed with SyntaxError")),
        ("notes.txt:make", ModelError, saying("not a Python file")),
    ],
)
def test_a_model_that_is_no_model_is_refused_with_the_reason(
    model: str, error: type[DrumlineError], text: dict[str, str], model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model_file.parent)
    Path("broken.py").write_text("def make(:\n")
    Path("notes.txt").write_text("a note\n")
    with refused(error, **text):
        in_process(model=model, num_microbatches=4)


def test_a_model_that_comes_out_differently_each_time_is_refused() -> None:
    scales = iter([1.0, 2.0])

    def drifting() -> Material:
        batch, target = data(8)
        return Material(mlp(4), functional.mse_loss, batch * next(scales), target)

    with refused(ModelError, "differed when built a second time"):
        in_process(model=drifting)


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"num_ranks": 0}, ScheduleError, "ranks is 0"),
        ({"num_microbatches": 0}, ScheduleError, "microbatches is 0"),
        ({"num_steps": 0}, UsageError, "number of steps is 0"),
        ({"dropout": 1.0}, UsageError, "dropout is 1"),
        ({"dropout": 0.5, "model": made}, UsageError, "dropout was given together with a model"),
        ({"schedule": "pipedream"}, ProgramError, "updates weights"),
        ({"num_ranks": 8, "model": made}, ModelError, "4 blocks for 8 stages"),
        ({"checkpoint": "some"}, ModelError, "checkpoint is 'some'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, Any], error: type[DrumlineError], text: str
) -> None:
    with refused(error, text):
        in_process(**settings)


def test_an_unknown_transport_is_refused() -> None:
    with refused(UsageError, "transport is 'glo'", fix="did you mean gloo"):
        verify(transport="glo")


def test_a_difference_is_relative_and_zero_only_for_equal_bits() -> None:
    ones = torch.ones(4)
    assert difference(ones, ones.clone()) == 0
    assert difference(ones * 1.5, ones) == pytest.approx(0.5)
    assert difference(ones, torch.zeros(4)) == pytest.approx(2)  # of nothing: the norm itself
    assert difference(None, None) == 0
    assert difference(ones, None) == 1
    assert difference(ones * math.nan, ones) == math.inf
    assert difference(torch.tensor([3 + 1j]), torch.tensor([3 + 0j])) == pytest.approx(1 / 3)


def test_coarser_numbers_are_allowed_coarser_rounding() -> None:
    def halved() -> Material:
        batch, target = (tensor.bfloat16() for tensor in data(8))
        return Material(
            nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).bfloat16(), functional.mse_loss, batch, target
        )

    found = in_process("dualpipe", num_microbatches=4, model=halved)
    assert found.tolerance == 8 * torch.finfo(torch.bfloat16).eps
    assert found.passes
    assert in_process("zb-h1", num_microbatches=4, model=halved).identical


class Skips(nn.Module):
    """No chain: a value skips two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(4)])

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        first = self.layers[0](x) * scale
        return self.layers[3](self.layers[2](self.layers[1](first).tanh()).tanh() + first)


def test_any_module_is_verified_and_held_against_itself() -> None:
    def make() -> Any:
        return Skips(), functional.mse_loss, {"x": torch.randn(8, 6), "scale": 0.5}, torch.randn(8, 6)

    for schedule in ("zb-h1", "dualpipe"):
        found = verify(schedule, model=make, num_ranks=2, num_microbatches=4, transport="in-process")
        assert found.passes
        assert found.tolerance == 0.0 or schedule == "dualpipe"


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_faults_in_how_a_model_is_followed_are_found_and_the_first_wrong_parameter_named(
    fault: Any, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert in_process(schedule, model=faults.make, num_microbatches=4).identical
    fault(monkeypatch)
    found = in_process(schedule, model=faults.make, num_microbatches=4)
    assert not found.passes
    assert found.first_wrong_parameter == "layers.0.weight"
    assert found.summary()["first_wrong_parameter"] == "layers.0.weight"


class LooksBack(nn.Module):
    """Doubles the gradient where it sees what came before it, so not at the start of a stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 - x.detach() if x.grad_fn is not None else x


def test_the_last_wrong_parameter_is_next_to_the_cause() -> None:
    def made() -> Any:
        torch.manual_seed(0)
        blocks = [nn.Sequential(LooksBack(), nn.Linear(6, 6)) for _ in range(4)]
        return Material(nn.Sequential(*blocks), functional.mse_loss, torch.randn(8, 6), torch.randn(8, 6))

    found = in_process(model=made, num_microbatches=4)
    assert found.loss_difference == 0
    assert (found.first_wrong_parameter, found.last_wrong_parameter) == ("0.1.weight", "1.1.bias")
    assert found.first_right_parameter == "2.1.weight"
    right = in_process(model=made, num_ranks=1, num_microbatches=4)
    assert (right.last_wrong_parameter, right.first_right_parameter) == ("", "")


def test_hooks_on_a_container_are_part_of_the_reference() -> None:
    def hooked() -> Any:
        torch.manual_seed(0)
        model = mlp(4)
        model.register_forward_hook(lambda *given: given[-1] * 2)
        return Material(model, functional.mse_loss, *data(8))

    model, loss_fn, batch, target = hooked()
    found = in_process(model=hooked, num_microbatches=4, num_steps=1)
    assert found.loss == pytest.approx(loss_fn(model(batch), target).item())
    assert found.identical or found.first_wrong_parameter == "0.0.weight"  # kept, or missed


class Forgets(Skips):
    """Does something else whenever it is called again."""

    calls = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Any:
        Forgets.calls += 1
        return super().forward(x, scale * Forgets.calls)


def test_a_model_that_does_something_else_each_time_is_refused() -> None:
    def make() -> Any:
        return Forgets(), functional.mse_loss, torch.randn(8, 6), torch.randn(8, 6)

    with refused(ModelError, "changes calls, which the forward reads between blocks"):
        verify("1f1b", model=make, num_ranks=2, num_microbatches=4, transport="in-process")
