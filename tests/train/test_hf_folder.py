"""Models of Hugging Face from a folder: weights, tokenizer, and packed rows where the family keeps them apart."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import drumline as dl
from drumline.core.errors import DrumlineError
from drumline.train.config.settings import (
    BatchSettings,
    DataSettings,
    EvaluationSettings,
    LengthSettings,
    ModelSettings,
    TrainSettings,
)
from drumline.train.data.build import build_data
from drumline.train.models.build import build_model
from drumline.train.models.built import IGNORED
from drumline.train.models.hf import keeps_documents_apart
from extras import needed
from refused import refused
from some import some

transformers: Any = needed("transformers", extra="hf")
tokenizers: Any = needed("tokenizers", extra="hf")
SIZES = {
    "vocab_size": 97, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
NUMBERS = "one two three four five six seven eight nine ten"
TEMPLATE = (
    "{% for one in messages %}<{{ one['role'][0] }}> {{ one['content'] }} </s>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Llama that knows a few words."""
    folder = tmp_path_factory.mktemp("llama")
    marks = ["<unk>", "<s>", "</s>", "<u>", "<a>"]
    words = [*marks, *NUMBERS.split()]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(marks)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=TEMPLATE
    )
    made.save_pretrained(folder)
    torch.manual_seed(4)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def settings(path: Path, how: str, file: Path, kind: str = "text") -> TrainSettings:
    return TrainSettings(
        model=ModelSettings(kind="hf", path=str(path)),
        batch=BatchSettings(sequences=4, microbatch=1, sequence=12),
        data=DataSettings(kind=kind, files=(str(file),), separator="\n"),
        lengths=LengthSettings(how=how),
        evaluation=EvaluationSettings(every=0),
    )


def test_packed_rows_train_as_documents_one_by_one(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one two three\nfour five six seven\neight nine\nten\none three five seven nine\n" * 6)
    wanted = settings(folder, "packed", file)
    whole, built = build_model(wanted), build_model(wanted, device="meta")
    assert built.weights == str(folder)
    batch = next(iter(build_data(wanted, built).training))
    pipe = dl.Pipeline(
        built.model, weights=built.weights, loss_fn=built.loss_fn, schedule="zb-v", num_microbatches=4, num_ranks=2,
        balance="even", transport="in-process",
    )  # fmt: skip
    loss = pipe.step(**batch.inputs, target=batch.target).loss
    sums, count = torch.zeros(()), 0
    for row in range(4):
        places = batch.inputs["position_ids"][row]
        starts = [*torch.nonzero(places == 0).flatten().tolist(), 12]
        for start, stop in pairwise(starts):
            target = batch.target[row, start:stop]
            logits = whole.model(input_ids=batch.inputs["input_ids"][row : row + 1, start:stop]).logits[0]
            sums = sums + torch.nn.functional.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")
            count += int((target != IGNORED).sum())
    assert count == batch.num_tokens
    torch.autograd.backward(sums / count)
    assert loss is not None
    assert torch.isclose(loss, (sums / count).detach())
    want: dict[str, Any] = {name: param.grad for name, param in whole.model.named_parameters()}
    for name, param in pipe.named_parameters():
        assert param.grad is not None
        assert torch.allclose(param.grad, want[name], atol=1e-6, rtol=1e-4), name


def test_a_chat_template_writes_conversations_and_only_answers_count(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    told = [
        {"role": role, "content": text}
        for role, text in zip(["user", "assistant"] * 2, ["one", "two", "six", "ten"], strict=True)
    ]
    file.write_text("\n".join([json.dumps({"messages": told}), json.dumps({"prompt": "one", "response": "two"})] * 4))
    wanted = settings(folder, "padded", file, kind="instructions")
    built = build_model(wanted, device="meta")
    batch = next(iter(build_data(wanted, built).training))
    assert built.tokenizer is not None
    written = {
        built.tokenizer.inner.decode([value for value in row.tolist() if value != IGNORED])  # type: ignore[attr-defined]
        for part in batch.target
        for row in part
    }
    assert written == {"two </s> ten </s>", "two </s>"}


def test_families_that_attend_across_documents_are_refused_when_packed(tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text("one\n" * 99)
    small = {"vocab_size": 300, "hidden_size": 16, "n_layer": 2, "n_head": 2}
    transformers.BloomConfig(**small).save_pretrained(tmp_path / "bloom")
    with refused(DrumlineError, "a bloom model attends across the documents of a row"):
        build_model(settings(tmp_path / "bloom", "packed", file), device="meta")
    assert build_model(settings(tmp_path / "bloom", "padded", file), device="meta").weights is None
    wide = {**SIZES, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32}
    assert keeps_documents_apart(transformers.Qwen2Config(**wide))


def test_wrong_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "strange").mkdir()
    strange = {"model_type": "strange", "auto_map": {"AutoConfig": "evil.Config"}}
    (tmp_path / "strange" / "config.json").write_text(json.dumps(strange))
    transformers.T5Config().save_pretrained(tmp_path / "t5")
    for path, said in some(
        [
            (tmp_path / "none", "there is no such folder or file"),
            (tmp_path, "has no config.json"),
            (tmp_path / "strange", "cannot be read"),
            (tmp_path / "t5", "no causal language model"),
        ]
    ):
        with refused(DrumlineError, said):
            build_model(settings(path, "padded", tmp_path), device="meta")
    longer = TrainSettings(model=ModelSettings(kind="hf", path=str(folder)), batch=BatchSettings(sequence=65))
    with refused(DrumlineError, r"batch\.sequence is 65"):
        build_model(longer, device="meta")
