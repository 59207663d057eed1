"""Runs of TRL's trainers, in one process and on a pipeline: a tiny Llama, a tokenizer of words, and small datasets."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from extras import needed

os.environ["HF_HUB_OFFLINE"] = "1"  # also of ranks, which inherit it
peft: Any = needed("peft", extra="tune")
datasets: Any = needed("datasets", extra="trainers")
tokenizers: Any = needed("tokenizers", extra="hf")
transformers: Any = needed("transformers", extra="hf")
trl: Any = needed("trl", extra="trainers")
datasets.disable_progress_bars()
datasets.disable_caching()

MARKS = [
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of TRL, about what its next version drops
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
IN_ONE_PROCESS = {"num_ranks": 2, "transport": "in-process"}
TOKENS = ["<pad>", "<end>", "<unknown>", "<user>", "<assistant>"]
WORDS = ["a", "red", "cat", "sees", "eats", "one", "two", "hello", "good", "day", "yes", "no"]
TEMPLATE = (
    "{% for turn in messages %}<{{ turn['role'] }}> {% if turn['role'] == 'assistant' %}"
    "{% generation %}{{ turn['content'] }} <end>{% endgeneration %}{% else %}{{ turn['content'] }}{% endif %} "
    "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
# Of these only time differs, and the pipeline adds its own.
_TIMES = ("_runtime", "_per_second")


def tokenizer() -> Any:
    """Return a tokenizer of whole words, with a template that marks what the assistant says."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: at for at, word in enumerate(TOKENS + WORDS)}, unk_token="<unknown>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unknown>", chat_template=TEMPLATE
    )


def llama(seed: int = 0) -> Any:
    """Return a Llama of two layers, the same one for a seed."""
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=24,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=1,
    )
    return transformers.LlamaForCausalLM(config)


def lora() -> Any:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def data(kind: str, count: int) -> Any:
    """Return a dataset of texts, completions, chats or preferences, of 3 to 9 words each."""
    generator = torch.Generator().manual_seed(len(kind))

    def sentence() -> str:
        length = int(torch.randint(3, 10, (), generator=generator))
        return " ".join(WORDS[at] for at in torch.randint(len(WORDS), (length,), generator=generator).tolist())

    def turn(role: str) -> dict[str, str]:
        return {"role": role, "content": sentence()}

    columns: dict[str, Callable[[], dict[str, Any]]] = {
        "texts": lambda: {"text": sentence()},
        "completions": lambda: {"prompt": sentence() + " ", "completion": sentence()},
        "chats": lambda: {"messages": [turn("user"), turn("assistant")]},
        "preferences": lambda: {"prompt": sentence() + " ", "chosen": sentence(), "rejected": sentence()},
    }
    return datasets.Dataset.from_list([columns[kind]() for _ in range(count)])


def trainer(kind: type, folder: Path, rows: Any, changes: dict[str, Any], **named: Any) -> Any:
    """Return a trainer with the arguments of all these tests, and some changes."""
    settings = trl.DPOConfig if issubclass(kind, trl.DPOTrainer) else trl.SFTConfig
    args = settings(
        **{
            "output_dir": str(folder),
            "max_steps": 2,
            "per_device_train_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "bf16": False,
            "report_to": "none",
            "save_strategy": "no",
            "use_cpu": True,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "max_length": 32,
            "pad_to_multiple_of": 32,
            **changes,
        }
    )
    given = {"model": llama(), "args": args, "train_dataset": rows, "processing_class": tokenizer(), **named}
    runner = kind(**given)
    runner.remove_callback(transformers.PrinterCallback)
    return runner


def logs(runner: Any) -> list[dict[str, float]]:
    """Return what a trainer has logged, without times and without what the pipeline adds."""
    return [
        {name: value for name, value in entry.items() if not name.endswith(_TIMES) and name[:9] != "pipeline_"}
        for entry in runner.state.log_history
    ]


def assert_same(own: list[dict[str, float]], plain: list[dict[str, float]]) -> None:
    """Compare logs: the same entries at the same steps, and numbers within 1e-5."""
    assert len(own) == len(plain) > 0
    for entry, other in zip(own, plain, strict=True):
        assert entry.keys() == other.keys()
        for name, value in other.items():
            assert abs(entry[name] - value) < 1e-5, (name, entry[name], value)


def assert_same_weights(own: dict[str, Any], plain: dict[str, Any], within: float = 1e-5) -> None:
    """Compare every tensor of saved weights, or of models."""
    assert own.keys() == plain.keys()
    for name, tensor in plain.items():
        assert own[name].dtype == tensor.dtype
        assert (own[name] - tensor).abs().max() <= within, name


def assert_runs_alike(
    kinds: tuple[type, type], folder: Path, rows: str, changes: dict[str, Any], makers: dict[str, Callable[[], Any]]
) -> tuple[Any, Any]:
    """Train by TRL's own trainer and by ours in one process, compare logs and weights, and return both."""
    runs = []
    for kind, settings in zip(kinds, ({}, {"pipeline": IN_ONE_PROCESS}), strict=True):
        named = {name: make() for name, make in makers.items()}
        if "eval_strategy" in changes:
            named["eval_dataset"] = data(rows, 5)
        run = trainer(kind, folder / kind.__module__, data(rows, 22), changes, **named, **settings)
        run.train()
        runs.append(run)
    plain, own = runs
    assert_same(logs(own), logs(plain))
    assert_same_weights(own.model.state_dict(), plain.model.state_dict())
    return plain, own
