"""LoRA on two ranks, each of which holds half of a frozen base; with `--base nf4`, which is QLoRA, in a quarter of it.

    python examples/finetune_lora.py [MODEL] [--base nf4] [--out FOLDER]

MODEL is the folder of a Hugging Face model; without it, a small Llama with random weights is made. Every rank builds
the model without memory, reads the weights of its own stages, and quantises each as it comes. The adapter is written
as PEFT writes it: `PeftModel.from_pretrained(base, FOLDER)` loads it.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import save_file

import drumline as dl

STEPS, ROWS, TOKENS, MICROBATCHES = 5, 16, 32, 8


def small_llama(folder: Path) -> Path:
    """Write a model that needs no download."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
    )
    kind: Any = transformers.LlamaForCausalLM
    kind(config).save_pretrained(folder)
    return folder


def adapted(folder: str, base: str) -> Any:
    """Return the model with adapters, on the meta device: nothing is read yet."""
    kind: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        model = kind.from_config(transformers.AutoConfig.from_pretrained(folder))
    if base:
        dl.quantise(model, base)
    config = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    with torch.device("meta"):
        return peft.get_peft_model(model, config)


def train(folder: str, base: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train on this rank; return the losses, and the adapters of this rank's stages by PEFT's names."""
    torch.manual_seed(0)
    rows = torch.randint(0, 256, (ROWS, TOKENS))  # your tokens; -100 in labels is left out of the loss
    batch = {"input_ids": rows, "labels": rows}
    pipe = dl.Pipeline(adapted(folder, base), weights=folder, num_microbatches=MICROBATCHES, example=batch)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-2)
    losses = []
    for _ in range(STEPS):
        result = pipe.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(result.loss) if result.loss is not None else float("nan"))
    state = {name: tensor for name, tensor in pipe.state_dict().items() if "lora_" in name}
    return losses, {name.replace(".default", ""): tensor.cpu() for name, tensor in state.items()}


def main() -> None:
    """Train on two ranks, and write the adapter."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path)
    parser.add_argument("--base", default="", choices=["", "int8", "nf4"])
    parser.add_argument("--out", type=Path, default=Path("out/adapter"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.model or small_llama(Path(scratch))
        ranks = dl.launch(train, str(folder), options.base, num_ranks=2)
        options.out.mkdir(parents=True, exist_ok=True)
        adapters = {name: tensor.contiguous() for _, state in ranks for name, tensor in state.items()}
        save_file(adapters, options.out / "adapter_model.safetensors")
        adapted(str(folder), options.base).peft_config["default"].save_pretrained(str(options.out))
    for number, (losses, state) in enumerate(ranks):
        print(f"rank {number}: {len(state)} tensors of adapters, losses {' '.join(f'{loss:.4f}' for loss in losses)}")
    print(f"{len(adapters)} tensors in {options.out}")


if __name__ == "__main__":
    main()
