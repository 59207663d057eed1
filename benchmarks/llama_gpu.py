"""An unmodified Llama of about a billion parameters on one GPU: several stages on one rank against the unsplit model.

    python benchmarks/llama_gpu.py [--steps 20] [--json FILE]

Hugging Face's own class, from a configuration, in bf16. First correctness: loss and gradients of one step of every
schedule against the unsplit model that accumulates over the same microbatches. Then time: every round runs one step of
the unsplit model and of each schedule in turn; medians of ratios to the unsplit step of the same round, with quartiles.
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

import torch
import transformers
from torch import Tensor, nn

import drumline as dl

SCHEDULES = (("looped-bfs", 4), ("interleaved-1f1b", 4), ("interleaved-zb", 4), ("zb-v", 2))
MICROBATCHES, ROWS, TOKENS = 8, 2, 1024


def built() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.LlamaConfig(
        vocab_size=32_000, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
        num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        kind: Any = transformers.LlamaForCausalLM
        model = kind(config)
    ids = torch.randint(3, 32_000, (MICROBATCHES * ROWS, TOKENS), device="cuda")
    trained: nn.Module = model.to(torch.bfloat16).train()
    return trained, {"input_ids": ids, "labels": ids}


def unsplit(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    total = torch.zeros((), device="cuda")
    share = torch.tensor(1 / MICROBATCHES, device="cuda")
    cut = {name: tensor.chunk(MICROBATCHES) for name, tensor in batch.items()}
    for number in range(MICROBATCHES):
        loss = model(**{name: each[number] for name, each in cut.items()}).loss
        loss.backward(share.to(loss.dtype))
        total += loss.detach() * share
    return total


def cleared(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


def checked(model: nn.Module, batch: dict[str, Tensor], pipes: dict[str, dl.Pipeline]) -> dict[str, Any]:
    """Return each schedule's differences from the unsplit model: of the loss, and the largest of a gradient."""
    torch.use_deterministic_algorithms(True)  # or attention's backward differs from run to run by 1e-2 in bf16
    cleared(model)
    wanted = float(unsplit(model, batch))
    gradients = {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}
    found = {}
    for name, pipe in pipes.items():
        cleared(model)
        loss = pipe.step(**batch).loss
        assert loss is not None
        gaps = {
            path: float((param.grad.float() - gradients[path].float()).norm() / gradients[path].float().norm())
            for path, param in pipe.named_parameters()
            if param.grad is not None
        }
        assert gaps.keys() == gradients.keys(), "a gradient is missing"
        found[name] = {"loss": abs(float(loss) - wanted), "gradient": max(gaps.values())}
    torch.use_deterministic_algorithms(False)
    for name, entry in found.items():
        assert entry["gradient"] <= 1e-3, (name, entry)
    return found


def timed(step: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model, batch = built()
    count = sum(param.numel() for param in model.parameters())
    print(f"{count / 1e9:.2f} B parameters, bf16, {MICROBATCHES} microbatches of {ROWS} x {TOKENS} tokens")
    pipes = {
        name: dl.Pipeline(
            model, schedule=name, num_microbatches=MICROBATCHES, stages_per_rank=stages, num_ranks=1, example=batch,
            balance="even",
        )
        for name, stages in SCHEDULES
    }  # fmt: skip
    differences = checked(model, batch, pipes)
    steps: dict[str, Callable[[], Any]] = {
        "unsplit": lambda: unsplit(model, batch),
        **{name: partial(pipe.step, **batch) for name, pipe in pipes.items()},
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for round_ in range(arguments.steps + 2):
        for name, step in steps.items():
            cleared(model)
            took = timed(step)
            if round_ >= 2:
                seconds[name].append(took)
    rows = []
    for name in steps:
        ratios = [duration / other for duration, other in zip(seconds[name], seconds["unsplit"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            {
                "name": name,
                "milliseconds": statistics.median(seconds[name]) * 1e3,
                "ratio": middle,
                "quartiles": [low, high],
                **differences.get(name, {}),
            }
        )
        gap = differences.get(name)
        told = f"  loss {gap['loss']:.1e}  gradients {gap['gradient']:.1e}" if gap else ""
        print(f"{name:18} {rows[-1]['milliseconds']:8.1f} ms  x{middle:.3f} [{low:.3f}, {high:.3f}]{told}")
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
    if arguments.json:
        arguments.json.write_text(json.dumps({"parameters": count, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
