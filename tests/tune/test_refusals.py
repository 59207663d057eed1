"""What is wrong with an adapter is told before anything starts, with value, expectation and fix."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from drumline.core.errors import ConfigError, DrumlineError, ModelError, UsageError
from drumline.model.quantised.bases import BASES
from drumline.plan.cluster.frozen_base import BASES as PLANNED
from drumline.train.config.adapter_settings import PLAIN_BASES, QUANTISED_BASES
from drumline.train.config.files.settings_file import read_settings
from drumline.train.export_models import finished_model
from drumline.train.loop.run import run_training
from drumline.train.tune.build_tuned import build_tuned
from hf_zoo import made
from refused import refused
from tune.llama import chats as chats_of
from tune.runs import newest, settings_of

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no method": ({"adapter.rank": 4}, "is given, but no adapter; expected adapter.method: lora"),
    "an unknown method": ({"adapter.method": "lara"}, "did you mean lora"),
    "a built-in model": ({"adapter.method": "lora"}, 'is given, and model.kind is "gpt"'),
    "a rank of IA3": ({"adapter.method": "ia3", "adapter.rank": 4}, "an adapter of ia3 has none"),
    "DoRA of LoHa": ({"adapter.method": "loha", "adapter.dora": True}, "an adapter of loha has none"),
    "a start that is not there": ({"adapter.start": "nowhere"}, "nowhere: there is no adapter_config.json"),
    "an unknown base": ({"adapter.method": "lora", "adapter.base": "nf5"}, "did you mean nf4"),
    "merging without saving": (
        {"adapter.method": "lora", "adapter.merge": True, "checkpoint.at_end": False}, "checkpoint.at_end is false"),
    "4-bit codes under LoHa": ({"adapter.method": "loha", "adapter.base": "nf4"}, 'set adapter.base = "int8"'),
    "a divided layer": ({"adapter.method": "lora", "mesh.tensor": 2}, "layers that no line divides"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_config_is_refused(name: str) -> None:
    keys, said = WRONG[name]
    with pytest.raises(ConfigError) as caught:
        read_settings(None, keys)
    assert said in str(caught.value)


def test_a_package_that_is_missing_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch, llama: Path) -> None:
    import importlib.util

    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "peft" else real(name, *rest))
    with refused(ConfigError, "needs peft, which is not installed", fix=r"\[tune\]"):
        read_settings(None, {"model.kind": "hf", "model.path": str(llama), "adapter.method": "lora"})


def test_what_peft_refuses_is_told_with_names_of_layers(llama: Path, tmp_path: Path) -> None:
    chats = chats_of(tmp_path / "chats.jsonl")
    for keys, said in (
        ({"adapter__targets": ["q_prj"]}, "did you mean q_proj?"),
        ({"adapter__targets": ["q_proj", "v_prj"]}, "no module of the model has the name 'v_prj'"),
        ({"adapter__excluded": ["lm_hed"]}, "did you mean lm_head?"),
        ({"adapter__modules_to_save": ["lm_hed"]}, "did you mean lm_head?"),
        ({"adapter__targets": [".*nothing.*"]}, "expected names of layers: down_proj"),
        ({"adapter__settings": {"layers_to_transform": [0]}}, "name layers in adapter.targets"),
        ({"adapter__settings": {"trainable_token_indices": [3]}}, 'adapter.modules_to_save = ["embed_tokens"]'),
        ({"adapter__dora": True, "adapter__base": "llm-int8"}, 'set adapter.base = "int8"'),
        ({"adapter__settings": {"layers_to_transfrm": [0]}}, "did you mean layers_to_transform?"),
        ({"adapter__settings": {"r": 3}}, "expected adapter.rank, which says the same"),
        ({"adapter__settings": {"init_lora_weights": "pissa"}}, "init_lora_weights = 'pissa'"),
    ):
        settings = settings_of(llama, chats, tmp_path / "run", **keys)
        with pytest.raises(DrumlineError) as caught:
            build_tuned(settings, device="meta")
        assert said in str(caught.value)


def saved(family: str, folder: Path) -> None:
    model: Any = made(family)
    model.save_pretrained(folder)


def test_a_base_that_cannot_be_quantised_is_refused(llama: Path, tmp_path: Path) -> None:
    chats = chats_of(tmp_path / "chats.jsonl")
    folder, packed = tmp_path / "gpt2", tmp_path / "packed"
    saved("gpt2", folder)
    shutil.copytree(llama, packed)
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (packed / "config.json").write_text(json.dumps(config))
    keys: dict[str, Any] = {"adapter__base": "nf4", "lengths__how": "padded", "data__tokenizer": str(llama)}
    with refused(ModelError, "adapter.base is 'nf4', and .*gpt2 has no linear layer", fix='"bf16"'):
        build_tuned(settings_of(folder, chats, tmp_path / "run", **keys), device="meta")
    with refused(ModelError, "quantised already, by bitsandbytes", expected="full precision", fix="--base nf4"):
        build_tuned(settings_of(packed, chats, tmp_path / "run"), device="meta")


def test_a_folder_without_tokenizer_is_told_so(tmp_path: Path) -> None:
    saved("llama", tmp_path / "model")
    settings = settings_of(tmp_path / "model", chats_of(tmp_path / "chats.jsonl"), tmp_path / "run")
    with refused(ModelError, "model has no tokenizer, and the one of bytes has 257", fix="data.tokenizer"):
        build_tuned(settings, device="meta")


def test_an_adapter_starts_beside_its_own_base(llama: Path, tmp_path: Path) -> None:
    chats = chats_of(tmp_path / "chats.jsonl")
    settings = settings_of(llama, chats, tmp_path / "run", run__steps=1)
    run_training(settings, tell=lambda _: None)
    checkpoint = newest(tmp_path / "run")
    saved("llama", tmp_path / "other")
    keys: dict[str, Any] = {"adapter__method": "", "adapter__rank": 8, "adapter__start": str(checkpoint)}
    other = settings_of(tmp_path / "other", chats, tmp_path / "new", data__tokenizer=str(llama), **keys)
    with refused(ModelError, "adapter.start: .*lora_A.* has shape", expected="fits the model", fix="--model"):
        build_tuned(other, device="meta")
    for more, error, fix in (
        ({"adapter__rank": 2}, "adapter.rank is 2, and the adapter in .* has 4", "change it back"),
        ({"adapter__alpha": 3.0}, "adapter.alpha is 3.0, and the adapter in .* has 8", "change it back"),
        ({"adapter__method": "ia3", "adapter__rank": 8}, "adapter.method is 'ia3', .* has 'lora'", "change it back"),
        ({"adapter__method": "", "adapter__rank": 8}, "holds an adapter, without its base", "add --adapter"),
        ({"adapter__base": "int8"}, 'adapter.base is "int8", and the adapter in .* beside ""', "change it back"),
        ({"adapter__base": "bf16"}, 'adapter.base is "bf16", and the adapter in .* beside ""', "adapter.start"),
    ):
        again = settings_of(llama, chats, tmp_path / "again", checkpoint__resume=str(checkpoint), **more)
        with refused(ModelError, error, fix=fix):
            run_training(again, tell=lambda _: None)
    keys = {"adapter__base": "fp32", "run__steps": 2}  # another name of the same base
    same = settings_of(llama, chats, tmp_path / "same", checkpoint__resume=str(checkpoint), **keys)
    assert run_training(same, tell=lambda _: None).first_step == 1
    run = tmp_path / "run"
    with refused(UsageError, "trained an adapter, without its base", fix=f"--out {run} --continue --merge, and name"):
        finished_model(str(run))
    (run / "merged").mkdir()
    with refused(UsageError, "trained an adapter, without its base", fix=f"name {run / 'merged'}"):
        finished_model(str(run))


def test_settings_name_the_bases_that_there_are() -> None:
    assert set(QUANTISED_BASES) == set(BASES)
    assert set(PLANNED) <= {*QUANTISED_BASES, *PLAIN_BASES, "int4"}
