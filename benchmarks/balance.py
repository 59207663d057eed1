"""The cut that `dl.balance` chooses against every other, and its predictions against the run that follows.

    python benchmarks/balance.py [--schedules 1f1b zb-h1 zb-v] [--classes 8192 3072] [--rows 32] [--rounds 9]

Two ranks, one thread each: 12 blocks of Linear(256, 256) + GELU and a head, Linear(256, C) with cross entropy; with two
stages per rank 6 blocks of Linear(512, 512). Both ranks profile at once, then a pipeline for every one of the 12 (or
20) cuts takes turns, step by step, in one run; a step is timed from a barrier to the end of the last rank. Printed:
each cut's predicted and measured step; how much longer a step of the chosen cut takes than one of the cut that turned
out best, round by round (median and quartiles), next to the cut by number alone; and how far each predicted action is
from the median of what ran.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

SIZES = {2: (12, 256), 4: (6, 512)}  # blocks and their width, by the number of stages


def measure(name: str, classes: int, rows: int, microbatches: int, rounds: int) -> dict[str, Any]:
    """Run one schedule on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    import drumline as dl

    torch.manual_seed(0)
    num_stages = dl.generate(name, num_ranks=2, num_microbatches=microbatches).num_stages
    num_blocks, width = SIZES[num_stages]
    blocks = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_blocks)]
    model = nn.Sequential(*blocks, nn.Linear(width, classes))
    x, y = torch.randn(rows * microbatches, width), torch.randint(classes, (rows * microbatches,))
    settings: dict[str, Any] = {
        "loss_fn": functional.cross_entropy,
        "schedule": name,
        "num_microbatches": microbatches,
    }
    begin = time.perf_counter()
    found = dl.balance(model, x, target=y, num_runs=20, **settings)
    profiling = time.perf_counter() - begin
    cuts = [
        tuple(j - i for i, j in pairwise((0, *inner, num_blocks + 1)))
        for inner in combinations(range(1, num_blocks + 1), num_stages - 1)
    ]
    pipes = {entry: dl.Pipeline(copy.deepcopy(model), balance=entry, **settings) for entry in cuts}
    seconds: dict[tuple[int, ...], list[float]] = {entry: [] for entry in cuts}
    actions: dict[str, list[float]] = {}
    for turn in range(rounds + 2):
        for cut, pipe in pipes.items():
            dist.barrier()
            start = time.perf_counter()
            pipe.step(x, target=y)
            pipe.settle()
            dist.barrier()
            taken = time.perf_counter() - start
            pipe.zero_grad()
            if turn < 2:
                continue
            seconds[cut].append(taken)
            timeline = pipe.timeline()
            if cut == found.counts:
                for span in timeline.spans():
                    actions.setdefault(f"{span.action.stage}{span.action.op.value}", []).append(span.end - span.start)
    for pipe in pipes.values():
        pipe.close()
    return {
        "schedule": name,
        "classes": classes,
        "rows": rows,
        "microbatches": microbatches,
        "profiling_seconds": profiling,
        "chosen": found.counts,
        "predicted": [dl.simulate(found.program, found.profile.costs(cut)).makespan for cut in cuts],
        "measured": [statistics.median(seconds[cut]) for cut in cuts],
        "cuts": cuts,
        "beyond_best": _beyond(seconds, found.counts),
        "even_beyond_best": _beyond(seconds, _even(num_blocks + 1, num_stages)),
        "actions": _compared(found, actions),
        "profile": json.loads(found.profile.to_json()),
    }


def _beyond(seconds: dict[Any, list[float]], cut: Any) -> dict[str, float]:
    """Return how much longer a cut's steps take than the best one's, round by round."""
    best = min(seconds, key=lambda value: statistics.median(seconds[value]))
    ratios = sorted(mine / other - 1 for mine, other in zip(seconds[cut], seconds[best], strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"median": middle, "low": low, "high": high}


def _even(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    base, more = divmod(num_blocks, num_stages)
    return tuple(base + (stage < more) for stage in range(num_stages))


def _compared(found: Any, actions: dict[str, list[float]]) -> dict[str, tuple[float, float]]:
    """Return the predicted and the median measured seconds of every stage's ops."""
    field = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}
    return {
        name: (found.costs.per_stage(field[name[-1]], len(found.counts))[int(name[:-1])], statistics.median(values))
        for name, values in sorted(actions.items())
    }


def show(row: dict[str, Any]) -> None:
    """Print one schedule's figures."""
    print(
        f"{row['schedule']}, a head of {row['classes']}, {row['microbatches']} microbatches of {row['rows']} rows",
        end="; ",
    )
    print(f"profiled in {row['profiling_seconds']:.1f} s")
    print("  cut         predicted ms  measured ms")
    for cut, predicted, measured in zip(row["cuts"], row["predicted"], row["measured"], strict=True):
        mark = "  <- chosen" if tuple(cut) == tuple(row["chosen"]) else ""
        print(f"  {' + '.join(map(str, cut)):13s} {predicted * 1e3:12.1f}  {measured * 1e3:11.1f}{mark}")
    for name, key in (("chosen cut", "beyond_best"), ("even cut", "even_beyond_best")):
        value = row[key]
        print(f"  {name}: {value['median']:+.1%} of the best ({value['low']:+.1%} to {value['high']:+.1%})")
    for action, (predicted, measured) in row["actions"].items():
        off = predicted / measured - 1
        print(f"  {action}: predicted {predicted * 1e3:.2f} ms, ran {measured * 1e3:.2f} ms, {off:+.1%}")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="*", default=["1f1b", "zb-h1", "zb-v"])
    parser.add_argument("--classes", nargs="*", type=int, default=[8192, 3072])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    rows = []
    for classes, name in product(args.classes, args.schedules):
        rows.append(dl.launch(measure, name, classes, args.rows, args.microbatches, args.rounds, num_ranks=2)[0])
        show(rows[-1])
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
