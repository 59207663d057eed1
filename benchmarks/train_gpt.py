"""A training run on two ranks beside one process over the same microbatches, and how far the curves are apart.

    python benchmarks/train_gpt.py [--steps 300] [--ranks 2] [--schedule 1f1b] [--hf FOLDER --text FILE] [--json FILE]

The model is a byte-level GPT of 10.9 million parameters on the text that Drumline ships, or an unmodified Hugging Face
model from a folder on a text of yours. The ranks run `run_training`, which `drumline train` runs too. The one process
is a plain loop of PyTorch, written here: the same model from the same seed, the same batches, cut by `tensor_split`;
each microbatch's mean loss counts by its tokens; then clipping, AdamW and a cosine.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

BOUND = 1e-4  # relative difference of any loss
SEED = 7
LR, FINAL, WARMUP, CLIP = 1e-3, 0.1, 20, 1.0


def settings_of(args: argparse.Namespace, folder: str) -> Any:
    """Return the settings of the run."""
    from drumline.train.config import settings as tables

    model = tables.ModelSettings(kind="gpt", num_layers=6, hidden=384, num_heads=6)
    data = tables.DataSettings(kind="text", files=tuple(args.text))
    if args.hf:
        model = tables.ModelSettings(kind="hf", path=args.hf)
    return tables.TrainSettings(
        model=model,
        data=data,
        batch=tables.BatchSettings(
            sequences=args.sequences, microbatch=args.microbatch, sequence=args.sequence, accumulate=args.accumulate
        ),
        mesh=tables.MeshSettings(pipeline=args.ranks),
        pipeline=tables.PipelineSettings(schedule=args.schedule, stages_per_rank=args.stages_per_rank),
        optimizer=tables.OptimizerSettings(kind="AdamW", lr=LR, clip_norm=CLIP),
        learning_rate=tables.LearningRateSettings(shape="cosine", warmup_steps=WARMUP, final=FINAL),
        evaluation=tables.EvaluationSettings(every=max(args.steps // 3, 1), batches=2),
        run=tables.RunSettings(steps=args.steps, seed=SEED, out=folder),
    )


def by_pipeline(settings: Any) -> dict[str, Any]:
    """Train on this rank."""
    from drumline.train.loop.run import run_training

    found = run_training(settings)
    return {
        "losses": found.losses,
        "grad_norms": found.grad_norms,
        "held_out": [evaluation.loss for evaluation in found.evaluations],
        "seconds": found.seconds,
        "tokens": found.num_tokens,
        "peak_bytes": found.peak_bytes,
    }


def share_of_rate(step: int, steps: int) -> float:
    """Return the share of the full rate in a step."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    done = (step + 1 - WARMUP) / max(steps - WARMUP, 1)
    return FINAL + (1 - FINAL) * (1 + math.cos(math.pi * done)) / 2


def by_one_process(settings: Any) -> dict[str, Any]:
    """Train without a pipeline, microbatch by microbatch."""
    import torch

    from drumline.train.data.build import build_data
    from drumline.train.models.build import build_model

    torch.manual_seed(settings.run.seed)
    built = build_model(settings, device="cpu")
    model, stream = built.model.train(), iter(build_data(settings, built, rank=0, size=1).training)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    losses, norms, tokens, began = [], [], 0, time.perf_counter()
    for step in range(settings.run.steps):
        batches = [next(stream) for _ in range(settings.batch.accumulate)]
        total = sum(batch.num_tokens for batch in batches)
        loss = 0.0
        for batch in batches:
            loss += _backward(built, batch, settings.num_microbatches, total)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        for group in optimizer.param_groups:
            group["lr"] = LR * share_of_rate(step, settings.run.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
        tokens += total
    size = sum(param.numel() for param in model.parameters())
    seconds = time.perf_counter() - began
    return {"losses": losses, "grad_norms": norms, "seconds": seconds, "tokens": tokens, "parameters": size}


def _backward(built: Any, batch: Any, num_microbatches: int, total: int) -> float:
    """Add the gradients of one batch, and return its part of the loss."""
    cut = {name: value.tensor_split(num_microbatches) for name, value in batch.inputs.items()}
    targets = batch.target.tensor_split(num_microbatches)
    found = 0.0
    for at, target in enumerate(targets):
        count = int((target != -100).sum())
        if not count:
            continue
        output = built.model(**{name: parts[at] for name, parts in cut.items()})
        loss = output.loss if built.loss_fn is None else built.loss_fn(output, target)
        part = loss * (count / total)
        part.backward()
        found += float(part.detach())
    return found


def compared(ours: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Return how far the two curves are apart."""
    pairs = list(zip(ours["losses"], plain["losses"], strict=True))
    apart = [abs(value - other) / abs(other) for value, other in pairs]
    norms = [abs(norm - other) / other for norm, other in zip(ours["grad_norms"], plain["grad_norms"], strict=True)]
    return {
        "largest_relative_difference": max(apart),
        "at_step": apart.index(max(apart)) + 1,
        "largest_of_norms": max(norms),
        "first_loss": ours["losses"][0],
        "last_loss": ours["losses"][-1],
        "falls": ours["losses"][-1] < ours["losses"][0],
        "is_within": max(apart) <= BOUND,
    }


def main() -> int:
    """Run both, print how far they are apart, and return whether that is too far."""
    import drumline as dl

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--stages-per-rank", type=int, default=None)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--hf", default="", metavar="FOLDER", help="train this Hugging Face model")
    parser.add_argument("--text", nargs="*", default=[], metavar="FILE", help="on these texts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        settings = settings_of(args, f"{folder}/run")
        ours = dl.launch(by_pipeline, settings, num_ranks=args.ranks)[0]
        # In a process of its own too, with as many threads as a rank has: sums are then split alike.
        plain = dl.launch(by_one_process, replace(settings), num_ranks=1)[0]
    found = compared(ours, plain)
    rates = [entry["tokens"] / entry["seconds"] for entry in (ours, plain)]
    print(f"{plain['parameters']:,} parameters, {args.steps} steps, {args.schedule} on {args.ranks} ranks")
    print(f"loss {found['first_loss']:.4f} -> {found['last_loss']:.4f}, held out {ours['held_out'][-1]:.4f}")
    print(f"largest relative difference of a loss to one process: {found['largest_relative_difference']:.3g}", end="")
    print(f" (step {found['at_step']}; bound {BOUND:g}), of a gradient norm: {found['largest_of_norms']:.3g}")
    print(f"tokens/s: {rates[0]:,.0f} on {args.ranks} ranks, {rates[1]:,.0f} in one process, one thread each")
    if args.json is not None:
        args.json.write_text(json.dumps({"compared": found, "ranks": ours, "one_process": plain}, indent=2) + "\n")
    return 0 if found["is_within"] and found["falls"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
