"""A dry run measures a few blocks of a model of many: tied ends, experts, layers that alternate, quantised bases.

Its numbers must be those of all blocks, each measured by itself. That these are what ranks hold, show
tests/train/test_dry_run.py and tests/profile/test_working.py.
"""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drumline.train.config.files.settings_file import read_settings
from drumline.train.dry.dry_run import dry_run
from drumline.train.memory.forecast import forecast
from extras import needed
from matrices import mainly

transformers: Any = needed("transformers", extra="hf")
needed("peft", extra="tune")
pytestmark = [pytest.mark.torch, pytest.mark.timeout(900)]
LAYERS = 14
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "num_hidden_layers": LAYERS, "vocab_size": 300, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
LORA: dict[str, Any] = {"adapter.method": "lora", "precision.compute": "bf16"}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "layers that alternate": ("Gemma3Text", {"sliding_window": 8, "_sliding_window_pattern": 3}, {}),
    "tied ends": ("Llama", {"tie_word_embeddings": True}, {"pipeline.schedule": "zb-h1"}),
    "experts": ("Mixtral", {"num_local_experts": 4}, {"adapter.method": "lora"}),
    "LoRA beside nf4": ("Llama", {}, {**LORA, "adapter.base": "nf4"}),
    "LoRA beside int8, recomputed": ("Qwen3", {}, {**LORA, "adapter.base": "int8", "memory.recompute": "full"}),
}


@mainly("name", *CASES)
def test_a_few_blocks_tell_what_all_take(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    family, more, keys = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more})
    table = config.to_dict() | {"architectures": [f"{family.removesuffix('Text')}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(table))
    given = {"model.kind": "hf", "model.path": str(tmp_path), "run.out": str(tmp_path / "run"), "mesh.pipeline": 2,
             "batch.sequences": 4, "batch.microbatch": 1, "batch.sequence": 16, "pipeline.device": "cpu"}  # fmt: skip
    settings = read_settings(None, given | keys)
    told: list[str] = []
    few = dry_run(settings, tell=told.append)
    monkeypatch.setattr("drumline.train.dry.dry_run.forecast", partial(forecast, by_kind=False))
    every = dry_run(settings)
    assert few.forecast.ranks == every.forecast.ranks
    (measured,) = (re.match(r"measuring (\d+) of (\d+) blocks", line) for line in told if " of " in line)
    assert measured is not None
    assert int(measured[2]) > LAYERS
    assert int(measured[1]) <= (11 if name == "layers that alternate" else 8)
