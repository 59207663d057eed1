"""Exported stages compute what PyTorch computes, for every kind of model; from `drumline train` to Triton's client."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tritonclient.grpc as triton
from torch import nn

from drumline.cli.main import main
from drumline.core.errors import ModelError, UsageError
from drumline.serve.export.check import TOLERANCE, Subject, plain_outputs
from drumline.serve.export.export import export
from drumline.serve.export.whole import block_names
from drumline.serve.session import Session
from drumline.serve.wire.manifest import Manifest, read_manifest
from drumline.serve.wire.tensors import Array
from drumline.train.export_models import finished_model
from extras import needed
from matrices import long
from refused import refused
from served.services import serving
from some import some

pytestmark = [pytest.mark.torch, pytest.mark.slow]
TINY = ["model.num_layers=2", "model.hidden=32", "model.num_heads=2", "batch.sequence=32", "batch.sequences=4"]
TINY += ["batch.microbatch=2", "run.steps=2", 'pipeline.transport="in-process"', "checkpoint.at_end=true"]
MODELS = """
import torch
from torch import nn


def mlp():
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.ReLU()) for _ in range(4))), torch.randn(2, 6)


def transposed():
    class Transposed(nn.Module):
        def forward(self, x):
            return x.T

    return Transposed(), torch.randn(2, 6)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mul):  # as operations inside are called
        hidden = self.first(x) * mul + 1
        return {"add": self.last(hidden * 2), "loss": None, "linear": hidden}


def named():
    return Named(), {"x": torch.randn(2, 4), "mul": torch.ones(2, 1)}


def fails():
    raise ValueError("no weights here")


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return self.inner(x - x.mean(0))


def mixing():
    return Mixing(), torch.randn(1, 4)


def half():
    return nn.Sequential(nn.Linear(4, 4)).half(), torch.randn(2, 4).half()


class Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(5, 4), nn.Linear(12, 2)

    def forward(self, codes):
        return self.last(self.table(codes).flatten(1))


def columns():
    return Columns(), torch.randint(5, (2, 3))


def few_positions():
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.places = nn.Embedding(8, 4)

        def forward(self, tokens):
            return self.places(torch.arange(tokens.shape[1])).expand(len(tokens), -1, -1)

    return Positions(), torch.randint(5, (2, 6))


def scalar():
    return Mixing(), {"x": torch.tensor(1.0)}


def empty():
    return Mixing(), torch.randn(0, 4)


def no_model():
    return 3, torch.randn(2, 4)
