"""Adapters with what else a run can do: schedules, recomputing, accumulating, evaluating, lines of data and context.

Each ends with the adapter of a plain loop.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import drumline as dl
from drumline.train.data.build import build_data
from drumline.train.loop.run import run_training
from drumline.train.models.built import IGNORED
from drumline.train.tune.build_tuned import build_tuned
from matrices import long, mainly
from tune.llama import chats as chats_of
from tune.runs import loaded, newest, plain_loop, settings_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]

BASE: dict[str, Any] = {"batch__sequences": 8, "optimizer__lr": 1.0}
RANKS: dict[str, Any] = {"pipeline__transport": "auto", "pipeline__device": "cpu"}
ONE_LAYER: dict[str, Any] = {"adapter__settings": {"layers_to_transform": [0]}, "adapter__targets": ["q_proj"]}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats_of(tmp_path_factory.mktemp("data") / "chats.jsonl")


def saved(out: Path) -> dict[str, Tensor]:
    """Return the adapter that a run has saved, as PEFT reads it."""
    return load_file(newest(out) / "adapter_model.safetensors")


def run(llama: Path, chats: Path, out: Path, **keys: Any) -> dict[str, Tensor]:
    """Train in this process, and return the adapter."""
    run_training(settings_of(llama, chats, out, **BASE | keys), tell=lambda _: None)
    return saved(out)


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return how far two adapters are apart, which have the same names."""
    assert found
    assert found.keys() == expected.keys()
    return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


RUNS: dict[str, tuple[dict[str, Any], float]] = {
    "all at once": ({"pipeline__schedule": "zb-h1", "memory__recompute": "full", "batch__accumulate": 2,
                     "adapter__base": "nf4", "optimizer__validated": "before"}, 1e-6),
    "recomputed": ({"memory__recompute": "full"}, 0.0),
    "DoRA on four bits": ({"adapter__base": "nf4", "adapter__dora": True}, 1e-6),
    "split": ({"pipeline__schedule": "zb-h1", "adapter__base": "int8"}, 0.0),
    "two directions": ({"pipeline__schedule": "dualpipe-v", "adapter__base": "int8"}, 1e-6),
    "interleaved": ({"pipeline__schedule": "interleaved-1f1b", "pipeline__stages_per_rank": 2}, 0.0),
    "accumulated": ({"batch__accumulate": 2}, 1e-6),
    "in half precision": ({"precision__compute": "fp16"}, 2e-3),
    "updated ahead": ({"optimizer__validated": "after", "adapter__base": "nf4"}, 0.0),
    "adapted": ({"adapt__on": True, "run__steps": 6, "adapter__base": "nf4"}, 1e-6),
    "checked": ({"pipeline__check_model": True, "adapter__base": "int8"}, 0.0),
    "in buckets": ({"lengths__how": "buckets"}, 1e-6),
    "compiled": ({"pipeline__compile": True, "adapter__base": "nf4"}, 1e-6),
    "a stage without adapters": (ONE_LAYER, 0.0),
}  # fmt: skip


@mainly("name", *RUNS)
def test_a_run_ends_with_the_adapter_of_a_plain_loop(name: str, llama: Path, chats: Path, tmp_path: Path) -> None:
    keys, tolerance = RUNS[name]
    found = run(llama, chats, tmp_path / "run", **keys)
    plain = {key: value for key, value in keys.items() if key != "batch__accumulate"}
    assert difference(found, plain_loop(settings_of(llama, chats, tmp_path / "run", **BASE | plain))) <= tolerance


@mainly("keys", {"memory__recompute": "full"}, {"pipeline__schedule": "zb-h1"}, {"pipeline__schedule": "zb-v"})
def test_dropout_of_an_adapter_is_the_same_by_other_programs(
    keys: dict[str, Any], llama: Path, chats: Path, tmp_path: Path
) -> None:
    first = run(llama, chats, tmp_path / "first", adapter__dropout=0.3)
    assert difference(run(llama, chats, tmp_path / "other", adapter__dropout=0.3, **keys), first) == 0.0
    assert difference(run(llama, chats, tmp_path / "plain"), first) > 1e-4, "something was dropped"


