"""Checkpoints: bits come back on any ranks, damage is found, and nothing half written is ever seen."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import drumline as dl
from drumline.checkpoint.folder import checkpoints, name_of
from drumline.checkpoint.saves import Saves, saves
from drumline.checkpoint.staging import StagedFile
from drumline.core.errors import ModelError, RecordError, RunError, WaitTimeout
from drumline.features.saving import saver
from drumline.model.weights.files import Weights
from drumline.pipeline.pipeline import Pipeline
from matrices import left, long
from refused import refused
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.features("saving")]

HERE: dict[str, Any] = {"transport": "in-process", "num_ranks": 2, "num_microbatches": 4, "schedule": "1f1b"}


class Tied(nn.Module):
    """An embedding that is the head as well, with a dropout and a running statistic between."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.hidden = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)])
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for module in self.hidden:
            x = x + module(x)
        made: torch.Tensor = self.head(self.norm(x))
        return made


def batches(number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(11, (16,), generator=generator) for _ in range(2)) for _ in range(number)]  # type: ignore[misc]


def made(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Pipeline, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Tied().to(dtype)
    given = HERE | {"example": batches(1)[0][0]} | settings
    pipe = Pipeline(model, loss_fn=functional.cross_entropy, **given)
    return pipe, pipe.optimizer(torch.optim.AdamW, lr=1e-2, betas=(0.8, 0.9))


def trained(pipe: Pipeline, optimizer: torch.optim.Optimizer, data: list[Any]) -> list[float]:
    losses = []
    for tokens, wanted in data:
        loss = pipe.step(tokens, target=wanted).loss
        assert loss is not None
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def whole(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: entry.clone() for name, entry in pipe.state_dict().items()}


@pytest.mark.features("precision")
@pytest.mark.parametrize(
    ("settings", "then"),
    [
        ({}, {"schedule": "gpipe"}),
        ({}, {"num_ranks": 1}),
        ({"schedule": "zb-v"}, {"schedule": "1f1b", "num_ranks": 3}),
        ({"precision": "bf16", "dtype": torch.bfloat16, "master_weights": True}, {"schedule": "zb-h1"}),
        ({"precision": "fp16"}, {}),
        *left(({"precision": "bf16"}, {})),
    ],
)
def test_training_goes_on_bit_for_bit_whatever_ranks_saved(
    tmp_path: Path, settings: dict[str, Any], then: dict[str, Any]
) -> None:
    data = batches(6)
    pipe, optimizer = made(**settings)
    trained(pipe, optimizer, data[:3])
    saving = pipe.save(tmp_path, extra={"position": 3})
    losses = trained(pipe, optimizer, data[3:])  # while it is being written
    saving.wait()
    again, fresh = made(**settings | then)
    loaded = again.load(tmp_path)
    assert (loaded.step, loaded.extra, loaded.skipped) == (3, {"position": 3}, ())
    resumed = trained(again, fresh, data[3:])
    # Another schedule may add gradients up in another order.
    assert resumed == pytest.approx(losses, rel=1e-6) if then else resumed == losses
    mine, theirs = whole(pipe), whole(again)
    for name in some(mine.keys() | theirs.keys()):
        exact = 0.0 if not then else 1e-4
        torch.testing.assert_close(mine[name], theirs[name], rtol=exact, atol=exact)
    scales = [None if pipeline.scaler is None else pipeline.scaler.state_dict() for pipeline in (pipe, again)]
    assert scales[0] == scales[1]


def checksums(checkpoint: Path) -> dict[str, int]:
    found = json.loads((checkpoint / "manifest.json").read_text())["content"]["tensors"]
    return {name: value for file in found.values() for name, value in file.items()}


def test_what_is_loaded_has_the_checksums_of_what_was_saved(tmp_path: Path) -> None:
    pipe, optimizer = made()
    trained(pipe, optimizer, batches(2))
    first = checksums(pipe.save(tmp_path / "a", wait=True).path)
    again, _ = made(num_ranks=4, schedule="zb-h1")
    again.load(tmp_path / "a")
    assert checksums(again.save(tmp_path / "b", wait=True).path) == first
    assert any("exp_avg" in name for name in first)


def test_other_random_generators_of_the_process_go_on_too(tmp_path: Path) -> None:
    pipe, _ = made()
    saving = pipe.save(tmp_path, wait=True)
    drawn = torch.rand(2).tolist(), np.random.rand()
    pipe.load(saving.path)
    assert (torch.rand(2).tolist(), np.random.rand()) == drawn


def damaged_by(path: Path, change: Callable[[bytearray], Any]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def _flip(content: bytearray) -> None:
    content[-3] ^= 16


def _cut(content: bytearray) -> None:
    del content[-7:]


@pytest.mark.parametrize(
    ("file", "change", "word"),
    [
        ("model-00001-of-00001.safetensors", _flip, "checksum differs"),
        ("training-00001-of-00001.safetensors", _flip, "checksum differs"),
        ("model-00001-of-00001.safetensors", _cut, "bytes"),
        ("model-00001-of-00001.safetensors", None, "missing"),
        ("manifest.json", lambda content: content.__setitem__(slice(-12, -11), b"7"), "checksum|manifest"),
        ("manifest.json", lambda content: content.clear(), "manifest"),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(
    tmp_path: Path, file: str, change: Any, word: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, optimizer = made()
    pipe.save(tmp_path, wait=True)
    trained(pipe, optimizer, batches(1))
    newest = pipe.save(tmp_path, wait=True).path
    if change is None:
        (newest / file).unlink()
    else:
        damaged_by(newest / file, change)
    loaded = pipe.load(tmp_path)
    assert loaded.step == 0
    assert len(loaded.skipped) == 1
    assert re.search(word, loaded.skipped[0])
    assert "passed over a damaged checkpoint" in caplog.text
    with refused(RecordError, "no checkpoint that is whole"):
        pipe.load(newest)


def test_old_checkpoints_and_leftovers_are_removed(tmp_path: Path) -> None:
    pipe, optimizer = made()
    left = tmp_path / ".step-00000009.abcd.part"
    left.mkdir()
    for _ in range(4):
        trained(pipe, optimizer, batches(1))
        pipe.save(tmp_path, keep=2)
    pipe.close()  # waits for the last
    assert sorted(path.name for path in tmp_path.iterdir()) == [name_of(3), name_of(4)]


def test_a_checkpoint_is_invisible_until_all_of_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, _ = made()
    seen: list[list[Path]] = []
    complete = saver._complete

    def looked(job: Any) -> None:
        seen.append(checkpoints(tmp_path))
        complete(job)

    monkeypatch.setattr(saver, "_complete", looked)
    pipe.save(tmp_path, wait=True)
    assert seen == [[]]
    assert len(checkpoints(tmp_path)) == 1


def test_a_disk_that_refuses_leaves_the_earlier_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, optimizer = made()
    pipe.save(tmp_path, wait=True)
    trained(pipe, optimizer, batches(1))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(StagedFile, "write", full)
        failing = pipe.save(tmp_path)
        with refused(RunError, "No space left on device"):
            failing.wait()
    assert failing.done
    assert [path.name for path in tmp_path.iterdir()] == [name_of(0)]
    trained(pipe, optimizer, batches(1))
    assert pipe.save(tmp_path, wait=True).path.is_dir()  # the next one may succeed


def test_waiting_for_a_checkpoint_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, _ = made()
    monkeypatch.setattr(saver, "_told_by", lambda process: f"never-{os.urandom(2).hex()}")
    monkeypatch.setattr(saver.Saver, "_write", lambda *_: None)
    pipe._run.crew.timeout = 0.05
    saving = pipe.save(tmp_path)
    with refused(WaitTimeout, "process 0 to write its files"):
        saving.wait(timeout=30)


def test_what_cannot_be_saved_or_loaded_says_why(tmp_path: Path) -> None:
    pipe, optimizer = made()
    with refused(RunError, r"extra\['model'\] is an object of the class object", expected="numbers, texts"):
        pipe.save(tmp_path, extra={"model": object()})
    with refused(RecordError, "keep is 0"):
        pipe.save(tmp_path, keep=0)
    with refused(RecordError, "holds no checkpoint"):
        pipe.load(tmp_path / "nowhere")
    assert pipe.load(tmp_path / "nowhere", missing_ok=True) is None
    (tmp_path / "file").write_text("")
    with refused(RecordError, "cannot be written"):
        pipe.save(tmp_path / "file")
    trained(pipe, optimizer, batches(1))
    pipe.save(tmp_path / "good", wait=True)
    other = Pipeline(Tied(), loss_fn=functional.cross_entropy, **HERE | {"example": batches(1)[0][0]})
    kept = other.optimizer(torch.optim.SGD, lr=0.1)
    with refused(ModelError, "state of AdamW"):
        other.load(tmp_path / "good")
    assert other.load(tmp_path / "good", optimizers=False).step == 1
    assert kept.state_dict()["state"] == {}


def _on_two_processes(folder: str) -> tuple[list[float], list[float], list[str], float]:
    data = batches(5)
    pipe, optimizer = made(transport="auto", num_ranks=None)
    trained(pipe, optimizer, data[:2])
    with refused(RecordError, "cannot be written"):  # on all ranks alike, and they train on
        pipe.save(__file__)
    saving = pipe.save(folder, extra={"at": 2}, keep=2)
    losses = trained(pipe, optimizer, data[2:])
    path = saving.wait()
    pipe.close()
    again, fresh = made(transport="gloo", num_ranks=None)
    loaded = again.load(path)
    assert loaded.extra == {"at": 2}
    resumed = trained(again, fresh, data[2:])
    again.close()
    return losses, resumed, sorted(file.name for file in path.iterdir()), saving.seconds_blocked


def test_a_pipeline_is_what_training_asks_for_to_save(tmp_path: Path) -> None:
    pipe, _ = made()
    with pipe:
        kept: Saves = pipe  # mypy compares the signatures
        assert saves(pipe) is kept
        assert kept.load(tmp_path, missing_ok=True) is None
        kept.save(tmp_path, step=7, extra={"seen": 3}, keep=None, files={"note.txt": "mine"}).wait()
        loaded = kept.load(tmp_path, missing_ok=False)
    assert loaded is not None
    assert (loaded.step, loaded.extra, (loaded.path / "note.txt").read_text()) == (7, {"seen": 3}, "mine")


@long
def test_two_processes_write_one_checkpoint_and_go_on_from_it(tmp_path: Path) -> None:
    results = dl.launch(_on_two_processes, str(tmp_path), num_ranks=2)
    for losses, resumed, files, blocked in some(results):
        assert losses == resumed
        assert files == [
            "manifest.json",
            *(f"model-0000{number}-of-00002.safetensors" for number in (1, 2)),
            "model.safetensors.index.json",
            *(f"training-0000{number}-of-00002.safetensors" for number in (1, 2)),
        ]
        assert blocked > 0
    pipeline, optimizer = made(num_ranks=1)
    assert pipeline.load(tmp_path).step == 2
    assert trained(pipeline, optimizer, batches(5)[2:]) == pytest.approx(results[0][0], rel=1e-6)


def test_transformers_loads_a_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.randint(31, (4, 6))
    wanted = model(tokens).logits
    pipe = Pipeline(model, **HERE | {"example": {"input_ids": tokens, "labels": tokens}})
    path = pipe.save(tmp_path, wait=True).path
    config.save_pretrained(path)
    again = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(again(tokens).logits, wanted)


def test_a_process_without_tensors_writes_a_file_that_others_can_read(tmp_path: Path) -> None:
    staged = StagedFile()
    staged.take({})
    assert staged.write(tmp_path / "none.safetensors") == {}
    assert Weights(tmp_path / "none.safetensors").tensors == {}
    assert (tmp_path / "none.safetensors").stat().st_size == staged.num_bytes > 0
