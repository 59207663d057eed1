"""What building a pipeline of a model with adapters costs beside the same model without, and a look before a step.

    python benchmarks/adapter_build.py [--layers 8] [--rounds 5] [--json FILE]

A Llama of width 64 with LoRA on queries and values by PEFT, two ranks in one process, `balance` by parameters, so that
nothing is timed inside. Both are built in turns; processor time is compared, which other work on the machine disturbs
least. The bar is 1.5 times. A look is what every step asks before it begins: whether anything has changed on which the
model depends, with transformers, PEFT and diffusers imported. The bar is 1 ms.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import diffusers
import peft
import torch
import transformers
from torch import nn

import drumline as dl
from measure import machine

MICROBATCHES = 4


def llama(layers: int) -> nn.Module:
    """Return a small Llama."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    kind: Any = transformers.LlamaForCausalLM
    model: nn.Module = kind(config)
    return model


def adapted(layers: int) -> nn.Module:
    """Return it with adapters."""
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(llama(layers), config)
    return model


def pipeline(model: nn.Module, batch: dict[str, Any]) -> dl.Pipeline:
    """Return a pipeline of a model."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dl.Pipeline(
            model,
            num_ranks=2,
            num_microbatches=MICROBATCHES,
            example=batch,
            balance="parameters",
            transport="in-process",
        )


def processor_seconds(model: nn.Module, batch: dict[str, Any]) -> tuple[dl.Pipeline, float]:
    """Return a pipeline and what building it took."""
    gc.collect()
    began = time.process_time()
    pipe = pipeline(model, batch)
    return pipe, time.process_time() - began


def look(pipe: dl.Pipeline, batch: dict[str, Any], turns: int = 200) -> float:
    """Return the milliseconds of a look, once steps have run."""
    for _ in range(3):
        pipe.step(**batch)
    watched = pipe._run.watched
    taken = []
    for _ in range(turns):
        began = time.process_time()
        watched.look()
        taken.append(time.process_time() - began)
    return 1e3 * statistics.median(taken)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(0, 128, (8, 16))
    batch = {"input_ids": ids, "labels": ids}
    print(f"{machine()}, torch {torch.__version__}, peft {peft.__version__}, diffusers {diffusers.__version__}")
    ratios, looks = [], []
    for turn in range(options.rounds + 1):
        plain_pipe, plain = processor_seconds(llama(options.layers), batch)
        pipe, taken = processor_seconds(adapted(options.layers), batch)
        if turn:
            ratios.append(taken / plain)
            looks.append((look(plain_pipe, batch), look(pipe, batch)))
            print(f"round {turn}: plain {plain:.2f} s, adapters {taken:.2f} s, x{ratios[-1]:.2f}; looks {looks[-1]}")
    result = {
        "layers": options.layers,
        "build ratio": statistics.median(ratios),
        "build ratios": ratios,
        "look plain ms": statistics.median(plain for plain, _ in looks),
        "look adapters ms": statistics.median(taken for _, taken in looks),
    }
    print(
        f"build x{result['build ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}); a look "
        f"{result['look adapters ms']:.2f} ms, {result['look plain ms']:.2f} ms without adapters"
    )
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
