"""Strong and weak scaling of training a GPT on 1 to 8 ranks, beside the simulator and the formula.

    python benchmarks/scaling_train.py [--ranks 1,2,4,8] [--schedules 1f1b,zb-h1] [--rounds 7] [--kinds strong,weak]
                                       [--json docs/scaling-train.json]

`make docs` draws docs/pictures/scaling-strong.svg and scaling-weak.svg from that file.

One thread per rank, on a host with at least as many cores as ranks. The model is the built-in byte-level GPT of
`drumline train`, with 16 blocks (strong) or 2 blocks per rank (weak), 16 microbatches of one sequence of 64 tokens, and
AdamW. Embedding and head are cheap beside a block: 256 bytes. A step is timed from a barrier to the end of the
optimizer step on the slowest rank; medians over rounds, the schedules in turns.

    measured     one rank's step over this step; for weak scaling times the ranks, the model being larger by that
    simulated    the same from the simulator, with every op as long as it was measured on these ranks
    bound        the same from the simulator, with equal stages and free messages
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

MICROBATCHES, LENGTH, BLOCKS, WEAK = 16, 64, 16, 2


def measure(blocks: int, schedules: list[str], rounds: int) -> dict[str, dict[str, Any]]:
    """Return the step of each schedule on these ranks, measured and simulated."""
    import torch
    import torch.distributed as dist

    import drumline as dl
    from drumline.train.config.settings import ModelSettings, TrainSettings
    from drumline.train.models.build import build_model

    settings = TrainSettings(model=ModelSettings(num_layers=blocks, hidden=192, num_heads=4))
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(256, (MICROBATCHES, LENGTH + 1), generator=generator)
    pipes: dict[str, tuple[Any, Any]] = {}
    for name in schedules:
        torch.manual_seed(0)
        built = build_model(settings)
        pipe = dl.Pipeline(
            built.model,
            loss_fn=built.loss_fn,
            schedule=name,
            num_microbatches=MICROBATCHES,
            example={built.inputs: tokens[:, :-1]},
            balance="parameters",
            example_target=tokens[:, 1:],
            check_model=False,
        )
        pipes[name] = pipe, pipe.optimizer(torch.optim.AdamW, lr=1e-4)
    seconds: dict[str, list[float]] = {name: [] for name in schedules}
    timelines: dict[str, list[Any]] = {name: [] for name in schedules}
    for turn in range(rounds + 2):
        for name, (pipe, optimizer) in pipes.items():
            dist.barrier()
            began = time.perf_counter()
            pipe.step(tokens[:, :-1], target=tokens[:, 1:])
            optimizer.step()
            optimizer.zero_grad()
            dist.barrier()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - began)
                timelines[name].append(pipe.timeline())
    found = {}
    for name, (pipe, _) in pipes.items():
        timeline = sorted(timelines[name], key=lambda value: float(value.makespan))[len(timelines[name]) // 2]
        simulated = dl.simulate(timeline.program, timeline.measured_costs())
        found[name] = {
            "seconds": statistics.median(seconds[name]),
            "quartiles": statistics.quantiles(seconds[name], n=4)[::2],
            "makespan": timeline.makespan,
            "simulated": simulated.makespan,
            "bound": 1 - dl.simulate(timeline.program, dl.Costs()).bubble,
        }
        pipe.close()
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="1,2,4,8")
    parser.add_argument("--schedules", default="1f1b,zb-h1")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", default="strong,weak")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    ranks, schedules = [int(value) for value in args.ranks.split(",")], args.schedules.split(",")
    rows = []
    for kind in args.kinds.split(","):
        print(f"\n{kind:7s} ranks schedule   step ms (quartiles)   measured  simulated  bound")
        first: dict[str, Any] = {}
        for number in ranks:
            blocks = BLOCKS if kind == "strong" else WEAK * number
            found = dl.launch(measure, blocks, schedules, args.rounds, num_ranks=number)[0]
            first = first or found
            for name, entry in found.items():
                times = 1 if kind == "strong" else number
                row = {
                    "kind": kind,
                    "ranks": number,
                    "schedule": name,
                    "seconds": entry["seconds"],
                    "speedup": times * first[name]["seconds"] / entry["seconds"],
                    "simulated": times * first[name]["simulated"] / entry["simulated"],
                    "bound": entry["bound"] * number,
                }
                low, high = entry["quartiles"]
                print(
                    f"{'':7s} {number:5d} {name:9s} {entry['seconds'] * 1e3:8.1f} ({low * 1e3:.1f} to {high * 1e3:.1f})"
                    f" {row['speedup']:9.2f} {row['simulated']:9.2f} {row['bound']:7.2f}",
                    flush=True,
                )
                rows.append(row)
    if args.json:
        args.json.write_text(json.dumps({"microbatches": MICROBATCHES, "scaling": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
