"""`drumline train`: settings from files and flags, what is printed, and exit codes."""

from __future__ import annotations

import json
import shlex
import tomllib
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from drumline.cli.main import main
from drumline.train.config.files.settings_file import read_judged, read_settings
from drumline.train.config.settings import TrainSettings
from profiles import SOME, model_profile

SMALL = "--set model.num_layers=4 --set model.hidden=32 --set model.num_heads=2 --sequence 16 --batch 16 --device cpu"


@dataclass
class Trained:
    """Stands in for what the loop returns."""

    folder: Path = Path("out/x")
    losses: list[float] = field(default_factory=lambda: [3.0, 2.5])
    evaluations: list[Any] = field(default_factory=list)
    num_tokens: int = 64
    grad_norms: list[float] = field(default_factory=list)
    num_skipped: int = 0
    stopped: Any = None
    first_step: int = 0
    merged: str = ""


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    code = main(shlex.split(f"train {command}"))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_the_printed_config_reads_back_as_the_same_settings(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--steps 7 --lr 0.01 --ranks 4 -m 4 --schedule zb-h1 --seed 3 --out here --set optimizer.settings.eps=1e-6"
    code, out, err = run(capsys, f"{flags} --adapt --print-config")
    assert (code, err) == (0, "")
    Path("mine.toml").write_text(out)
    found = read_settings("mine.toml")
    assert (found.run.steps, found.optimizer.lr, found.num_ranks, found.num_microbatches) == (7, 0.01, 4, 4)
    assert (found.pipeline.schedule, found.run.seed, found.run.out) == ("zb-h1", 3, "here")
    assert found.optimizer.settings == {"eps": 1e-6}
    assert found.adapt.on
    assert run(capsys, "mine.toml --print-config")[1] == out
    told = json.loads(run(capsys, "--print-config --json")[1])
    assert told["batch"] == {"sequences": 32, "microbatch": 4, "sequence": 256, "accumulate": 1}


def test_wrong_settings_end_with_2_and_every_problem(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.toml").write_text("[batch]\nsequnces = 3\n")
    code, out, err = run(capsys, "mine.toml --steps 0")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        "drumline: 2 problems in the settings:",
        "  mine.toml, line 2: batch.sequnces: unknown key; did you mean sequences?",
        "  --steps: run.steps is 0; expected a whole number of 1 or more",
    ]
    told = json.loads(run(capsys, "mine.toml --json")[1])
    assert told["problems"] == [
        {
            "where": "mine.toml, line 2",
            "key": "batch.sequnces",
            "error": "unknown key",
            "expected": "",
            "fix": "did you mean sequences?",
        }
    ]
    for flags, error in {
        "--set steps=3": "--set is 'steps=3'",
        "--set run.steps=many": "--set is 'run.steps=many'",
        "--model nothing": "--model is 'nothing'",
        "--data no.txt": "--data: data.files: no.txt: no such file",
    }.items():
        code, _, err = run(capsys, flags)
        assert (code, err.splitlines()[0]) == (2, f"drumline: {error}")


def test_other_ranks_leave_the_telling_to_the_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run(capsys, "--steps 0") == (2, "", "")


def test_models_and_data_are_named_by_flags(capsys: pytest.CaptureFixture[str]) -> None:
    Path("llama").mkdir()
    Path("llama/config.json").write_text('{"model_type": "llama"}')
    Path("a.txt").write_text("text")
    Path("mine.py").write_text("def model(): ...\ndef data(): ...\n")

    def printed(flags: str) -> dict[str, Any]:
        code, out, err = run(capsys, f"{flags} --print-config")
        assert (code, err) == (0, "")
        return tomllib.loads(out)

    found = printed("--model llama --data a.txt --data a.txt --tensorboard")
    assert (found["model"]["kind"], found["model"]["path"]) == ("hf", "llama")
    assert (found["data"]["files"], found["run"]["tensorboard"]) == (["a.txt", "a.txt"], True)
    found = printed("--model mine.py:model --data mine.py:data")
    assert (found["model"]["function"], found["data"]["function"]) == ("mine.py:model", "mine.py:data")
    assert printed("--model mlp")["data"]["kind"] == "points"


def test_the_line_that_a_plan_prints_is_one_that_reads_it(capsys: pytest.CaptureFixture[str]) -> None:
    pins = "--tensor 1 --data 1 --context 1 --brief"
    planned = f"plan gpt-1.7b --hardware a100-40 --batch 16 {pins} --out mine.toml"
    assert main(shlex.split(f"{planned} --gpus 4")) == 0
    assert "Start it: drumline train mine.toml\n" in capsys.readouterr().out
    code, out, err = run(capsys, "mine.toml --print-config")
    assert (code, err, tomllib.loads(out)["mesh"]["pipeline"]) == (0, "", 4)
    assert main(shlex.split(f"{planned} --nodes 2")) == 0
    line = " ".join(capsys.readouterr().out.split())
    assert "torchrun --nnodes 2 --nproc-per-node 8" in line
    assert "-m drumline train mine.toml" in line
    assert (
        main(shlex.split("plan gpt-1.7b --hardware a100-40 --batch 16 --gpus 4 --tensor 2 --brief --out t.toml")) == 0
    )
    capsys.readouterr()
    code, out, err = run(capsys, "t.toml --print-config")
    assert (code, err, tomllib.loads(out)["mesh"]["tensor"]) == (0, "", 2)


def test_a_plan_of_a_profile_becomes_a_config_with_the_plan_beside_it(capsys: pytest.CaptureFixture[str]) -> None:
    profiled = replace(model_profile([0.001, 0.004], overheads=SOME), source="make.py:model")
    profiled.save("profile.json")
    assert main(shlex.split("plan profile.json -r 2 --batch 4 --seconds 0 --out mine.toml")) == 0
    assert capsys.readouterr().out.endswith("wrote mine.toml\nwrote mine.json\n\nStart it: drumline train mine.toml\n")
    judged = read_judged("mine.toml")
    found, plan = judged.settings, judged.plan
    assert (found.model.function, found.model.arguments) == (
        "drumline.train.profiled_model:model",
        {"source": "make.py:model"},
    )
    assert plan is not None
    assert (found.num_ranks, found.num_microbatches) == (2, plan.num_microbatches)
    assert run(capsys, "mine.toml --ranks 3 --print-config")[2].splitlines() == [
        "drumline: --ranks: mesh.pipeline is 3",
        "  expected 2, as planned; leave it out, or plan again",
    ]


@pytest.mark.torch
def test_a_run_starts_with_the_settings_and_tells_what_came_of_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TrainSettings] = []

    def start(settings: TrainSettings, source: Any) -> Trained:
        seen.append(settings)
        return Trained(first_step=len(seen) - 1)

    monkeypatch.setattr("drumline.train.start.start", start)
    code, out, _ = run(capsys, "--steps 2 --ranks 2")
    assert (code, seen[0].run.steps) == (0, 2)
    assert "2 steps: loss 3 to 2.5, 64 tokens\n" in out
    assert "2 steps: loss 3 to 2.5, 64 tokens with those of the run it continues\n" in run(capsys, "--steps 3")[1]
    assert "drumline report out/x" in out
    told = json.loads(run(capsys, "--json")[1])
    assert (told["losses"], told["folder"]) == ([3.0, 2.5], "out/x")


@pytest.mark.features("check", "precision", "record")
@pytest.mark.torch
def test_a_dry_run_tells_all_and_trains_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stand_in_run import stand_in

    stand_in(monkeypatch)
    code, out, err = run(capsys, f"--dry-run {SMALL} --steps 3")
    assert (code, err) == (0, "")
    for words in (
        "2 stages on 2 ranks",
        "1f1b: 4 microbatches of 4 x 16, 256 tokens in an optimizer step, 3 steps",
        "It is proven to run",
        "Simulated: bubble",
        "rank  weights",
        "torchrun --standalone --nproc-per-node 2 -m drumline train --set run.steps=3 --set batch.sequences=16",
    ):
        assert words in out
    assert not Path("out").exists()
    told = json.loads(run(capsys, f"--dry-run {SMALL} --json")[1])
    assert len(told["rank_bytes"]) == len(told["stages"]) == 2
    line = shlex.split(told["torchrun"])
    again = json.loads(run(capsys, shlex.join(line[line.index("train") + 1 :]) + " --print-config --json")[1])
    assert again == json.loads(run(capsys, f"{SMALL} --print-config --json")[1])
