"""What training refuses, or passes on, that no good run asks for: each with the value and the key that it names."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from drumline.core.errors import (
    ConfigError,
    DrumlineError,
    ModelError,
    NonFiniteError,
    RankFailed,
    RunError,
    UsageError,
)
from drumline.pipeline.options import Options
from drumline.schedules import generate
from drumline.train.config import settings as tables
from drumline.train.config.files.model_folder import problems_of
from drumline.train.config.files.settings_file import read_settings
from drumline.train.config.functions import function_named
from drumline.train.config.settings import TrainSettings
from drumline.train.demo import _clear
from drumline.train.loop.making import layer_cuts
from drumline.train.loop.optimizers import choose
from drumline.train.loop.rates import rate
from drumline.train.loop.run import run_training
from drumline.train.loop.training import TrainResult
from drumline.train.memory.forecast import _num_ranks, _versions
from drumline.train.models.build import build_model
from drumline.train.models.built import Built
from drumline.train.models.companion_files import _with_dtype
from drumline.train.models.user_function import built_by_user, named_function
from drumline.train.restarts import is_worth_another
from refused import refused, saying

pytestmark = pytest.mark.torch


def built(**changes: Any) -> Built:
    return replace(Built(nn.Linear(2, 2), nn.functional.mse_loss), **changes)


def settings(**changed: Any) -> TrainSettings:
    return replace(TrainSettings(), **changed)


def model_of(**changed: Any) -> Built:
    return build_model(settings(model=tables.ModelSettings(**changed)), device="meta")


# ---- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: model_of(kind="mlp", num_layers=0), saying("model.num_layers is 0", expected="1 or more")),
        (lambda: model_of(kind="mlp", hidden=0), saying("model.hidden is 0", expected="1 or more")),
        (lambda: model_of(kind="mlp", inputs=0), saying("model.inputs is 0", expected="1 or more")),
        (lambda: model_of(kind="mlp", outputs=-1), saying("model.outputs is -1", expected="1 or more")),
        (lambda: model_of(hidden=0), saying("model.hidden is 0", expected="1 or more")),
        (lambda: model_of(vocabulary=0), saying("model.vocabulary is 0", expected="1 or more")),
        (lambda: model_of(feedforward=-1), saying("model.feedforward is -1", expected="0 or more")),
        (lambda: model_of(head_width=-2), saying("model.head_width is -2", expected="0 or more")),
        (lambda: model_of(rotary_base=0.0), saying("model.rotary_base is 0.0", expected="a number above 0")),
        (lambda: model_of(dropout=1.0), saying("model.dropout is 1.0", expected="from 0 to less than 1")),
        (lambda: model_of(attention_dropout=1.0), saying("model.attention_dropout is 1.0")),
        (
            lambda: build_model(settings(precision=tables.PrecisionSettings(weights="fp8"))),
            saying("precision.weights is 'fp8'", expected='"fp32", "bf16" or "fp16"'),
        ),
        (
            lambda: build_model(settings(batch=tables.BatchSettings(sequence=0))),
            saying("batch.sequence is 0", expected="1 or more"),
        ),
        (
            lambda: built_by_user([1, 2], name="mine.py:make"),
            saying("mine.py:make returned a list", expected="an nn.Module"),
        ),
        (lambda: built_by_user((nn.Linear(1, 1), 3), name="mine.py:make"), saying("mine.py:make returned a tuple")),
        (
            lambda: build_model(settings(model=tables.ModelSettings(kind="gtp"))),
            saying("'gtp'", fix=r"did you mean gpt\?"),
        ),
        (lambda: build_model(TrainSettings(), device="cuda"), saying("device is 'cuda'", expected='"cpu" or "meta"')),
        (
            lambda: named_function("mine", key="model.function"),
            saying("model.function: 'mine' names no function"),
        ),
        (lambda: named_function(":make", key="model.function"), saying("model.function: ':make' names no function")),
        (lambda: named_function("mine:", key="model.function"), saying("model.function: 'mine:' names no function")),
        (
            lambda: named_function("math:pi", key="model.function"),
            saying("math has no function 'pi'", expected="package.module:function"),
        ),
        (
            lambda: named_function("no/such.py:make", key="data.function"),
            saying("data.function: no/such.py: no such file", expected="file.py:function"),
        ),
        (
            lambda: named_function("no_such_module:make", key="data.function"),
            saying("the module no_such_module, and there is"),
        ),
    ],
)
def test_models_that_cannot_be_made_are_refused(make: Callable[[], Any], said: dict[str, str]) -> None:
    with refused(DrumlineError, **said):
        make()


def test_what_a_user_built_is_taken_as_it_is_or_described_by_its_forward() -> None:
    made = built()
    assert built_by_user(made, name="f") is made
    found = built_by_user(nn.Bilinear(2, 3, 4), name="f")
    assert (found.inputs, found.takes, found.loss_fn) == ("input1", frozenset({"input2"}), None)
    pair = built_by_user((nn.Linear(2, 2), nn.functional.mse_loss), name="f")
    assert (pair.inputs, pair.takes, pair.loss_fn) == ("input", frozenset(), nn.functional.mse_loss)


def test_a_module_that_fails_is_not_one_that_is_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails_itself.py").write_text("import no_such_module_either\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with refused(RunError, r"fails_itself failed with ModuleNotFoundError: .*no_such_module_either"):
        named_function("fails_itself:make", key="model.function")


def test_a_function_leaves_the_search_path_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "beside_it.py").write_text("VALUE = 7\n")
    (tmp_path / "mine.py").write_text("import beside_it\n\ndef make():\n    return beside_it.VALUE\n")
    before = list(sys.path)
    assert function_named(f"{tmp_path / 'mine.py'}:make")() == 7
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine", "'mine' names no function"),
        ("a b:make", "'a b' is neither a Python file nor a module"),
        ("math:gcb", "math has no function 'gcb'"),
        ("no_such_module:make", "no_such_module cannot be imported: ModuleNotFoundError"),
    ],
)
def test_functions_of_a_config_that_are_not_there_are_named(name: str, said: str) -> None:
    with refused(ConfigError, said):
        function_named(name)


def test_the_type_of_weights_goes_into_objects_alone() -> None:
    assert _with_dtype(b'["no object"]', "float32") == b'["no object"]'
    assert _with_dtype(b"no JSON", "float32") == b"no JSON"
    config = b'{"dtype": "bfloat16", "text_config": null, "quantization_config": {"dtype": "int8"}}'
    assert json.loads(_with_dtype(config, "float32")) == {
        "dtype": "float32",
        "text_config": None,
        "quantization_config": {"dtype": "int8"},
    }


# ---- settings --------------------------------------------------------------------------------------------------------


def test_an_error_of_ours_in_a_configs_function_stays_what_it_is() -> None:
    def config() -> Any:
        raise UsageError("no GPU here", fix="ask for one")

    def broken() -> Any:
        raise KeyError("steps")

    with refused(UsageError, r"^no GPU here"):
        read_settings(config)
    with refused(ConfigError, "broken failed with KeyError: 'steps'"):
        read_settings(broken)
    with refused(ConfigError, "returns 3"):
        read_settings(lambda: 3)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"shape": "cosin"}, saying("learning_rate.shape is 'cosin'", fix=r"did you mean cosine\?")),
        ({"warmup_steps": -1}, saying("learning_rate.warmup_steps is -1", expected="0 or more")),
        ({"decay_steps": -2}, saying("learning_rate.decay_steps is -2", expected="1 or more")),
        ({"final": 1.5}, saying("learning_rate.final is 1.5", expected="a share, from 0 to 1")),
        ({"final": -0.1}, saying("learning_rate.final is -0.1")),
    ],
)
def test_rates_that_nothing_follows_are_refused(changed: dict[str, Any], said: dict[str, str]) -> None:
    with refused(ConfigError, **said):
        run_training(settings(learning_rate=tables.LearningRateSettings(**changed)))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"memory": tables.MemorySettings(recompute="some")}, saying("memory.recompute is 'some'", expected='"full"')),
        ({"batch": tables.BatchSettings(accumulate=0)}, saying("batch.accumulate is 0", expected="1 or more")),
        ({"run": tables.RunSettings(steps=0)}, saying("run.steps is 0", expected="1 or more")),
        ({"run": tables.RunSettings(log_every=0)}, saying("run.log_every is 0", expected="1 or more")),
        ({"optimizer": tables.OptimizerSettings(clip_norm=-1.0)}, saying("optimizer.clip_norm is -1.0")),
        (
            {"optimizer": tables.OptimizerSettings(groups=(tables.OptimizerGroup(lr=-1.0),))},
            saying("optimizer.groups.lr is -1.0", expected="0 or more"),
        ),
        (
            {"pipeline": tables.PipelineSettings(layers=(3, 3), balance="even")},
            saying("pipeline.balance stands beside pipeline.layers"),
        ),
    ],
)
def test_settings_made_by_hand_are_refused_as_those_of_a_file_are(
    changed: dict[str, Any], said: dict[str, str]
) -> None:
    with refused(ConfigError, **said):
        run_training(settings(**changed))


def test_a_linear_rate_falls_in_equal_steps_and_wsd_over_a_tenth() -> None:
    linear = tables.LearningRateSettings(shape="linear", warmup_steps=0, final=0.2)
    assert [rate(linear, step, 4) for step in range(4)] == pytest.approx([0.8, 0.6, 0.4, 0.2])
    wsd = tables.LearningRateSettings(shape="wsd", warmup_steps=0, final=0.0)
    assert [rate(wsd, step, 20) for step in (0, 17, 18, 19)] == pytest.approx([1.0, 1.0, 0.5, 0.0])


GROUP = tables.OptimizerGroup


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((GROUP(names=()),), r"optimizer.groups\[0\] has no names"),
        (
            (GROUP(names=("*",)), GROUP(names=("w",))),
            r"optimizer.groups\[1\] gets no parameter: earlier groups take all",
        ),
        ((GROUP(names=("b",), only_matrices=True),), r"groups\[0\] is for matrices only, and none of b has two"),
        ((GROUP(names=("w",), settings={"lr": 1.0}),), r"optimizer.groups\[0\].settings.lr is no argument of AdamW"),
        ((GROUP(names=("b",), kind="Muon"),), r"Muon got 'b' of the shape \(2,\)"),
    ],
)
def test_groups_of_parameters_that_mean_nothing_are_refused(groups: Any, said: str) -> None:
    shapes = {"w": torch.Size((2, 2)), "b": torch.Size((2,))}
    with refused(UsageError, said):
        choose(shapes, tables.OptimizerSettings(groups=groups))


@pytest.mark.parametrize(
    ("layers", "said"),
    [([1, 0, 3], "a layer in every stage but the first and the last"), ([2, 2, 0], "1 of the 4 layers")],
)
def test_stages_without_layers_are_refused(layers: list[int], said: str) -> None:
    with refused(UsageError, expected=said):
        layer_cuts(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))), layers)


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_rank_that_fails_by_its_settings_is_not_started_again() -> None:
    def caused(error: Exception) -> RankFailed:
        failed = RankFailed(1, "rank 1 failed")
        failed.__cause__ = error
        return failed

    assert is_worth_another(caused(ModelError("no such layer"))) is False
    assert is_worth_another(caused(NonFiniteError("a NaN"))) is False
    assert is_worth_another(caused(RunError("the link is down"))) is True
    assert is_worth_another(caused(OSError("killed"))) is True


def test_a_demo_may_be_repeated_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    _clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    _clear(tmp_path / "new" / "folder")
    assert (tmp_path / "new" / "folder").is_dir()


def test_model_folders_that_are_broken_say_where(tmp_path: Path) -> None:
    def said(**files: bytes) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        (folder / "config.json").write_text('{"model_type": "gpt2"}')
        for name, content in files.items():
            (folder / name.replace("__", ".")).write_bytes(content)
        return "; ".join(text for text, _ in problems_of(str(folder), str(folder / "config.json"), weights=True))

    head = struct.pack("<Q", 2)
    assert said(model__safetensors=head + b"{}") == ""
    assert "not a file of safetensors" in said(model__safetensors=b"abc")
    assert "not a file of safetensors" in said(model__safetensors=head + b"[]")
    assert "has 12 bytes, and its tensors need 10" in said(model__safetensors=head + b"{}" + b"ab")
    assert "there is no weight_map" in said(model__safetensors__index__json=b"{}")
    assert "not JSON in UTF-8" in said(tokenizer_config__json=b'"\xff"')


@pytest.mark.features("stream")
def test_weight_versions_are_those_of_a_long_stream() -> None:
    """PipeDream keeps a version for every step under way: as many as there are ranks behind, and its own."""

    def versions(schedule: str, **given: Any) -> list[int]:
        options = Options(nn.Linear(1, 1), schedule=schedule, **given)
        return _versions(options, generate(schedule, num_ranks=3, num_microbatches=3))

    assert versions("pipedream") == [3, 2, 1]
    assert versions("pipedream", vertical_sync=True)[0] == 3
    assert versions("pipedream-2bw") == [2, 2, 1]  # the last rank ends a step before its update
    assert _num_ranks(Options(nn.Linear(1, 1))) == 1
    assert _num_ranks(Options(nn.Linear(1, 1), num_ranks=4)) == 4
    assert _num_ranks(Options(nn.Linear(1, 1), schedule=generate("1f1b", num_ranks=2, num_microbatches=2))) == 2


def test_a_run_that_has_done_nothing_counts_nothing(tmp_path: Path) -> None:
    trained = TrainResult(tmp_path)
    counts = (trained.first_step, trained.num_tokens, trained.num_padded, trained.num_skipped, trained.seconds)
    assert counts == (0, 0, 0, 0, 0.0)
