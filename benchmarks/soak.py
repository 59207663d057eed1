"""A long run with many checkpoints: whether memory, files or descriptors grow on any rank.

    python benchmarks/soak.py [--steps 1000] [--every 5] [--ranks 2] [--json FILE]

`drumline train` trains an MLP of 0.6 million parameters with AdamW, and saves it every 5 steps. Every rank notes its
resident memory, open descriptors and threads every 10 steps, in a hook of its optimizer; rank 0 notes the files in the
run's folder as well. The first fifth warms up. Over the rest a straight line is fitted to each rank's memory.

The bars: the line rises by less than one rank's copy of its state over all steps (a copy leaked by each checkpoint
would be hundreds of them), descriptors, threads and files at the end are no more than after the warm-up, and of the
checkpoints only the newest three are left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WIDTH, LAYERS, ROWS, KEEP, NOTE_EVERY = 256, 9, 16, 3, 10
STATE_MIB = 3 * 4 * LAYERS * WIDTH * (WIDTH + 1) / 2 / 2**20  # of one of two ranks: parameters and two averages


# ---- the user's part, on every rank ----------------------------------------------------------------------------------


def build_model() -> Any:
    """Return the model and its loss; from here on this process notes what it holds."""
    import torch
    from torch import nn
    from torch.optim.optimizer import register_optimizer_step_post_hook

    notes, run, rank = Path(os.environ["SOAK_NOTES"]), Path(os.environ["SOAK_RUN"]), os.environ.get("RANK", "0")
    steps = 0

    def note(*_: Any) -> None:
        nonlocal steps
        steps += 1
        if steps % NOTE_EVERY:
            return
        held = {
            "step": steps,
            "resident_mib": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20,
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
        }
        if rank == "0":
            held["files"] = sum(len(files) for folder, _, files in os.walk(run) if "/." not in folder)
            held["checkpoints"] = len(list(run.glob("checkpoints/step-*")))
        with (notes / f"rank{rank}.jsonl").open("a") as file:
            file.write(json.dumps(held) + "\n")

    register_optimizer_step_post_hook(note)
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    return nn.Sequential(*layers), nn.functional.mse_loss


def build_data() -> Any:
    """Return the batches of an epoch."""
    import torch

    generator = torch.Generator().manual_seed(1)
    draw = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(8)]
    return [(tensor, tensor.roll(1, 1).tanh()) for tensor in draw]


# ---- the measurement -------------------------------------------------------------------------------------------------


def train(folder: Path, *, steps: int, every: int, ranks: int) -> float:
    """Run it, and return its seconds."""
    values = {
        "model.kind": "function",
        "model.function": f"{Path(__file__).resolve()}:build_model",
        "data.kind": "function",
        "data.function": f"{Path(__file__).resolve()}:build_data",
        "batch.sequences": ROWS,
        "batch.microbatch": ROWS // 4,
        "mesh.pipeline": ranks,
        "pipeline.device": "cpu",
        "evaluation.every": 0,
        "checkpoint.every": every,
        "checkpoint.keep": KEEP,
        "run.steps": steps,
        "run.threads": 1,
        "run.out": str(folder / "run"),
    }
    words = [word for key, value in values.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    env = {**os.environ, "SOAK_NOTES": str(folder), "SOAK_RUN": str(folder / "run"), "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "drumline", "train", *words], env=env, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the slope of the straight line through points, and its standard error.

    >>> line([(0.0, 1.0), (1.0, 3.0), (2.0, 5.0)])
    (2.0, 0.0)
    """
    mean_x, mean_y = (sum(point[at] for point in points) / len(points) for at in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    error: float = (rest / max(len(points) - 2, 1) / spread) ** 0.5
    return slope, error


def judge(notes: Sequence[dict[str, Any]], steps: int) -> dict[str, Any]:
    """Return what one rank's notes after the warm-up come to."""
    after = [note for note in notes if note["step"] >= steps // 5]
    slope, error = line([(entry["step"], entry["resident_mib"]) for entry in after])
    found: dict[str, Any] = {
        "notes": len(after),
        "resident_mib": [after[0]["resident_mib"], after[-1]["resident_mib"]],
        "growth_mib": slope * steps,
        "growth_error_mib": error * steps,
    }
    for name in ("descriptors", "threads", "files", "checkpoints"):
        if name in after[0]:
            counts = [entry[name] for entry in after]
            # A checkpoint under way has a file and a thread of its own: the most in either half is what may not grow.
            half = len(counts) // 2
            found[name] = [max(counts[:half]), max(counts[half:])]
    return found


def problems(ranks: Sequence[dict[str, Any]], left: Sequence[str], last: int) -> list[str]:
    """Return what grew."""
    found = []
    for number, rank in enumerate(ranks):
        if rank["growth_mib"] > STATE_MIB:
            found.append(f"rank {number}: memory grows by {rank['growth_mib']:.1f} MiB")
        found += [
            f"rank {number}: {name} grow from {rank[name][0]} to {rank[name][1]}"
            for name in ("descriptors", "threads", "files", "checkpoints")
            if name in rank and rank[name][1] > rank[name][0]
        ]
    if len(left) != KEEP or left[-1] != f"step-{last:08d}":
        found.append(f"checkpoints left: {', '.join(left)}")
    return found


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="drumline-soak-") as name:
        folder = Path(name)
        seconds = train(folder, steps=args.steps, every=args.every, ranks=args.ranks)
        ranks = []
        for rank in range(args.ranks):
            notes = [json.loads(text) for text in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
            ranks.append(judge(notes, args.steps))
        left = sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())
        size = sum(path.stat().st_size for path in (folder / "run").rglob("*") if path.is_file()) / 2**20
    saves = args.steps // args.every
    what = f"{args.steps} steps, {saves} checkpoints, {args.ranks} ranks, {seconds:.0f} s"
    print(f"{what}; a rank's state: {STATE_MIB:.1f} MiB\n")
    print("rank  resident MiB      growth over all steps  descriptors  threads     files")
    for number, entry in enumerate(ranks):
        cells = [
            f"{number:4}",
            "{:6.1f} to {:6.1f}".format(*entry["resident_mib"]),
            f"{entry['growth_mib']:+8.2f} ± {entry['growth_error_mib']:.2f} MiB ",
            *("{:4} to {:<4}".format(*entry[name]) for name in ("descriptors", "threads", "files") if name in entry),
        ]
        print("  ".join(cells).rstrip())
    print(f"\nleft: {', '.join(left)}; the run's folder has {size:.1f} MiB")
    bad = problems(ranks, left, args.steps)
    print("\n".join(bad) if bad else "nothing grows")
    if args.json:
        told = {"seconds": seconds, "state_mib": STATE_MIB, "ranks": ranks, "left": left, "problems": bad}
        args.json.write_text(json.dumps(told, indent=2) + "\n")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
