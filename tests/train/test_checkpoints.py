"""Checkpoints of a training run: one that continues takes the steps that the first would have taken, bit for bit."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.checkpoint.staging import StagedFile
from drumline.core.errors import RunError, UsageError
from drumline.core.measured.run import read_run
from drumline.model.weights.files import Weights
from drumline.pipeline.pipeline import Pipeline
from drumline.train.config.settings import (
    BatchSettings,
    CheckpointSettings,
    DataSettings,
    EvaluationSettings,
    LengthSettings,
    MeshSettings,
    ModelSettings,
    OptimizerGroup,
    OptimizerSettings,
    PipelineSettings,
    RunSettings,
    TrainSettings,
)
from drumline.train.loop import run
from drumline.train.loop.evaluate import Evaluation
from drumline.train.loop.progress import Progress, Told, Update
from drumline.train.loop.run import run_training
from drumline.train.loop.training import TrainResult
from drumline.train.models.companion_files import files_beside
from drumline.train.start import start
from extras import needed
from matrices import left
from refused import refused
from some import some

pytestmark = [
    pytest.mark.torch,
    pytest.mark.features("capture", "check", "lengths", "precision", "record", "saving", "stream"),
]

GPT = ModelSettings(num_layers=2, hidden=16, num_heads=2, dropout=0.1)
IN_TURN = PipelineSettings(transport="in-process", device="cpu")


def settings_for(folder: Path, **tables: Any) -> TrainSettings:
    given = TrainSettings(
        model=GPT,
        batch=BatchSettings(sequences=8, microbatch=2, sequence=24),
        pipeline=IN_TURN,
        evaluation=EvaluationSettings(every=3, batches=1),
        checkpoint=CheckpointSettings(every=2, keep=9),
        run=RunSettings(steps=4, out=str(folder)),
    )
    return replace(given, **tables)


def trained(settings: TrainSettings) -> TrainResult:
    return run_training(settings, tell=lambda told: None)


@pytest.mark.parametrize(
    "tables",
    [
        {},
        *left(
            {
                "lengths": LengthSettings(how="padded", search=True),
                "optimizer": OptimizerSettings(
                    kind="SGD",
                    settings={"momentum": 0.9},
                    groups=(OptimizerGroup(("*.bias",), kind="AdamW"),),
                ),
                "batch": BatchSettings(sequences=8, microbatch=2, sequence=64, accumulate=2),
            }
        ),
    ],
)
def test_a_run_that_continues_ends_where_the_first_did(tmp_path: Path, tables: dict[str, Any]) -> None:
    whole = trained(settings_for(tmp_path / "whole", **tables))
    half = tmp_path / "whole" / "checkpoints" / "step-00000002"
    again = settings_for(tmp_path / "again", checkpoint=CheckpointSettings(resume=str(half)), **tables)
    rest = trained(again)
    assert (rest.first_step, rest.losses) == (2, whole.losses[2:])
    assert (rest.num_tokens, rest.num_padded) == (whole.num_tokens, whole.num_padded)
    assert rest.evaluations[-1].loss == whole.evaluations[-1].loss
    last = Path("checkpoints", "step-00000004", "model-00001-of-00001.safetensors")
    assert (tmp_path / "whole" / last).read_bytes() == (tmp_path / "again" / last).read_bytes()


def test_a_run_continues_on_other_ranks_by_another_schedule(tmp_path: Path) -> None:
    whole = trained(settings_for(tmp_path / "whole"))
    half = str(tmp_path / "whole" / "checkpoints" / "step-00000002")
    other = settings_for(
        tmp_path / "other",
        mesh=MeshSettings(pipeline=4),
        pipeline=replace(IN_TURN, schedule="zb-h1"),
        checkpoint=CheckpointSettings(resume=half, at_end=False),
    )
    assert trained(other).losses == pytest.approx(whole.losses[2:], rel=1e-6)
    assert not (tmp_path / "other" / "checkpoints").exists()


def test_what_cannot_be_continued_is_refused(tmp_path: Path) -> None:
    nowhere = settings_for(tmp_path / "a", checkpoint=CheckpointSettings(resume=str(tmp_path / "nowhere")))
    with refused(UsageError, r"checkpoint\.resume: .*nowhere holds no checkpoint"):
        start(nowhere, train=lambda settings: pytest.fail("a rank was started"))
    trained(settings_for(tmp_path / "done", run=RunSettings(steps=2, out=str(tmp_path / "done"))))
    over = settings_for(
        tmp_path / "b",
        checkpoint=CheckpointSettings(resume=str(tmp_path / "done")),
        run=RunSettings(steps=2, out=str(tmp_path / "b")),
    )
    with refused(UsageError, "has made 2 steps already", fix="--steps 4"):
        trained(over)


@pytest.mark.parametrize("method", ["save", "load"])
def test_a_run_whose_pipeline_cannot_save_is_refused_before_its_first_step(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "Pipeline", type("Unsaved", (Pipeline,), {method: None}))
    with refused(UsageError, "nothing that saves checkpoints is attached"):
        run_training(settings_for(tmp_path / "run"), tell=lambda told: pytest.fail(f"a step ran: {told}"))


def test_a_run_goes_on_without_checkpoints_that_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Told] = []

    def tell(update: Told) -> None:
        told.append(update)
        (tmp_path / "run" / "checkpoints").touch()  # a file in the folder's place

    with refused(RunError, "checkpoints cannot be written"):
        run_training(settings_for(tmp_path / "run"), tell=tell)
    assert [update.step for update in told if isinstance(update, Update)] == [1, 2, 3, 4]
    assert caplog.text.count("training continues without a checkpoint: ") == 1  # after 2; after 4 it is an error


def test_a_full_disk_delays_what_stands_beside_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The disk is full while steps 2 to 4 of 6 run, of which 3 is evaluated, and 2 and 4 are to be saved."""
    disk, write, staged = {"is_full": False}, os.write, StagedFile.write

    def full() -> None:
        if disk["is_full"]:
            raise OSError(28, "No space left on device")

    def written(file: int, data: bytes) -> int:
        full()
        return write(file, data)

    def stored(file: StagedFile, path: Path) -> dict[str, int]:
        full()
        return staged(file, path)

    monkeypatch.setattr(os, "write", written)
    monkeypatch.setattr(StagedFile, "write", stored)
    seen: list[int] = []

    def tell(told: Told) -> None:
        if isinstance(told, Update):
            seen.append(told.step)
            disk["is_full"] = 1 <= told.step < 5

    run = RunSettings(steps=6, out=str(tmp_path / "run"))
    evaluation = EvaluationSettings(every=1, batches=1)
    run_training(settings_for(tmp_path / "run", run=run, evaluation=evaluation), tell=tell)
    assert seen == [1, 2, 3, 4, 5, 6]
    lines = (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == seen, "all of them, in order"
    steps = [metric["train/step"] for metric in read_run(tmp_path / "run").metrics()]
    assert steps == seen
    told = capsys.readouterr().err
    for what in some(["the log", "the record of the steps"]):
        assert told.count(f"cannot write {what} to ") == told.count(f"{what} continues in ") == 1
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000006"]


def test_progress_on_a_full_disk_ends_nothing() -> None:
    with Path("/dev/full").open("w") as stream:
        progress = Progress(5, stream=stream)
        progress(Evaluation(3, 1.25, 640, 0.5))
        progress.close()
        with pytest.raises(OSError, match="No space left"):
            stream.flush()
        with Path(os.devnull).open("w") as nothing:
            os.dup2(nothing.fileno(), stream.fileno())  # for the rest that is written at the end


def chat_tokenizer(folder: Path) -> None:
    """Write a tokenizer of letters, with a template for conversations."""
    tokenizers: Any = needed("tokenizers", extra="hf")
    transformers: Any = needed("transformers", extra="hf")
    letters = {letter: at for at, letter in enumerate(["<end>", *"abcdefghijklmnopqrstuvwxyz .?"])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(letters, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="?")
    made.chat_template = "{% for one in messages %}{{ one['content'] }}<end>{% endfor %}"
    made.save_pretrained(folder)


def test_transformers_loads_every_checkpoint_with_all_that_belongs_to_it(tmp_path: Path) -> None:
    transformers: Any = needed("transformers", extra="hf")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    source = tmp_path / "llama"
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(source)
    transformers.GenerationConfig(max_new_tokens=7).save_pretrained(source)
    chat_tokenizer(source)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("tools")
    (tmp_path / "mine.txt").write_text("in the beginning there was a schedule.\n\n" * 40)
    run = RunSettings(steps=2, out=str(tmp_path / "run"))

    def gone(told: Told) -> None:
        shutil.rmtree(source, ignore_errors=True)  # the run depends on it no longer

    given = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    (source / "adapter_config.json").write_text("{}")  # PEFT, where it is installed, would read it
    run_training(
        settings_for(
            tmp_path / "run",
            model=ModelSettings(kind="hf", path=str(source)),
            data=DataSettings(files=(str(tmp_path / "mine.txt"),)),
            evaluation=EvaluationSettings(every=0),
            checkpoint=CheckpointSettings(every=1),
            run=run,
        ),
        tell=gone,
    )
    for step in some([1, 2]):
        path = tmp_path / "run" / "checkpoints" / f"step-{step:08d}"
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        assert model.dtype == torch.float32, "what was trained, not what it began with"
        found = model.state_dict()
        assert found.keys() == given.keys()
        trained_one = "model.layers.0.mlp.up_proj.weight"
        assert not torch.equal(found[trained_one], given[trained_one].float())
        stored = Weights(path / "model-00001-of-00001.safetensors").tensors
        assert torch.equal(found[trained_one], stored[trained_one].read())
        assert model.generation_config.max_new_tokens == 7
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi<end>"
        assert (path / "chat_template.jinja").is_file()
        assert (path / "additional_chat_templates" / "tools.jinja").read_text() == "tools"
        assert not (path / "adapter_config.json").exists()


def test_the_tokenizer_of_a_checkpoint_is_the_one_that_was_trained_with(tmp_path: Path) -> None:
    for name, files in {
        "model": {"config.json": '{"torch_dtype": "float16"}', "vocab.txt": "its", "special_tokens_map.json": "its"},
        "other": {
            "tokenizer.json": "mine",
            "chat_template.jinja": "mine",
            "config.json": "no",
            "model.safetensors": "",
        },
    }.items():
        (tmp_path / name).mkdir()
        for key, text in files.items():
            (tmp_path / name / key).write_text(text)
    hf = ModelSettings(kind="hf", path=str(tmp_path / "model"))
    mine = TrainSettings(model=hf, data=DataSettings(tokenizer=str(tmp_path / "other")))
    found = files_beside(mine)
    assert sorted(found) == ["chat_template.jinja", "config.json", "tokenizer.json"]
    assert found["tokenizer.json"] == b"mine"
    assert json.loads(found["config.json"]) == {"torch_dtype": "float32"}
    assert sorted(files_beside(TrainSettings(model=hf))) == ["config.json", "special_tokens_map.json", "vocab.txt"]
    alone = ModelSettings(kind="hf", path=str(tmp_path / "model" / "config.json"))
    assert list(files_beside(TrainSettings(model=alone))) == ["config.json"]
