"""A tiny Llama, a tokenizer that needs no download, and conversations, for the trainers of TRL."""

from __future__ import annotations

from typing import Any

import datasets
import tokenizers
import torch
import transformers

WORDS = "the a red blue cat dog sees eats one two three four says hello good day . ? ! yes no".split()
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}> {% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }} <end>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)


def tokenizer() -> Any:
    """Return a tokenizer of whole words, with a template for chats that marks what the assistant says."""
    special = ["<pad>", "<end>", "<unknown>", "<user>", "<assistant>"]
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(special + WORDS)}, unk_token="<unknown>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>"
    )
    fast.chat_template = TEMPLATE
    return fast


def model(**changes: Any) -> Any:
    """Return a Llama of four layers, the same one every time."""
    torch.manual_seed(0)
    settings = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=32, num_key_value_heads=2, max_position_embeddings=64, **{**settings, **changes}
    )
    return transformers.LlamaForCausalLM(config)


def sentence(generator: torch.Generator, most: int = 12) -> str:
    """Return some words, more or fewer."""
    count = int(torch.randint(3, most, (), generator=generator))
    return " ".join(WORDS[at] for at in torch.randint(len(WORDS), (count,), generator=generator).tolist())


def texts(count: int) -> Any:
    """Return a dataset of plain texts."""
    generator = torch.Generator().manual_seed(1)
    return datasets.Dataset.from_list([{"text": sentence(generator)} for _ in range(count)])


def completions(count: int) -> Any:
    """Return a dataset of prompts and what completes them."""
    generator = torch.Generator().manual_seed(2)
    return datasets.Dataset.from_list(
        [{"prompt": sentence(generator) + " ", "completion": sentence(generator)} for _ in range(count)]
    )


def chats(count: int) -> Any:
    """Return a dataset of conversations."""
    generator = torch.Generator().manual_seed(3)

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": sentence(generator)}

    return datasets.Dataset.from_list(
        [{"messages": [turn("user"), turn("assistant"), turn("user"), turn("assistant")]} for _ in range(count)]
    )


def preferences(count: int) -> Any:
    """Return a dataset of prompts, each with an answer that is preferred to another one."""
    generator = torch.Generator().manual_seed(4)
    return datasets.Dataset.from_list(
        [
            {"prompt": sentence(generator) + " ", "chosen": sentence(generator), "rejected": sentence(generator)}
            for _ in range(count)
        ]
    )
