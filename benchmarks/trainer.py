"""A step of transformers' Trainer on a pipeline against the same step of a bare loop.

    python benchmarks/trainer.py [--steps 60] [--schedule 1f1b] [--layers 4] [--width 128] [--json FILE]

Two ranks, one thread each, M = 4, Hugging Face's Llama with random weights. Both train copies of one model on the same
data, and take turns, step by step, in one run:

    trainer    from the end of one step to the end of the next: data, step, clipping, update, logs every 10 steps
    bare       a loop over a DataLoader: data, `pipe.step`, clipping, update, the learning rate

Printed: medians, and the ratio of each step of the trainer to the bare step after it, with its quartiles. The bar is
1.05. Ends with 1 if it is missed, or if the losses of the two differ. The ratio of processor time, of both ranks
together, tells the same where other programs run as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from measure import Stolen, machine

MICROBATCHES, ROWS, WARM = 4, 4, 5
BAR = 1.05
CLOSE = 1e-5  # largest difference of a loss


@dataclass(frozen=True)
class Case:
    """What is trained, and how often."""

    layers: int
    width: int
    tokens: int
    schedule: str
    steps: int

    def model(self) -> Any:
        """Return a Llama, the same in every process."""
        import torch

        transformers: Any = import_module("transformers")

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=1024, hidden_size=self.width, intermediate_size=4 * self.width, num_hidden_layers=self.layers,
            num_attention_heads=4, num_key_value_heads=4, use_cache=False,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).train()

    def data(self) -> list[dict[str, Any]]:
        """Return the rows of all steps."""
        import torch

        rows = (self.steps + WARM) * MICROBATCHES * ROWS
        ids = torch.randint(3, 1024, (rows, self.tokens), generator=torch.Generator().manual_seed(1))
        return [{"input_ids": row, "labels": row} for row in ids]


def bare_steps(case: Case) -> Iterator[float]:
    """Train step by step in a bare loop, and yield each loss."""
    import torch

    import drumline as dl

    transformers: Any = import_module("transformers")

    model = case.model()
    pipe = dl.Pipeline(model, schedule=case.schedule, num_microbatches=MICROBATCHES, seed=3)
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3, weight_decay=0.0, fused=True)  # as the trainer makes it
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 0, case.steps + WARM)
    rows: Any = case.data()
    loader: Any = torch.utils.data.DataLoader(
        rows, batch_size=ROWS * MICROBATCHES, collate_fn=transformers.default_data_collator
    )
    for batch in loader:
        loss: Any = pipe.step(**batch).loss
        pipe.clip_grad_norm_(1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        yield float(loss)


def turns(case: Case, folder: str) -> dict[str, list[float]]:
    """Train by the trainer, and after each of its steps make a bare one; return the seconds and losses of both."""
    from drumline.integrations.transformers import Trainer

    transformers: Any = import_module("transformers")
    transformers.utils.logging.set_verbosity_error()
    bare = bare_steps(case)
    names = ("trainer", "bare", "processor of trainer", "processor of bare", "loss of trainer", "loss of bare")
    taken: dict[str, list[float]] = {name: [] for name in names}

    class Turns(transformers.TrainerCallback):  # type: ignore[misc]
        began = processor_began = 0.0

        def on_step_end(self, *_: Any, **__: Any) -> None:
            taken["trainer"].append(time.perf_counter() - self.began)
            taken["processor of trainer"].append(time.process_time() - self.processor_began)
            start, processor_start = time.perf_counter(), time.process_time()
            taken["loss of bare"].append(next(bare))
            taken["bare"].append(time.perf_counter() - start)
            taken["processor of bare"].append(time.process_time() - processor_start)
            trainer.pipeline.gather("both have ended")
            self.began, self.processor_began = time.perf_counter(), time.process_time()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            if "loss" in logs:
                taken["loss of trainer"].append(logs["loss"])

    args = transformers.TrainingArguments(
        folder, per_device_train_batch_size=ROWS, gradient_accumulation_steps=MICROBATCHES, learning_rate=1e-3,
        max_steps=case.steps + WARM, logging_steps=10, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, train_sampling_strategy="sequential", seed=3, dataloader_pin_memory=False,
    )  # fmt: skip
    settings = {"schedule": case.schedule}
    trainer = Trainer(case.model(), args, train_dataset=case.data(), callbacks=[Turns()], pipeline=settings)
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train()
    return taken


def run(case: Case) -> dict[str, Any]:
    """Return what the two took, of the slower rank, and how far their losses are apart."""
    import drumline as dl

    launch: Callable[..., list[dict[str, list[float]]]] = dl.launch
    with tempfile.TemporaryDirectory() as folder:
        first, *others = launch(turns, case, folder, num_ranks=2)
    seconds = {
        name: [max(pair) for pair in zip(*(each[name] for each in (first, *others)), strict=True)][WARM:]
        for name in ("trainer", "bare")
    }
    ratios = [mine / theirs for mine, theirs in zip(seconds["trainer"], seconds["bare"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    used = {
        name: statistics.median(
            map(sum, zip(*(each[f"processor of {name}"] for each in (first, *others)), strict=True))
        )
        for name in ("trainer", "bare")
    }
    losses = [statistics.mean(first["loss of bare"][at : at + 10]) for at in range(0, len(first["loss of bare"]), 10)]
    apart = [abs(mine - theirs) for mine, theirs in zip(first["loss of trainer"], losses, strict=False)]
    return {
        **{f"{name} (ms)": 1000 * statistics.median(taken) for name, taken in seconds.items()},
        "ratio": middle, "quartiles": [low, high],
        "ratio of sums": sum(seconds["trainer"]) / sum(seconds["bare"]),
        "ratio of processor time": used["trainer"] / used["bare"], "losses apart": max(apart),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    case = Case(given.layers, given.width, given.tokens, given.schedule, given.steps)
    stolen = Stolen()
    found = run(case)
    print(f"{machine(2)}; {case.steps} steps of each, {stolen.share:.0%} of the processors' time stolen")
    print(f"trainer {found['trainer (ms)']:.1f} ms, bare {found['bare (ms)']:.1f} ms a step")
    low, high = found["quartiles"]
    print(f"ratio {found['ratio']:.3f} ({low:.3f} to {high:.3f}; of the sums {found['ratio of sums']:.3f}), bar {BAR}")
    print(f"processor time of both ranks: ratio {found['ratio of processor time']:.3f}")
    print(f"losses at most {found['losses apart']:.1e} apart")
    if given.json:
        given.json.write_text(json.dumps({"case": asdict(case), **found, "machine": machine(2)}, indent=1))
    return int(found["ratio"] > BAR or found["losses apart"] > CLOSE)


if __name__ == "__main__":
    sys.exit(main())
