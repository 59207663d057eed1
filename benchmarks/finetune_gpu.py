"""LoRA on a quantised base of eight billion parameters on one GPU: stages on one rank against PEFT's plain loop.

    python benchmarks/finetune_gpu.py [--base nf4 int8] [--stages 2 4] [--layers 32] [--steps 8] [--json FILE]

The shape of Llama 3 8B, random weights, packed layer by layer; LoRA of rank 16 on all linear layers of a block, in
bf16. The plain loop runs the same microbatches through the same PEFT model. First correctness: loss and gradients of
the adapters. Then time: every round runs the plain loop and each schedule in turn; medians of ratios to the plain loop
of the same round, with quartiles. Last, each one's peak memory in a step of its own, the model included.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import peft
import torch
import transformers
from torch import Tensor, nn

import drumline as dl
from drumline.model.quantised.bases import quantise

MICROBATCHES, ROWS, TOKENS = 8, 1, 1024
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SCHEDULES = ("interleaved-1f1b",)  # torchao keeps what it unpacked for the backward: few microbatches in flight


def tuned(base: str, layers: int) -> nn.Module:
    """Return the model, its base packed, with adapters that do something."""
    config = transformers.LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        use_cache=False,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    kind: Any = transformers.LlamaForCausalLM
    with torch.device("cuda"):
        model = kind(config)
    torch.set_default_dtype(torch.float32)
    if base != "bf16":
        quantise(model, base)
    settings = peft.LoraConfig(r=16, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
    adapted: nn.Module = peft.get_peft_model(model, settings, autocast_adapter_dtype=False)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.01)
    return adapted.train()


def plain(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Run the same microbatches one after another."""
    total = torch.zeros((), device="cuda")
    share = torch.tensor(1 / MICROBATCHES, device="cuda")
    cut = {name: rows.chunk(MICROBATCHES) for name, rows in batch.items()}
    for number in range(MICROBATCHES):
        loss = model(**{name: parts[number] for name, parts in cut.items()}).loss
        loss.backward(share.to(loss.dtype))
        total += loss.detach() * share
    return total


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return the adapters' gradients, and clear them."""
    grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    for param in model.parameters():
        param.grad = None
    return grads


def timed(step: Callable[[], Any]) -> float:
    """Return the seconds of a step."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def peak(step: Callable[[], Any]) -> float:
    """Return the GiB that a step needs, the model included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**30


def measured(base: str, layers: int, stages: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return the rows of a base, and print them."""
    model = tuned(base, layers)
    ids = torch.randint(3, 128_256, (MICROBATCHES * ROWS, TOKENS), device="cuda")
    batch = {"input_ids": ids, "labels": ids}
    trained = sum(param.numel() for param in model.parameters() if param.requires_grad)
    print(f"{base}: {trained / 1e6:.1f} M trained parameters, {torch.cuda.memory_allocated() / 2**30:.2f} GiB at rest")
    steps: dict[str, Callable[[], Any]] = {"plain PEFT loop": partial(plain, model, batch)}
    for name in SCHEDULES:
        for number in stages:
            pipe = dl.Pipeline(
                model,
                schedule=name,
                num_microbatches=MICROBATCHES,
                stages_per_rank=number,
                num_ranks=1,
                example=batch,
                balance="even",
            )
            steps[f"{name} x{number}"] = partial(pipe.step, **batch)
    torch.use_deterministic_algorithms(True)  # or attention's backward differs from run to run by 1e-2 in bf16
    steps["plain PEFT loop"]()
    wanted = gradients(model)
    gaps: dict[str, float] = {}
    for name, step in steps.items():  # the plain loop once more, too
        step()
        ours = gradients(model)
        assert ours.keys() == wanted.keys(), "a gradient is missing"
        gaps[name] = max(
            float((ours[path].float() - grad.float()).norm() / grad.float().norm()) for path, grad in wanted.items()
        )
        print(f"{name:22} gradients off by {gaps[name]:.1e}", flush=True)
    torch.use_deterministic_algorithms(False)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        for name, step in steps.items():
            gradients(model)
            taken = timed(step)
            if turn >= 2:
                seconds[name].append(taken)
    rows = []
    for name, step in steps.items():
        gradients(model)
        ratios = [ours / loop for ours, loop in zip(seconds[name], seconds["plain PEFT loop"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        row = {"base": base, "name": name, "milliseconds": statistics.median(seconds[name]) * 1e3, "ratio": middle}
        row |= {"quartiles": [low, high], "peak GiB": peak(step), "gradients": gaps[name]}
        rows.append(row)
        print(
            f"{name:22} {row['milliseconds']:8.1f} ms  x{middle:.3f} [{low:.3f}, {high:.3f}]  peak "
            f"{row['peak GiB']:.2f} GiB",
            flush=True,
        )
    return rows


def main() -> None:
    """Measure every base that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--base", nargs="+", default=["nf4", "int8"], choices=["bf16", "nf4", "int8", "llm-int8", "float8"]
    )
    parser.add_argument("--stages", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for base in options.base:
        rows += measured(base, options.layers, options.stages, options.steps)
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"layers": options.layers, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