"""


def computed(folder: Path, manifest: Manifest, inputs: dict[str, torch.Tensor]) -> Array:
    """Return what the stages compute, one after the other."""
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    for number in range(len(manifest.stages)):
        arrays = Session(folder, manifest, number).run(arrays)
    return arrays["output"]


def check(folder: Path, model: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    """Compare stages with PyTorch."""
    found, (right,) = computed(folder, read_manifest(folder), inputs), plain_outputs(model, inputs)
    assert np.abs(found - right).max() <= TOLERANCE * np.abs(right).max()


@long
def test_a_trained_model_is_exported_served_and_answers_tritons_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["train", *(word for name in TINY for word in ("--set", name)), "--out", "run", "--json"]) == 0
    capsys.readouterr()
    assert main(["export", "run", "--stages", "2", "--out", "served", "--name", "tale", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["check"]["relative"] <= TOLERANCE
    assert [block for stage in told["stages"] for block in stage["blocks"]][:2] == ["embedding", "blocks.0"]
    assert told["dimensions"] == {"batch": {"least": 1, "most": None}, "length": {"least": 1, "most": 32}}
    model = finished_model("run").model
    fresh = finished_model("run/settings.toml").model.state_dict()
    assert any(
        not torch.equal(entry, fresh[name]) for name, entry in some(model.state_dict().items())
    )  # it was trained
    with serving(Path("served")) as running, triton.InferenceServerClient(running.address) as client:
        for rows, length in ((1, 32), (3, 7), (5, 1)):
            tokens = torch.randint(257, (rows, length))
            given = triton.InferInput("tokens", tokens.shape, "INT64").set_data_from_numpy(tokens.numpy())
            found = client.infer("tale", [given]).as_numpy("output")
            (right,) = plain_outputs(model, {"tokens": tokens})
            assert np.abs(found - right).max() <= TOLERANCE * np.abs(right).max()
        command = ["load", running.address, "--concurrency", "2", "--rate", "20", "--seconds", "0.3", "--rows", "1-3"]
        command += ["--integers-below", "257", "--length", "8", "--out", "load.svg", "--out", "load.html", "--json"]
        assert main(command) == 0
        loads = json.loads(capsys.readouterr().out)["loads"]
        assert [(load["concurrency"], load["rate"], load["errors"]) for load in loads] == [
            (2, None, {}),
            (None, 20.0, {}),
        ]
        assert Path("load.svg").read_text().startswith("<svg")
        long = torch.zeros(1, 33, dtype=torch.int64)
        given = triton.InferInput("tokens", long.shape, "INT64").set_data_from_numpy(long.numpy())
        with pytest.raises(triton.InferenceServerException, match="'tokens' has length 33 in dimension 1"):
            client.infer("tale", [given])
        for token in (999, -1):  # ONNX would take -1 for the last one
            wrong = triton.InferInput("tokens", (1, 2), "INT64").set_data_from_numpy(np.array([[1, token]]))
            with pytest.raises(triton.InferenceServerException, match=f"'tokens' has the value {token}; expected 0 to"):
                client.infer("tale", [wrong])
        with refused(UsageError, "run/checkpoints is a part of a run", expected="the run's folder"):
            finished_model("run/checkpoints")
        with refused(UsageError, "served is exported already", fix="drumline serve served"):
            finished_model("served")
        short = ["load", running.address, "--concurrency", "1", "--seconds", "0.1", "--length", "99"]
        assert main([*short, "--out", "bad.html"]) == 1
        assert "No request was answered." in Path("bad.html").read_text()
        capsys.readouterr()
        assert main([*short, "--out", "bad.svg"]) == 3
        assert "nothing to plot: INVALID_ARGUMENT: input 'tokens' has length 99" in capsys.readouterr().err
        assert main(short) == 1
        assert "  the first INVALID_ARGUMENT: input 'tokens' has length 99" in capsys.readouterr().out


@long
def test_hugging_face_models_are_exported_from_their_folder(tmp_path: Path) -> None:
    transformers: Any = needed("transformers", "hf")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=64, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    found = finished_model(str(tmp_path / "llama"))
    assert (found.name, dict(found.most)) == ("llama", {"length": 64})
    made = export(Subject(found.name, found.model, found.example, found.most), tmp_path / "out", num_stages=3)
    assert made.check["relative"] <= TOLERANCE
    for size in ((1, 64), (5, 3)):
        check(tmp_path / "out", found.model, found.example(*size))


@long
def test_a_function_of_the_user_is_exported_with_named_cuts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    assert main(["export", "models.py:mlp", "--stages", "3", "--cuts", "1,3", "--out", "out"]) == 0
    assert "largest difference to PyTorch: " in capsys.readouterr().out
    assert [stage.blocks for stage in read_manifest("out").stages] == [("0",), ("1", "2"), ("3",)]
    found = finished_model("models.py:mlp")
    check(Path("out"), found.model, found.example(7, 1))
    assert main(["export", "models.py:mlp", "--out", "out"]) == 2
    assert "out is not empty" in capsys.readouterr().err
    subject = Subject(found.name, found.model, found.example, found.most)
    with refused(ModelError, "the model has 4 blocks for 5 stages"):
        export(subject, Path("more"), num_stages=5)
    with refused(UsageError, "--cuts names block '9'"):
        export(subject, Path("more"), num_stages=2, cuts=["9"])
    assert not Path("more").exists()
    odd = finished_model("models.py:transposed")
    with refused(ModelError, "its first dimension is not that of the rows"):
        export(Subject(odd.name, odd.model, odd.example, odd.most), Path("more"), num_stages=1)


@long
def test_outputs_have_the_names_that_the_model_gives_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    assert main(["export", "models.py:named", "--out", "out"]) == 0
    assert "(at rows 4, 5, 1, 64)" in capsys.readouterr().out
    made, found = read_manifest("out"), finished_model("models.py:named")
    assert [tensor.name for tensor in made.inputs] == ["x", "mul"]
    assert [output.name for output in made.outputs] == ["add", "linear"]
    inputs = found.example(7, 1)
    arrays = {name: tensor.numpy() for name, tensor in inputs.items()}
    for number in range(2):
        arrays = Session(Path("out"), made, number).run(arrays)
    for array, right in some(list(zip(arrays.values(), plain_outputs(found.model, inputs), strict=True))):
        assert np.abs(array - right).max() <= TOLERANCE * np.abs(right).max()
    assert main(["export", "models.py:fails", "--out", "more"]) == 3
    assert capsys.readouterr().err.endswith("\ndrumline: models.py:fails failed with ValueError: no weights here\n")


@long
def test_models_whose_rows_depend_on_each_other_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    found = finished_model("models.py:mixing")
    with refused(ModelError, "a row alone gives other outputs than in a batch"):
        export(Subject(found.name, found.model, found.example, found.most), Path("out"), num_stages=1)
    assert not Path("out").exists()


def test_examples_are_float32_keep_fixed_columns_and_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models.py").write_text(MODELS)
    half = finished_model("models.py:half")
    (x,) = half.example(3, 1).values()
    assert x.dtype is torch.float32
    assert not torch.equal(x[0], x[2]), "rows that repeat the example differ"
    assert half.model(x).shape == (3, 4)
    assert finished_model("models.py:columns").example(4, 32)["codes"].shape == (4, 3)
    tokens = finished_model("models.py:few_positions", max_length=8)
    assert tokens.example(4, 7)["tokens"].shape == (4, 7)
    assert tokens.most == {"length": 8}
    with refused(ModelError, r"fails for inputs of shape tokens \[4, 32\]: index out of range"):
        export(Subject("few", tokens.model, tokens.example, {}), Path("out"), num_stages=1)
    with refused(UsageError, "--max-length is 0"):
        finished_model("models.py:half", max_length=0)
    wrong = {
        "scalar": "whose input 'x' is a tensor without dimensions",
        "empty": "an example with x 0 rows",
        "no_model": r"returned \(int, Tensor\)",
    }
    for name, words in some(wrong.items()):
        with refused(UsageError, words):
            finished_model(f"models.py:{name}")


def test_blocks_are_the_elements_of_the_outermost_lists_and_what_stands_beside() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Linear(1, 1), nn.ModuleList([nn.Sequential(nn.ReLU()), nn.ReLU()])

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = Inner(), nn.Linear(1, 1)

    assert block_names(Outer()) == ["inner.embed", "inner.layers.0", "inner.layers.1", "head"]
