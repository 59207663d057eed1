"""What recording costs, and how much of a step it explains.

    python benchmarks/recording.py [--rounds 60] [--sizes 512x64 ...] [--schedules 1f1b ...] [--json FILE]

The setting of runtime_cpu.py: two ranks, one thread each, 8 blocks of Linear(D, D) + GELU. Three pipelines take turns,
step by step, in one run: one that records nothing, one that keeps the last step, and one that writes a run to a folder.
A step is timed from a barrier to the end of the last rank's `step` and `settle`. Printed: medians; the ratio to the
pipeline without recording in the same round, with its quartiles; the same of the quickest tenth of the steps, which
other work on the machine disturbs least; and the parts of the step of the rank with the most unexplained time, as
shares of it. "between" is what of the time between two steps was telling the others and writing.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

BLOCKS = 8
KINDS = ("off", "last step", "folder")
PARTS = ("busy", "transfer", "wait", "overhead", "unexplained")


def measure(sizes: Any, microbatches: int, names: Any, rounds: int, folder: str) -> list[dict[str, Any]]:
    """Run every case on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    import drumline as dl

    rows = []
    for width, depth in sizes:
        for name in names:
            torch.manual_seed(0)
            model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)))
            x, y = (torch.randn(microbatches * depth, width) for _ in range(2))
            path = f"{folder}/{width}-{depth}-{name}"
            records: list[bool | str] = [False, True, path]
            pipes = {
                kind: dl.Pipeline(
                    copy.deepcopy(model),
                    loss_fn=functional.mse_loss,
                    schedule=name,
                    num_microbatches=microbatches,
                    record=record,
                )
                for kind, record in zip(KINDS, records, strict=True)
            }
            seconds: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(rounds + 3):
                # No contender always follows the same one.
                for kind in KINDS[turn % 3 :] + KINDS[: turn % 3]:
                    pipe = pipes[kind]
                    dist.barrier()
                    start = time.perf_counter()
                    pipe.step(x, target=y)
                    pipe.settle()
                    dist.barrier()
                    if turn >= 3:
                        seconds[kind].append(time.perf_counter() - start)
                    pipe.zero_grad()
            for pipe in pipes.values():
                pipe.close()
            dist.barrier()
            if dist.get_rank() == 0:
                row = {"schedule": name, "width": width, "rows": depth, "microbatches": microbatches}
                rows.append({**row, **costs(seconds), **explained(path)})
    return rows


def costs(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return what recording costs."""
    quick = max(len(seconds["off"]) // 10, 1)
    found: dict[str, Any] = {"off_ms": statistics.median(seconds["off"]) * 1e3}
    for kind in KINDS[1:]:
        ratios = sorted(duration / off for duration, off in zip(seconds[kind], seconds["off"], strict=True))
        found[kind] = {
            "ms": statistics.median(seconds[kind]) * 1e3,
            "ratio": statistics.median(ratios),
            "low": ratios[len(ratios) // 4],
            "high": ratios[3 * len(ratios) // 4],
            "quick": statistics.mean(sorted(seconds[kind])[:quick]) / statistics.mean(sorted(seconds["off"])[:quick]),
        }
    return found


def explained(path: str) -> dict[str, Any]:
    """Return the medians of all parts over the steps of a run, as shares of the step, of the least explained rank."""
    import drumline as dl

    run = dl.read_run(path)
    steps = run.steps[3:]
    ranks = []
    for rank in range(run.program.num_ranks):
        parts = [run.timeline(step).parts[rank] for step in steps]
        shares = {name: statistics.median(getattr(part, name) / part.total for part in parts) for name in PARTS}
        metrics = [metric for metric in run.metrics() if metric["step"] in steps]
        between = [metric.get(f"pp/rank{rank}/{kind}_seconds", 0.0) for metric in metrics for kind in ("tell", "write")]
        shares["between_us"] = sum(between) / len(metrics) * 1e6
        ranks.append(shares)
    return max(ranks, key=lambda shares: shares["unexplained"])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--sizes", nargs="*", default=["512x64"])
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "zb-h1", "zb-v"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    with tempfile.TemporaryDirectory() as folder:
        settings = (sizes, args.microbatches, list(args.schedules), args.rounds, folder)
        rows = dl.launch(measure, *settings, num_ranks=2)[0]
    heads = "".join(f"   {kind + ' (quartiles)':24s} quickest" for kind in KINDS[1:])
    print(f"D/rows    schedule            off ms{heads}")
    for row in rows:
        case = f"{row['width']:4d}/{row['rows']:<4d} {row['schedule']:17s} {row['off_ms']:8.2f}"
        for kind in KINDS[1:]:
            value = row[kind]
            case += f"   {value['ratio']:.4f} ({value['low']:.3f} to {value['high']:.3f})  {value['quick']:.4f}"
        print(case)
    print("\nD/rows    schedule               busy  transfer    wait  overhead  unexplained  between us")
    for row in rows:
        shares = "  ".join(f"{row[name]:{len(name) + 2}.2%}" for name in PARTS)
        print(f"{row['width']:4d}/{row['rows']:<4d} {row['schedule']:17s} {shares}  {row['between_us']:10.0f}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
