"""The step that the simulator predicts from a profile taken before the run, against the step that was measured.

    python benchmarks/prediction.py [--rounds 6] [--steps 8] [--sizes 512x64 ...] [--schedules 1f1b ...] [--json FILE]

The setting of runtime_cpu.py: two ranks, one thread each, 8 blocks of Linear(D, D) + GELU. A round does three things,
one after the other, and each only knows of what came before it:

1. Profile: every rank measures every block, all ranks at once. A stage costs what its own rank measured.
2. Handling: a pipeline with the same program and messages of the same size, whose blocks compute next to nothing, takes
   a few steps. They show what it takes to send, wake up for and take a message, what the executor adds to an action,
   and what a step begins and ends with.
3. Run: the pipeline itself. A step is from the call of `step`, right behind a barrier, to its end on the last rank.

Predicted is what the simulator makes of 1 and 2. A round's error is that of its prediction against the median of its
own steps; the table has the median over all rounds, with the smallest and the largest. "spread" is half the distance
between the quartiles of a round's steps, the median over the rounds: nothing can be predicted better. "computing alone"
is the error without 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

BLOCKS = 8
SIZES = ("512x64", "1024x128")
SCHEDULES = ("1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zb-v")


def step_seconds(timeline: Any) -> float:
    """Return how long a measured step took, from the first rank's begin to the last one's end."""
    begin = min(timeline.seconds(record.rank, record.begin_ns) for record in timeline.records)
    return float(max(timeline.seconds(record.rank, record.end_ns) for record in timeline.records) - begin)


def measure(sizes: Any, microbatches: int, names: Any, rounds: int, num_steps: int) -> list[dict[str, Any]]:
    """Run every case on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.nn import functional

    import drumline as dl
    from drumline.core.measured.costs import Handling
    from drumline.profile.blocks import profile
    from handling import with_handling

    class Scaled(nn.Module):
        """Computes next to nothing, and hands on as much as a layer does."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(width))

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.weight

    def timelines(pipe: Any, x: Any, y: Any, count: int) -> list[Any]:
        found = []
        for turn in range(count + 2):
            dist.barrier()
            pipe.step(x, target=y)
            if turn >= 2:
                found.append(pipe.timeline())
            pipe.settle()
            pipe.zero_grad()
        return found

    def predicted(program: Any, model: Any, light: Any, x: Any, y: Any) -> tuple[float, float]:
        dist.barrier()
        value, target = (whole[: len(whole) // microbatches] for whole in (x, y))
        own = profile(model, value, target=target, loss_fn=functional.mse_loss, num_runs=6)
        counts = [BLOCKS // program.num_stages] * program.num_stages
        profiles: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(profiles, own.to_json())
        each = [type(own).from_json(text).costs(counts) for text in profiles]

        def seconds(op: str) -> list[float]:
            homes = enumerate(program.placement.homes)
            return [each[home].per_stage(op, len(counts))[stage] for stage, home in homes]

        costs = dl.Costs(
            forward=seconds("forward"),
            backward=seconds("backward"),
            backward_input=seconds("backward_input"),
            backward_weight=seconds("backward_weight"),
        )
        handling = Handling.measured(timelines(light, x, y, 5))
        whole = dl.simulate(program, with_handling(costs, handling, program)).makespan
        return handling.begin + whole + handling.end, dl.simulate(program, costs).makespan

    rows = []
    for width, depth in sizes:
        for name in names:
            program = dl.generate(name, num_ranks=2, num_microbatches=microbatches)
            torch.manual_seed(0)
            x, y = (torch.randn(microbatches * depth, width) for _ in range(2))
            model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)))
            light = nn.Sequential(*(Scaled(width) for _ in range(BLOCKS)))
            both = [dl.Pipeline(item, loss_fn=functional.mse_loss, schedule=program) for item in (light, model)]
            found = []
            for _ in range(rounds):
                told = predicted(program, model, both[0], x, y)
                found.append((*told, [step_seconds(timeline) for timeline in timelines(both[1], x, y, num_steps)]))
            for pipe in both:
                pipe.close()
            rows.append(summary(program, (width, depth), found))
    return rows


def summary(program: Any, size: Any, rounds: list[tuple[float, float, list[float]]]) -> dict[str, Any]:
    """Return one case's figures."""
    measured = [statistics.median(steps) for _, _, steps in rounds]
    quartiles = [statistics.quantiles(steps, n=4) for _, _, steps in rounds]
    errors = sorted(told / taken - 1.0 for (told, _, _), taken in zip(rounds, measured, strict=True))
    alone = [told / taken - 1.0 for (_, told, _), taken in zip(rounds, measured, strict=True)]
    spreads = [(high - low) / 2 / taken for (low, _, high), taken in zip(quartiles, measured, strict=True)]
    return {
        "schedule": program.name,
        "width": size[0],
        "rows": size[1],
        "microbatches": program.num_microbatches,
        "predicted_ms": statistics.median(told for told, _, _ in rounds) * 1e3,
        "measured_ms": statistics.median(measured) * 1e3,
        "error": statistics.median(errors),
        "low": errors[0],
        "high": errors[-1],
        "spread": statistics.median(spreads),
        "alone": statistics.median(alone),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", nargs="*", default=SCHEDULES)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    sizes = [tuple(map(int, size.split("x"))) for size in args.sizes]
    settings = (sizes, args.microbatches, list(args.schedules), args.rounds, args.steps)
    rows = dl.launch(measure, *settings, num_ranks=2)[0]
    print(
        "D/rows     M  schedule           predicted ms  measured ms   error  (over rounds)       spread  computing only"
    )
    for row in rows:
        print(
            f"{row['width']:4d}/{row['rows']:<4d} {row['microbatches']:3d}  {row['schedule']:17s} "
            f"{row['predicted_ms']:13.2f}  {row['measured_ms']:11.2f}  {row['error']:+6.1%}"
            f"  ({row['low']:+8.1%}, {row['high']:+7.1%})  {row['spread']:6.1%}  {row['alone']:+15.1%}"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
