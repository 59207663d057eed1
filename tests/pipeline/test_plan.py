"""From a model to its profile, its plan and the pipeline that runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import drumline as dl
from drumline.cli.main import main
from drumline.core.errors import BatchError, ModelError, PlanError, UsageError
from drumline.engine.model.sources import material_from_config
from drumline.pipeline.pipeline import Pipeline
from drumline.pipeline.profiling import _check_rows, profile_model
from drumline.plan.device.blocks import OpTimes
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.overheads import Overheads
from drumline.plan.device.plan import Plan
from drumline.plan.device.planner import plan
from refused import refused
from some import some
from torch_models import WIDTH, Reference, data, mlp

pytestmark = pytest.mark.torch

ROWS = 8
FILE = """
import torch
from torch import nn

def make():
    torch.manual_seed(1)
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.GELU(), nn.Dropout(0.0)) for _ in range(4)]
    return nn.Sequential(*blocks), nn.functional.mse_loss, torch.randn(8, 6), torch.randn(8, 6)
"""


def material() -> tuple[nn.Module, Any, torch.Tensor, torch.Tensor]:
    return mlp(4), functional.mse_loss, *data(ROWS)


@pytest.fixture(scope="module")
def profile() -> ModelProfile:
    return profile_model(material, microbatch_sizes=[2, 1], num_ranks=2, num_runs=2)


@pytest.fixture(scope="module")
def steady(profile: ModelProfile) -> ModelProfile:
    """The same bytes with seconds that were not measured: a microsecond a row, so that plans are always the same."""
    sizes = []
    for rows, item in profile.sizes:
        second = rows * 1e-6
        times = OpTimes(second, 2 * second, second, second, taped=second)
        layers = tuple(replace(layer, times=times, spreads=None) for layer in item.layers)
        sizes.append((rows, replace(item, layers=layers, overhead=OpTimes(0.0, 0.0, 0.0, 0.0))))
    return replace(profile, sizes=tuple(sizes), overheads=Overheads(), links=(), paces=())


def planned(profile: ModelProfile, **settings: Any) -> Plan:
    return plan(profile, num_ranks=2, batch=ROWS, seconds=0.0, **settings).best


@pytest.mark.features("record")
def test_a_profile_has_everything_that_a_plan_needs(profile: ModelProfile) -> None:
    assert profile.rows == (1, 2)
    assert [layer.name for layer in profile.layers] == ["0", "1", "2", "3"]
    for _, each in some(profile.sizes):
        assert sum(layer.times.total(split=split) for layer in each.layers for split in (False, True)) > 0
        assert all(some(layer.spreads is not None for layer in each.layers))
    assert profile.sizes[1][1].layers[0].activation_bytes == 2 * profile.sizes[0][1].layers[0].activation_bytes
    assert [(link.source, link.target) for link in profile.links] == [(0, 1), (1, 0)]
    assert all(link.line.bytes_per_second > 0 and len(link.points) == 4 for link in profile.links)
    assert profile.overheads.action > 0
    assert profile.overheads.send.at(100) > 0
    assert len(profile.paces) == 2
    assert all(layer.times.taped is not None for layer in profile.layers)
    assert (profile.num_ranks, profile.transport) == (2, "shared-memory")
    assert ModelProfile.from_json(profile.to_json()) == profile


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
@pytest.mark.parametrize("checkpoint", ["none", "full"])
def test_a_planned_pipeline_has_the_gradients_of_one_process(
    steady: ModelProfile, schedule: str, checkpoint: str, tmp_path: Path
) -> None:
    decided = planned(steady, schedules=[schedule], checkpoint=[checkpoint])
    path = tmp_path / "plan.json"
    decided.save(path)
    model, loss_fn, batch, target = material()
    assert isinstance(model, nn.Sequential)
    reference = Reference(model, decided.program, loss_fn, balance=decided.counts)
    expected = reference.step(batch, target)
    pipe = Pipeline(model, loss_fn=loss_fn, plan=path)
    loss = pipe.step(batch, target=target).loss
    assert loss is not None
    assert torch.equal(loss, expected)
    reference.compare(pipe, exact=True)
    assert (pipe.program.name, pipe.num_ranks) == (schedule, 2)
    held = pipe._engine.assembly.checkpointed
    assert held == (frozenset("0123") if checkpoint == "full" else frozenset())


def test_a_searched_program_in_a_plan_runs_too(steady: ModelProfile) -> None:
    found = plan(steady, num_ranks=2, batch=ROWS, schedules=["1f1b"], seconds=1.0)
    model, loss_fn, batch, target = material()
    pipe = Pipeline(model, loss_fn=loss_fn, plan=found)
    pipe.step(batch, target=target)
    assert pipe.program.format() == found.best.program.format()


@pytest.mark.features("record")
def test_bytes_that_a_plan_predicts_are_what_ranks_hold(steady: ModelProfile) -> None:
    for schedule, checkpoint in (("1f1b", "none"), ("1f1b", "full"), ("zb-h1", "none")):
        decided = planned(steady, schedules=[schedule], checkpoint=[checkpoint])
        model, loss_fn, batch, target = material()
        pipe = Pipeline(model, loss_fn=loss_fn, plan=decided, weigh=True)
        pipe.step(batch, target=target)
        measured = pipe.timeline().peak_stash
        assert measured is not None
        for rank_bytes, stash in zip(decided.rank_bytes, measured, strict=True):
            assert rank_bytes.activations == pytest.approx(stash, rel=0.1), (schedule, checkpoint)
        weights = [sum(param.nbytes for param in stage.parameters) for stage in pipe._engine.stages()]
        assert sum(rank_bytes.weights for rank_bytes in decided.rank_bytes) == sum(weights)


def test_a_plan_decides_alone(steady: ModelProfile) -> None:
    decided = planned(steady)
    for beside in (
        {"schedule": "gpipe"},
        {"num_microbatches": 4},
        {"balance": [2, 2]},
        {"checkpoint": "full"},
        {"cuts": ["2"]},
    ):
        name = next(iter(beside))
        with refused(UsageError, f"{name} is .*, and plan is "):
            Pipeline(mlp(4), loss_fn=functional.mse_loss, plan=decided, **beside)
    with refused(UsageError, "num_ranks is 3", expected="2 ranks"):
        Pipeline(mlp(4), loss_fn=functional.mse_loss, plan=decided, num_ranks=3)
    with refused(UsageError, "plan is 3"):
        Pipeline(mlp(4), loss_fn=functional.mse_loss, plan=3)  # type: ignore[arg-type]
    with refused(PlanError, "No such file"):
        Pipeline(mlp(4), loss_fn=functional.mse_loss, plan="no-such-plan.json")


def test_a_plan_of_another_model_is_refused(steady: ModelProfile) -> None:
    decided = planned(steady)
    wider = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    for other in (mlp(5), wider):
        with refused(PlanError, "the plan is for Sequential", expected="the model that was profiled"):
            Pipeline(other, loss_fn=functional.mse_loss, plan=decided)
    frozen = mlp(4)
    frozen[0].requires_grad_(False)
    with refused(PlanError, "names, shapes or what is trained differ"):
        Pipeline(frozen, loss_fn=functional.mse_loss, plan=decided)


@pytest.mark.features("record")
def test_profile_and_plan_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "own.py").write_text(FILE)
    source, found, decided = f"{tmp_path / 'own.py'}:make", tmp_path / "profile.json", tmp_path / "plan.json"
    words = ["--microbatch-sizes", "1,2", "--runs", "1", "--out", str(found)]
    assert main(["profile", source, *words, "--json"]) == 0
    table = json.loads(capsys.readouterr().out)
    assert (table["format"], table["num_ranks"], len(table["sizes"])) == ("drumline profile", 2, 2)
    assert main(["plan", str(found), "--ranks", "2", "--batch", "8", "--seconds", "0", "--out", str(decided)]) == 0
    assert "chosen" in capsys.readouterr().out
    torch.manual_seed(1)
    pipe = dl.Pipeline(mlp(4), loss_fn=functional.mse_loss, plan=decided)
    assert pipe.step(torch.randn(8, 6), target=torch.randn(8, 6)).loss is not None


class Joined(nn.Module):
    """A model that is no chain: it has to be traced on an example."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first: torch.Tensor = self.first(x)
        second: torch.Tensor = self.second(first)
        return first + second


