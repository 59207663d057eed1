"""What splitting the backwards of a LoRA model costs: processor time of steps, and of a plain PEFT loop.

    python benchmarks/frozen_split.py [--width 256] [--rank 8] [--rounds 5]

Two ranks take turns in one process, so that processor time is all the work there is. All contestants take turns, too.
A named schedule runs whole backwards, the same program given as a `Program` runs as it is. Gradients of the first step
must have the bits of the plain loop.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

import drumline as dl
from drumline.report.draw.table import table
from measure import machine

MICROBATCHES, TOKENS, VOCABULARY = 8, 128, 512
SPLIT = {"zb-h1": 1, "zb-v": 2}  # stages per rank


def model_of(width: int, rank: int) -> Any:
    """Return a Llama of eight layers with LoRA in all linear layers; the same values every time."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=width,
        intermediate_size=2 * width + width // 2,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=VOCABULARY,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    adapters = peft.LoraConfig(r=rank, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    llama = transformers.LlamaForCausalLM(config)
    return peft.get_peft_model(llama, adapters)


def loss_of(output: Any, target: Tensor) -> Tensor:
    """Return the loss of all tokens."""
    return torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), target.flatten())


def plain_step(model: Any, batch: Tensor) -> None:
    """Accumulate the gradients of all microbatches."""
    for row in torch.split(batch, 1):
        torch.autograd.backward(loss_of(model(row), row) / MICROBATCHES)


def gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients by name, and let go of them."""
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def main() -> None:
    """Print each contestant's processor time over the plain loop's."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    batch = torch.randint(0, VOCABULARY, (MICROBATCHES, TOKENS))
    schedules: dict[str, Any] = {"1f1b": "1f1b"}
    for name, stages in SPLIT.items():
        schedules[f"{name}, whole"] = name
        schedules[f"{name}, split"] = dl.generate(
            name, num_ranks=2, num_microbatches=MICROBATCHES, stages_per_rank=stages
        )
    plain = model_of(given.width, given.rank)
    models = {"plain loop": plain}
    steps: dict[str, Callable[[], object]] = {"plain loop": partial(plain_step, plain, batch)}
    settings: dict[str, Any] = {"loss_fn": loss_of, "num_ranks": 2, "transport": "in-process", "balance": "even"}
    for name, schedule in schedules.items():
        models[name] = model_of(given.width, given.rank)
        pipe = dl.Pipeline(
            models[name], schedule=schedule, num_microbatches=MICROBATCHES, example=batch, check_model=False, **settings
        )
        steps[name] = partial(pipe.step, batch, target=batch)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(given.rounds + 1):
        wanted: dict[str, Tensor] = {}
        for name, step in steps.items():
            begun = time.process_time()
            step()
            seconds[name].append(time.process_time() - begun)
            found = gradients(models[name])
            wanted = wanted or found
            assert found.keys() == wanted.keys(), f"{name}: other parameters have gradients"
            assert all(torch.equal(found[key], wanted[key]) for key in wanted), f"{name}: other gradients, turn {turn}"
    base = statistics.median(seconds["plain loop"][1:])
    rows = [(name, statistics.median(taken[1:])) for name, taken in seconds.items()]
    sizes = [(param.numel(), param.requires_grad) for param in plain.parameters()]
    share = sum(size for size, trains in sizes if trains) / sum(size for size, _ in sizes)
    print(f"width {given.width}, rank {given.rank}: {share:.1%} of the weights train; {machine()}")
    print(table(["", "ms", "of plain"], [[name, f"{taken * 1e3:.0f}", f"{taken / base:.3f}"] for name, taken in rows]))


if __name__ == "__main__":
    main()
