"""What is wrong with an adapter is told before anything starts, with value, expectation and fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drumline.core.errors import ConfigError, DrumlineError
from drumline.model.quantised.bases import BASES
from drumline.plan.cluster.frozen_base import BASES as PLANNED
from drumline.train.config.adapter_settings import PLAIN_BASES, QUANTISED_BASES
from drumline.train.config.files.settings_file import read_settings
from drumline.train.tune.build_tuned import build_tuned
from refused import refused
from tune.llama import chats as chats_of
from tune.runs import settings_of

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
        ({"adapter__settings": {"layers_to_transfrm": [0]}}, "did you mean layers_to_transform?"),
        ({"adapter__settings": {"r": 3}}, "expected adapter.rank, which says the same"),
        ({"adapter__settings": {"init_lora_weights": "pissa"}}, "init_lora_weights = 'pissa'"),
    ):
        settings = settings_of(llama, chats, tmp_path / "run", **keys)
        with pytest.raises(DrumlineError) as caught:
            build_tuned(settings, device="meta")
        assert said in str(caught.value)


def test_settings_name_the_bases_that_there_are() -> None:
    assert set(QUANTISED_BASES) == set(BASES)
    assert set(PLANNED) <= {*QUANTISED_BASES, *PLAIN_BASES, "int4"}
