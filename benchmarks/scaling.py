"""How much faster two ranks are than one, beside what the formula allows; the points of docs/tutorial-scaling.md.

    python benchmarks/scaling.py [--width 512] [--rows 32] [--rounds 15] [--json FILE]

A chain of 12 equal layers (width x width) and a batch of M microbatches, by 1f1b. Strong scaling: the same work on one
rank and on two. Weak scaling: on two ranks twice the layers, so that each rank has as much work as the one had. One
launch per number of ranks; a step is timed from a barrier to the end of the last rank, medians over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

LAYERS = 12
MICROBATCHES = (1, 2, 4, 8, 16)


def measure(width: int, rows: int, rounds: int, layers: tuple[int, ...]) -> dict[str, float]:
    """Return the median seconds of a step on these ranks, by number of layers and of microbatches."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    import drumline as dl

    def pipeline(num_layers: int, num_microbatches: int) -> dl.Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(num_layers)))
        return dl.Pipeline(
            model, loss_fn=functional.mse_loss, schedule="1f1b", num_microbatches=num_microbatches, balance="even"
        )

    pipes = {(n, m): pipeline(n, m) for n in layers for m in MICROBATCHES}
    seconds: dict[tuple[int, int], list[float]] = {pair: [] for pair in pipes}
    for turn in range(rounds + 3):
        for (num_layers, num_microbatches), pipe in pipes.items():
            x = torch.ones(rows * num_microbatches, width)
            dist.barrier()
            start = time.perf_counter()
            pipe.step(x, target=x)
            pipe.settle()
            dist.barrier()
            if turn >= 3:
                seconds[num_layers, num_microbatches].append(time.perf_counter() - start)
            pipe.zero_grad()
    return {f"{n}x{m}": statistics.median(taken) for (n, m), taken in seconds.items()}


def speedups(entry: dict[str, float], two: dict[str, float]) -> list[dict[str, Any]]:
    """Return strong and weak scaling beside their bounds."""
    rows = []
    for count in MICROBATCHES:
        bound = 2 * count / (count + 1)
        strong = entry[f"{LAYERS}x{count}"] / two[f"{LAYERS}x{count}"]
        weak = entry[f"{LAYERS}x{count}"] / two[f"{2 * LAYERS}x{count}"]
        rows.append({"microbatches": count, "bound": bound, "strong": strong, "weak": weak, "weak_bound": bound / 2})
    return rows


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    (entry,) = dl.launch(measure, args.width, args.rows, args.rounds, (LAYERS,), num_ranks=1)
    two = dl.launch(measure, args.width, args.rows, args.rounds, (LAYERS, 2 * LAYERS), num_ranks=2)[0]
    rows = speedups(entry, two)
    print("  M   speed-up of two ranks, at most   efficiency at twice the layers, at most")
    for row in rows:
        print(
            f"{row['microbatches']:3d} {row['strong']:19.2f} {row['bound']:9.2f} {row['weak']:25.1%}"
            f" {row['weak_bound']:9.1%}"
        )
    if args.json:
        args.json.write_text(json.dumps({"width": args.width, "rows": args.rows, "scaling": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
