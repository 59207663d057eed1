"""Fuzzed: what planning for a cluster reads, and what the explore page is asked."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.hardware import MACHINES, cluster
from drumline.plan.cluster.hugging_face import read_config
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.models import model
from drumline.plan.launch.launch import train_config
from drumline.report.explore import EXPORTS, Sliders, answer, explain, export
from fuzz_case import Case, Refused, command, put
from fuzz_files import WORDS, programs
from fuzz_mutations import damaged, json_text, rows_text, word
from train_configs import read_train_config

_CONFIGS: tuple[dict[str, Any], ...] = (
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 512,
        "vocab_size": 1000,
        "max_position_embeddings": 128,
        "tie_word_embeddings": False,
    },
    {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "vocab_size": 500,
        "max_position_embeddings": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
    },
    {"model_type": "vl", "text_config": {"n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 9, "n_ctx": 32}},
)


def config_case(folder: Path) -> Case:
    machine = cluster("h100", 8)
    layout = Layout(batch=8, tensor=2, pipeline=2, data=2, zero=1)

    def case(chance: random.Random) -> None:
        path = put(folder / "config.json", json_text(chance.choice(_CONFIGS), chance), chance)
        found = read_config(path)
        assert repr(found)
        assert json.dumps(asdict(found), allow_nan=False)
        if chance.random() < 0.02:
            words = ("--hardware", "h100", "--gpus", 2, "--batch", 2, "--schedules", "1f1b", "--zero", 0)
            command("plan", path, *words, "--brief", *chance.choice(((), ("--json",))))
        assert estimate(found, machine, layout).seconds.total >= 0

    return case


def machine_case(folder: Path) -> Case:
    tables = [asdict(MACHINES[name]) for name in ("h100", "a100-40")]
    seeds = [{**table.pop("device"), **table} for table in tables]
    transformer, layout = model("gpt-1.7b"), Layout(batch=8, tensor=2, pipeline=2, data=2)

    def case(chance: random.Random) -> None:
        path = put(folder / "machine.json", json_text(chance.choice(seeds), chance), chance)
        found = cluster(str(path), 8)
        assert repr(found)
        if chance.random() < 0.01:
            words = ("--gpus", 2, "--batch", 2, "--schedules", "1f1b", "--zero", 1, "--tensor", 1, "--sequence", 64)
            command("plan", "gpt-1.7b", "--hardware", path, *words, "--brief", "--json")
        assert estimate(transformer, found, layout).seconds.total >= 0

    return case


def train_case(folder: Path) -> Case:
    text = train_config(model("gpt-1.7b"), Layout(batch=8, pipeline=2, data=2, counts=(12, 12)))

    def case(chance: random.Random) -> None:
        lines = text.split("\n")
        at = chance.randrange(len(lines))
        match chance.randrange(4):
            case 0:
                del lines[at]
            case 1:
                lines.insert(at, lines[chance.randrange(len(lines))])
            case 2:
                name = lines[at].partition("=")[0]
                lines[at] = f"{name}= {chance.choice(_TOML)}"
            case 3:
                lines[at] = word(lines[at], chance)
        found = read_train_config(damaged("\n".join(lines).encode(), chance).decode(errors="replace"))
        assert repr(found)
        assert json.dumps(asdict(found), allow_nan=False)

    return case


_TOML = (
    "0",
    "-1",
    "nan",
    "inf",
    "1" * 5000,
    "true",
    '""',
    "[]",
    "[1, 'x']",
    "{a = 1}",
    "1979-05-27",
    "[" * 500,
    "1e99",
)


def explore_case(folder: Path) -> Case:
    seeds: list[dict[str, Any]] = [
        {"schedule": "1f1b", "ranks": "2", "microbatches": "3", "comm": "0.5"},
        {"schedule": "zb-v", "ranks": "2", "microbatches": "4", "forward": "2", "max_activations": "3"},
    ]
    texts = [program.format() for program in programs()]
    values = ("", "0", "-1", "3", "1e9", "nan", "inf", "-inf", "1e308", "9" * 5000, "٣", "1_0", "x", "1e-320", "99999")

    def case(chance: random.Random) -> None:
        query = dict(chance.choice(seeds))
        for _ in range(chance.choice((1, 1, 2))):
            query[chance.choice((*query, "stages_per_rank", "odd"))] = chance.choice(values)
        csv = rows_text(chance.choice(texts), chance, WORDS) if chance.random() < 0.5 else None
        settings = Sliders.of(query)
        found = answer(settings, csv)
        json.dumps(found, allow_nan=False)
        if "error" in found:
            raise Refused(found["error"]["error"])
        json.dumps(explain(settings, csv), allow_nan=False)
        export(settings, chance.choice(list(EXPORTS)), csv)

    return case
