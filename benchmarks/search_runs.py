"""Programs that the search found, run on real CPU ranks beside the best hand-made ones in the same memory.

    python benchmarks/search_runs.py [--rounds 40] [--json FILE]

Four ranks, one thread each, so four cores are needed. Stages of equal blocks are measured by zb-h1 first; then a
program is searched for what was measured, and both run in turns, step by step, in one run. A step is timed from a
barrier to the end of the last rank.

    heavy head     blocks 5, 5, 5, 8: stages as 1, 1, 1, 1.6; three activations on a rank
    varying stage  the blocks of the third stage run once, twice or three times, drawn for every microbatch; five
                   activations; the 0.9 quantile of the step is what is made small
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.placement import Placement
from drumline.pipeline.auto_schedule import median_costs

QUANTILE = 0.9


@dataclass(frozen=True)
class Case:
    """Stages by their blocks, microbatches, the limit, and which stage varies."""

    blocks: tuple[int, ...]
    num_microbatches: int
    max_activations: int
    varies: int | None = None
    width: int = 384
    rows: int = 48

    def model(self) -> nn.Sequential:
        """Return the chain of blocks."""
        torch.manual_seed(0)
        kinds = [stage == self.varies for stage, count in enumerate(self.blocks) for _ in range(count)]
        return nn.Sequential(*(Block(self.width, varies=one) for one in kinds))

    def pipeline(self, schedule: str | dl.Program) -> dl.Pipeline:
        """Return a pipeline of it."""
        return dl.Pipeline(
            self.model(),
            loss_fn=functional.mse_loss,
            schedule=schedule,
            num_microbatches=self.num_microbatches,
            balance=self.blocks,
        )

    def batch(self, random: torch.Generator) -> Tensor:
        """Return random rows; the last column says how often a varying block runs."""
        x = torch.randn(self.num_microbatches * self.rows, self.width + 1, generator=random)
        times = torch.randint(1, 4, (self.num_microbatches,), generator=random)
        x[:, -1] = times.repeat_interleave(self.rows)
        return x


CASES = {
    "heavy head": Case((5, 5, 5, 8), 8, 3),
    "varying stage": Case((4, 4, 4, 4), 12, 5, varies=2),
}


class Block(nn.Module):
    """A layer for all columns but the last; where it varies, run as often as that one says."""

    def __init__(self, width: int, *, varies: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.varies = varies

    def forward(self, x: Tensor) -> Tensor:  # noqa: D102
        first, last = x[:, :-1], x[:, -1:]
        for _ in range(int(last[0].item()) if self.varies else 1):
            first = functional.relu(self.linear(first))
        return torch.cat([first, last], dim=1)


def step(pipe: dl.Pipeline, x: Tensor) -> float:
    """Return the seconds of one step."""
    dist.barrier()
    start = time.perf_counter()
    pipe.step(x, target=x)
    pipe.settle()
    dist.barrier()
    taken = time.perf_counter() - start
    pipe.zero_grad()
    return taken


def searched(case: Case, random: torch.Generator) -> Any:
    """Measure stages by zb-h1, and return what rank 0 finds for them."""
    seen = []
    with case.pipeline("zb-h1") as first:
        for turn in range(12):
            step(first, case.batch(random))
            if turn >= 2:
                seen.append(first.timeline())
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        spread = [0.5 * (one == case.varies) for one in range(len(case.blocks))]
        told[0] = dl.search(
            median_costs(seen),
            Placement.linear(len(case.blocks)),
            num_microbatches=case.num_microbatches,
            limit=dl.Limit(max_activations=case.max_activations),
            jitter=None if case.varies is None else dl.Jitter(spread, quantile=QUANTILE),
            seconds=20,
        )
    dist.broadcast_object_list(told)
    return told[0]


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Run one case on this rank."""
    random = torch.Generator().manual_seed(0)
    found = searched(case, random)
    best = min(found.starts, key=lambda one: one.value)
    pipes = {"hand_made": case.pipeline(best.program), "found": case.pipeline(found.program)}
    seconds: dict[str, list[float]] = {name: [] for name in pipes}
    for turn in range(rounds + 3):
        x = case.batch(random)
        for name, pipe in pipes.items():
            taken = step(pipe, x)
            if turn >= 3:
                seconds[name].append(taken)
    for pipe in pipes.values():
        pipe.close()
    ratios = [a / b for a, b in zip(seconds["found"], seconds["hand_made"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    late = {name: statistics.quantiles(each, n=10)[8] for name, each in seconds.items()}
    return {
        "hand_made": best.name,
        "predicted_gain": 1 - found.value / best.value,
        "measured_gain": 1 - (middle if case.varies is None else late["found"] / late["hand_made"]),
        "spread": [1 - high, 1 - low],
        "milliseconds": {name: statistics.median(each) * 1e3 for name, each in seconds.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = {}
    for name, case in CASES.items():
        rows[name] = row = dl.launch(measure, case, args.rounds, num_ranks=len(case.blocks))[0]
        before, after = row["milliseconds"].values()
        low, high = row["spread"]
        print(
            f"{name}, {case.max_activations} activations: {row['hand_made']} {before:.1f} ms, found {after:.1f} ms;"
            f" predicted {row['predicted_gain']:+.1%}, measured {row['measured_gain']:+.1%}"
            f" (steps {low:+.1%} to {high:+.1%})"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
