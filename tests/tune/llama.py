"""A small Llama in a folder, with weights, and a tokenizer of a few words that knows how to write a conversation."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from extras import needed

peft: Any = needed("peft", extra="tune")
transformers: Any = needed("transformers", extra="hf")
tokenizers: Any = needed("tokenizers", extra="hf")

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
    "use_cache": False,
}  # fmt: skip
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
MARKS = ["<unk>", "<s>", "</s>", "<u>", "<a>"]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn['role'][0] }}> {{ turn['content'] }} </s> {% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def llama_folder(folder: Path, *, template: str | None = TEMPLATE, seed: int = 4) -> Path:
    """Write model and tokenizer into a folder, and return it."""
    words = [*MARKS, *WORDS]
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: at for at, word in enumerate(words)}, "<unk>"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(MARKS)
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    made.save_pretrained(folder)
    torch.manual_seed(seed)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(folder)
    return folder


def chats(path: Path, num: int = 40) -> Path:
    """Write conversations of a question and an answer, with a system's turn in some, and return the file."""
    lines = []
    for at in range(num):
        turns = [
            {"role": "user", "content": " ".join(_words(at, 2 + at % 3))},
            {"role": "assistant", "content": " ".join(_words(3 * at + 1, 1 + at % 4))},
        ]
        lines.append(json.dumps({"messages": turns * (1 + at % 2)}))
    path.write_text("\n".join(lines) + "\n")
    return path


def _words(at: int, count: int) -> Sequence[str]:
    return [WORDS[(at * 7 + number) % len(WORDS)] for number in range(count)]
