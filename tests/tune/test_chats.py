"""Chats for an adapter: written by a template, only answers count, and none attends to another in a packed row."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from drumline.core.errors import ConfigError, DrumlineError
from drumline.train.data.build import build_data
from drumline.train.models.built import IGNORED
from drumline.train.tune.build_tuned import build_tuned
from refused import refused
from tune.llama import TEMPLATE, llama_folder
from tune.llama import chats as chats_of
from tune.runs import settings_of

MARKED = (
    "{% for turn in messages %}<{{ turn['role'][0] }}> {% if turn['role'] == 'assistant' %}{% generation %}"
    "{{ turn['content'] }}{% endgeneration %}{% else %}{{ turn['content'] }}{% endif %} </s> {% endfor %}"
)


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats_of(tmp_path_factory.mktemp("data") / "chats.jsonl")


def answers(llama: Path, file: Path, out: Path, **keys: Any) -> set[str]:
    """Return what counts in the first batch, as text."""
    settings = settings_of(llama, file, out, lengths__how="padded", **keys)
    built = build_tuned(settings, device="meta")
    data = build_data(settings, built)
    batch = next(iter(data.training))
    data.close()
    inner: Any = built.tokenizer
    rows = [row.tolist() for part in batch.target for row in part]
    return {inner.inner.decode([token for token in row if token != IGNORED]) for row in rows}


def test_only_the_turns_of_the_assistant_count(llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    turns = [
        ("system", "nine"),
        ("user", "one two"),
        ("assistant", "three"),
        ("user", "four"),
        ("assistant", "five six"),
    ]
    record = {"messages": [{"role": role, "content": text} for role, text in turns]}
    file.write_text((json.dumps(record) + "\n") * 8)
    assert answers(llama, file, tmp_path) == {"three </s> five six </s>"}
    template = tmp_path / "marked.jinja"
    template.write_text(MARKED)
    assert answers(llama, file, tmp_path, data__chat_template=str(template)) == {"three five six"}, "what is marked"


def test_a_tokenizer_without_a_template_is_refused_unless_one_is_named(chats: Path, tmp_path: Path) -> None:
    bare = llama_folder(tmp_path / "bare", template=None)
    with refused(DrumlineError, "data.chat_template is not set, and the tokenizer of"):
        answers(bare, chats, tmp_path)
    template = tmp_path / "own.jinja"
    template.write_text(TEMPLATE)
    assert all(text.endswith("</s>") for text in answers(bare, chats, tmp_path, data__chat_template=str(template)))
    assert answers(bare, chats, tmp_path, data__chat_template="plain")
    with refused(ConfigError, r"data\.chat_template: nowhere\.jinja: no such file", expected="a file with a Jinja"):
        settings_of(bare, chats, tmp_path, data__chat_template="nowhere.jinja")


def test_what_a_template_refuses_is_told_with_its_line(llama: Path, chats: Path, tmp_path: Path) -> None:
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('no such role here') }}")
    with refused(DrumlineError, "chats.jsonl, line 1: the chat template cannot write it: no such role here"):
        answers(llama, chats, tmp_path, data__chat_template=str(template))


def test_packed_chats_compute_as_each_alone(llama: Path, chats: Path, tmp_path: Path) -> None:
    settings = settings_of(llama, chats, tmp_path)
    assert settings.lengths.how == "packed"
    built = build_tuned(settings, device="cpu")
    model: Any = built.model.eval()
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(param, std=0.2)
    data = build_data(settings, built)
    batch = next(iter(data.training))
    data.close()
    tokens, places = batch.inputs["input_ids"], batch.inputs["position_ids"]
    starts = [*(places[0] == 0).nonzero().flatten().tolist(), tokens.shape[1]]
    assert len(starts) > 3, "several chats in a row"
    with torch.no_grad():
        row = model(input_ids=tokens[:1], position_ids=places[:1]).logits[0]
        for start, stop in pairwise(starts):
            alone = model(input_ids=tokens[:1, start:stop]).logits[0]
            assert torch.allclose(row[start:stop], alone, atol=1e-5)