@mainly("base", "nf4", "")
def test_without_a_flush_gradients_are_of_the_weights_before(
    base: str, llama: Path, chats: Path, tmp_path: Path
) -> None:
    keys = {"run__steps": 3, "adapter__base": base}
    found = run(llama, chats, tmp_path / "run", pipeline__schedule="pipedream-2bw", **keys)
    settings = settings_of(llama, chats, tmp_path / "run", **BASE | keys)
    built = build_tuned(settings, device="cpu")
    assert built.adapter is not None
    model: Any = built.model.train()
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    versions = [{name: param.detach().clone() for name, param in trained.items()}]
    data = build_data(settings, built)
    for step, batch in zip(range(2), data.training, strict=False):  # the third update is due
        for param in trained.values():
            param.grad = None
        tokens = (batch.target != IGNORED).sum()
        for row in range(len(batch.target)):
            logits = model(**{name: value[row : row + 1] for name, value in batch.inputs.items()}).logits
            cross = nn.functional.cross_entropy(logits[0], batch.target[row], ignore_index=IGNORED, reduction="sum")
            (cross / tokens).backward()
        versions.append({name: versions[step][name] - param.grad for name, param in trained.items()})
    data.close()
    expected = {theirs: versions[-1][name] for name, theirs in built.adapter.names.items()}
    assert difference(found, expected) <= 1e-6


def test_the_held_out_loss_is_that_of_the_adapter_that_peft_loads(llama: Path, chats: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"data__validation": 0.5, "evaluation__every": 2, "batch__sequences": 4}
    settings = settings_of(llama, chats, tmp_path / "run", **BASE | keys)
    result = run_training(settings, tell=lambda _: None)
    data = build_data(settings, build_tuned(settings, device="cpu"))
    model = loaded(llama, newest(tmp_path / "run")).eval()
    total, count = 0.0, 0
    for batch in data.validation:
        with torch.no_grad():
            logits = model(**batch.inputs).logits.flatten(0, 1)
        cross = nn.functional.cross_entropy(logits, batch.target.flatten(), ignore_index=IGNORED, reduction="sum")
        total, count = total + float(cross), count + int((batch.target != IGNORED).sum())
    data.close()
    assert count == result.evaluations[-1].num_tokens > 0
    assert result.evaluations[-1].loss == pytest.approx(total / count, rel=1e-6)


def trained(llama: str, chats: str, out: str, keys: dict[str, Any]) -> dict[str, Tensor]:
    """Train on this rank; rank 0 returns what a plain loop in a process like it makes of the adapter."""
    run_training(settings_of(Path(llama), Path(chats), Path(out), **BASE | RANKS | keys), tell=lambda _: None)
    if os.environ["RANK"] != "0":
        return {}
    plain = {key: value for key, value in keys.items() if not key.startswith(("mesh", "memory"))}
    return plain_loop(settings_of(Path(llama), Path(chats), Path(out), **BASE | plain))


def on_ranks(llama: Path, chats: Path, out: Path, num_ranks: int, **keys: Any) -> None:
    """Train on several processes, and compare with a plain loop."""
    expected, *_ = dl.launch(trained, str(llama), str(chats), str(out), keys, num_ranks=num_ranks)
    assert difference(saved(out), expected) <= 1e-6


def test_lines_of_data_train_one_adapter(llama: Path, chats: Path, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"mesh__pipeline": 1, "mesh__data": 2, "memory__zero": 1, "adapter__base": "nf4"}
    on_ranks(llama, chats, tmp_path / "run", 2, **keys)
    files = sorted(newest(tmp_path / "run").glob("model-*.safetensors"))
    assert [bool(load_file(file)) for file in files] == [True, False], "the second line had nothing to add"


@long
@pytest.mark.parametrize(
    "keys",
    [
        {"mesh__data": 2, "mesh__pipeline": 2, "adapter__base": "int8"},
        {"mesh__data": 2, "mesh__pipeline": 1, "memory__zero": 3},
        {"mesh__context": 2, "mesh__pipeline": 1, "adapter__base": "nf4", "lengths__how": "blocks"},
        ONE_LAYER,
    ],
    ids=["dp and pp", "zero 3", "cp", "a rank without adapters"],
)
def test_more_lines_train_one_adapter(keys: dict[str, Any], llama: Path, chats: Path, tmp_path: Path) -> None:
    sizes = [keys.get(f"mesh__{axis}", 1) for axis in ("data", "context")]
    on_ranks(llama, chats, tmp_path / "run", keys.get("mesh__pipeline", 2) * sizes[0] * sizes[1], **keys)
