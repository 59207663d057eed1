"""Weights on disk: every layout, every type, and files that are not what they should be."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor

from drumline.core.errors import ModelError
from drumline.model.weights import files as module
from drumline.model.weights.files import Weights
from extras import needed
from refused import refused, saying

pytestmark = pytest.mark.torch

safetensors = needed("safetensors.torch", extra="hf")
TYPES = sorted(module.TYPES)


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5),
        "a.bias": torch.randn(3),
        "b.weight": torch.randn(4, 3),
        "count": torch.tensor(7),
    }


def saved(folder: Path, layout: str) -> Path:
    """Write the tensors in one of the layouts that people have; returns what is passed as weights."""
    made = tensors()
    first = {name: tensor for name, tensor in made.items() if name.startswith("a")}
    second = {name: tensor for name, tensor in made.items() if name not in first}
    if layout == "safetensors":
        safetensors.save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    elif layout == "one file":
        safetensors.save_file(made, folder / "anything.safetensors")
        return folder / "anything.safetensors"
    elif layout == "files without an index":
        safetensors.save_file(first, folder / "x.safetensors")
        safetensors.save_file(second, folder / "y.safetensors")
    elif layout == "pytorch_model.bin":
        torch.save(made, folder / "pytorch_model.bin")
    elif layout == "pt":
        torch.save(made, folder / "state.pt")
        return folder / "state.pt"
    else:
        ending = "safetensors" if layout == "safetensors shards" else "bin"
        stem = "model" if ending == "safetensors" else "pytorch_model"
        write = safetensors.save_file if ending == "safetensors" else torch.save
        where: dict[str, str] = {}
        for number, part in enumerate((first, second), start=1):
            file = f"{stem}-0000{number}-of-00002.{ending}"
            write(part, folder / file)
            where |= dict.fromkeys(part, file)
        (folder / f"{stem}.{ending}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


LAYOUTS = [
    "safetensors",
    "safetensors shards",
    "one file",
    "files without an index",
    "pytorch_model.bin",
    "bin shards",
    "pt",
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_every_tensor(tmp_path: Path, layout: str) -> None:
    found = Weights(saved(tmp_path, layout)).tensors
    expected = tensors()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name].read(), tensor)


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_read_bit_by_bit(tmp_path: Path, kind: str) -> None:
    dtype = module.TYPES[kind]
    tensor = torch.randint(0, 2, (4, 8 * dtype.itemsize), dtype=torch.uint8)
    tensor = tensor.view(dtype) if dtype is not torch.bool else tensor.bool()
    safetensors.save_file({"x": tensor, "none": tensor[:0].clone()}, tmp_path / "model.safetensors")
    found = Weights(tmp_path).tensors
    assert found["x"].dtype is dtype
    assert torch.equal(found["x"].read().view(torch.uint8), tensor.view(torch.uint8))
    assert found["none"].read().shape == (0, tensor.shape[1])


def test_our_reader_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, "safetensors")
    monkeypatch.setitem(__import__("sys").modules, "safetensors", None)
    assert torch.equal(Weights(tmp_path).tensors["a.bias"].read(), tensors()["a.bias"])


def test_a_tensor_of_another_type_is_converted_through_a_small_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_BUFFER_BYTES", 28)  # seven elements: the last part is shorter
    tensor = torch.randn(5, 5)
    safetensors.save_file({"x": tensor}, tmp_path / "model.safetensors")
    target = torch.full((5, 5), torch.nan, dtype=torch.float64)
    Weights(tmp_path).tensors["x"].into(target)
    assert torch.equal(target, tensor.double())
    turned = torch.full((5, 5), torch.nan).t()
    Weights(tmp_path).tensors["x"].into(turned)
    assert torch.equal(turned, tensor)


def test_views_in_torch_files_are_read_as_they_were(tmp_path: Path) -> None:
    base = torch.arange(12.0).view(3, 4)
    torch.save({"turned": base.t(), "part": base[1:, 2:], "same": base}, tmp_path / "x.pt")
    found = Weights(tmp_path / "x.pt").tensors
    assert torch.equal(found["turned"].read(), base.t())
    assert torch.equal(found["part"].read(), base[1:, 2:])
    assert torch.equal(found["same"].read(), base)


def test_only_what_is_asked_for_is_read(tmp_path: Path) -> None:
    path = saved(tmp_path, "safetensors shards")
    found = Weights(path).tensors
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert torch.equal(found["a.weight"].read(), tensors()["a.weight"])
    with pytest.raises(FileNotFoundError):
        found["b.weight"].read()


def spoiled(folder: Path, what: str) -> Path:
    file = folder / "model.safetensors"
    saved(folder, "safetensors shards" if "index" in what or "shard" in what else "safetensors")
    index = folder / "model.safetensors.index.json"
    if what == "nothing there":
        return folder / "modle.safetensors"
    if what == "an empty folder":
        file.unlink()
    elif what == "cut short":
        file.write_bytes(file.read_bytes()[:-4])
    elif what == "a few bytes":
        file.write_bytes(b"abc")
    elif what == "no header":
        file.write_bytes(struct.pack("<Q", 5) + b"hello world")
    elif what == "header without places":
        text = json.dumps({"x": {"dtype": "F32"}}).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text)
    elif what == "an unknown type":
        text = json.dumps({"x": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + b"0")
    elif what == "another kind of file":
        file.rename(folder / "model.onnx")
        return folder / "model.onnx"
    elif what == "a missing shard":
        (folder / "model-00002-of-00002.safetensors").unlink()
    elif what == "an index that lies":
        index.write_text(index.read_text().replace("a.bias", "a.bais"))
    elif what == "an index that is none":
        index.write_text("[]")
    elif what == "a tensor twice":
        (folder / "again.safetensors").write_bytes(file.read_bytes())
        file.rename(folder / "once.safetensors")
    elif what == "an old torch file":
        file.unlink()
        torch.save(tensors(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    elif what == "a nested torch file":
        torch.save({"model": tensors(), "step": 3}, folder / "x.pt")
        return folder / "x.pt"
    return folder


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("nothing there", saying("no weights found at .*modle.safetensors", fix="did you mean model.safetensors")),
        ("an empty folder", saying("contains no weights", expected="one of model.safetensors.index.json")),
        ("cut short", saying("'b.weight' of .*does not fit into the file")),
        ("a few bytes", saying("is not a complete safetensors file")),
        ("no header", saying("does not have the header of a safetensors file")),
        ("header without places", saying("does not have the header of a safetensors file")),
        ("an unknown type", saying("has the dtype F4", expected="F32")),
        ("another kind of file", saying("model.onnx does not have the name of a weights file")),
        ("a missing shard", saying("names model-00002-of-00002.safetensors, which does not exist")),
        ("an index that lies", saying("says that 'a.bais' is in model-00001-of-00002.safetensors, but it is not")),
        ("an index that is none", saying("is not a weights index")),
        ("a tensor twice", saying("'count' of .*again.safetensors is in .*once.safetensors too")),
        ("an old torch file", saying("torch cannot read", fix="save it again")),
        ("a nested torch file", saying("holds a dict with model, step", expected="a dict")),
    ],
)
def test_wrong_files_are_refused_by_name(tmp_path: Path, what: str, words: dict[str, str]) -> None:
    with refused(ModelError, **words):
        Weights(spoiled(tmp_path, what))


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path: Path) -> None:
    found = Weights(saved(tmp_path, "safetensors")).tensors
    last = max(found.values(), key=lambda tensor: tensor.start)
    with last.file.open("r+b") as file:
        file.truncate(last.start + 2)
    with refused(ModelError, f"ends within the tensor '{last.name}'"):
        last.read()


def test_patterns_are_a_list() -> None:
    with refused(ModelError, "ignore is 'head.*'", expected="a list"):
        Weights("anywhere", ignore="head.*")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["x.safetensors", "x.bin"])
def test_a_pipe_among_weights_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with refused(ModelError, "is a pipe, not a regular file"):
        Weights(tmp_path)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ('{"a": ' + "[" * 50_000, "nested deeper than 100 levels"),
        ('{"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}', "does not fit into the file"),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', "does not fit into the file"),
        ('{"a": {"dtype": "F32", "shape": [1], "data_offsets": [1e999, 4]}}', "data_offsets is inf"),
        ('{"a": 1, "a": 2}', "the name 'a' appears twice"),
        ("[]", "the JSON holds a list, not an object"),
    ],
)
def test_headers_that_would_fail_later_are_refused(tmp_path: Path, header: str, words: str) -> None:
    data = struct.pack("<Q", len(header)) + header.encode() + bytes(8)
    (tmp_path / "model.safetensors").write_bytes(data)
    with refused(ModelError, words):
        Weights(tmp_path)


@pytest.mark.parametrize(
    "text", ['{"weight_map": {"a": 1}}', '{"weight_map": []}', "[" * 50_000, '{"weight_map": NaN}']
)
def test_indices_that_would_fail_later_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with refused(ModelError, "is not a weights index: "):
        Weights(tmp_path)
