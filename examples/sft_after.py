"""The script `sft_before.py` on a pipeline: two lines have changed, the trainer's import and its last argument.

    torchrun --nproc-per-node 2 examples/sft_after.py [FOLDER]

Each of the two processes trains half of the layers. Losses, logs and the saved adapter are those of `sft_before.py`.
"""

from __future__ import annotations

import sys
from typing import Any

import tokenizers
import torch
import transformers
import trl
from datasets import Dataset
from peft import LoraConfig

from drumline.integrations.trl import SFTTrainer

WORDS = ["red", "blue", "cat", "dog", "sees", "eats", "one", "two", "hello", "day", "yes", "no"]
TEMPLATE = "{% for turn in messages %}<{{ turn['role'] }}> {{ turn['content'] }} <end> {% endfor %}"


def small_llama() -> Any:
    """Return a model of four layers; yours is `AutoModelForCausalLM.from_pretrained(...)`, or its name."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=2
    )
    kind: Any = transformers.LlamaForCausalLM
    return kind(config)


def words() -> Any:
    """Return a tokenizer of whole words with a template for chats; yours comes with the model."""
    numbers = {word: at for at, word in enumerate(["<pad>", "<end>", "<user>", "<assistant>", *WORDS])}
    splitter = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers))
    splitter.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    kind: Any = transformers.PreTrainedTokenizerFast
    return kind(tokenizer_object=splitter, pad_token="<pad>", eos_token="<end>", chat_template=TEMPLATE)


def chats() -> Dataset:
    """Return chats in which the assistant repeats what the user says."""
    drawn = torch.randint(len(WORDS), (64, 6), generator=torch.Generator().manual_seed(1))
    said = [" ".join(WORDS[at] for at in row) for row in drawn.tolist()]
    roles = ("user", "assistant")
    return Dataset.from_list([{"messages": [{"role": role, "content": text} for role in roles]} for text in said])


def main(folder: str = "out/sft") -> None:
    """Train, and save the adapter."""
    args = trl.SFTConfig(
        output_dir=folder,
        max_steps=10,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        learning_rate=1e-2,
        logging_steps=1,
        bf16=False,
        report_to="none",
        save_strategy="no",
    )
    trainer = SFTTrainer(
        model=small_llama(),
        args=args,
        train_dataset=chats(),
        processing_class=words(),
        peft_config=LoraConfig(r=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM"),
        pipeline={"schedule": "1f1b"},
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main(*sys.argv[1:])