def test_one_row_is_enough_to_profile_a_model_that_is_traced() -> None:
    def one_row() -> tuple[nn.Module, Any, torch.Tensor, torch.Tensor]:
        return Joined(), functional.mse_loss, torch.ones(1, WIDTH), torch.zeros(1, WIDTH)

    found = profile_model(one_row, microbatch_sizes=[1], num_ranks=1, num_runs=1)
    assert [(rows, len(sizes.layers)) for rows, sizes in found.sizes] == [(1, 2)]


def test_what_cannot_be_profiled_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with refused(BatchError, "the batch has 8 rows for microbatches of 16", expected="at least 16 rows"):
        _check_rows(data(8)[0], 16)
    with refused(UsageError, "0 ranks"):
        profile_model(material, num_ranks=0)
    for source, reason in (("nothing.py:make", "no such file"), ("nothing.json", "No such file"), ("model", "FILE.py")):
        assert main(["profile", source]) == 2
        assert reason in capsys.readouterr().err


def test_a_config_alone_makes_a_model_and_text(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    sizes = {"vocab_size": 31, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2}
    more = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 16}
    path.write_text(json.dumps({"model_type": "llama", **sizes, **more}))
    made = material_from_config(str(path), rows=3, length=5)
    assert type(made.model).__name__ == "LlamaForCausalLM"
    assert made.batch["input_ids"].shape == (3, 5)
    with refused(UsageError, "rows of 17 tokens", expected="1 to 16"):
        material_from_config(str(path), rows=1, length=17)
    for text, reason in (("{", "not JSON"), ("{}", "has no model_type"), ('{"model_type": "nope"}', "nope")):
        path.write_text(text)
        with refused(ModelError, reason):
            material_from_config(str(path), rows=1)
    with refused(ModelError, "No such file"):
        material_from_config(str(tmp_path / "none.json"), rows=1)
