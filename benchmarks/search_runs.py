"""Programs that the search found, run on real CPU ranks beside the best hand-made ones in the same memory.

    python benchmarks/search_runs.py [--rounds 40] [--cases ...] [--json FILE]

Four ranks, one thread each, so four cores are needed. Stages of equal blocks are measured by zb-h1 first; then a
program is searched for what was measured, and both run in turns, step by step, in one run. A step is timed from a
barrier to the end of the last rank.

    heavy head     blocks 5, 5, 5, 8: stages as 1, 1, 1, 1.6; three activations on a rank, fewer than any hand-made
                   schedule but one microbatch after the other gets by with; and five, where zb-h1 fits
    varying stage  the one block of the third stage runs twice for three of four microbatches and ten times for the
                   fourth, drawn, so that it takes as long as the others on average; six activations; the 0.9 quantile
                   of the step is what is made small
    slow link      messages between the two ranks in the middle are there some milliseconds late, both ways; six
                   activations. The delay is put on by the receiver: a message counts as arrived that much after it was
                   made
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.channel.channel import Delivery, Wait
from drumline.channel.shared_memory import SharedMemoryChannel
from drumline.core.action import Action
from drumline.core.measured.costs import costs_of
from drumline.core.placement import Placement
from drumline.engine.ranks import transports

QUANTILE = 0.9
TIMES = (2, 2, 2, 10)  # how often a varying block runs


@dataclass(frozen=True)
class Case:
    """Stages by their blocks, microbatches, the limit, and which stage varies."""

    blocks: tuple[int, ...]
    num_microbatches: int
    max_activations: int
    varies: int | None = None
    late_seconds: float = 0.0  # of messages between the two ranks in the middle
    width: int = 384
    rows: int = 48

    def model(self) -> nn.Sequential:
        """Return the chain of blocks."""
        torch.manual_seed(0)
        kinds = [stage == self.varies for stage, count in enumerate(self.blocks) for _ in range(count)]
        return nn.Sequential(*(Block(self.width, varies=kind) for kind in kinds))

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
        drawn = torch.randint(len(TIMES), (self.num_microbatches,), generator=random)
        x[:, -1] = torch.tensor(TIMES)[drawn].repeat_interleave(self.rows)
        return x


CASES = {
    "heavy head": Case((5, 5, 5, 8), 8, 3),
    "heavy head, more memory": Case((5, 5, 5, 8), 8, 5),
    "varying stage": Case((4, 4, 1, 4), 8, 6, varies=2),
    "slow link": Case((5, 5, 5, 5), 8, 6, late_seconds=3e-3),
}


class LateChannel(SharedMemoryChannel):
    """Shared memory, but what other ranks send over a slow link is there later."""

    late_ns: ClassVar[dict[int, int]] = {}  # by the source

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self._on_the_way: dict[tuple[Action, int], Delivery] = {}

    def take(self, receive: Action, source: int) -> Delivery | None:
        """Take a message up, if it is there and its time has come."""
        delivery = self._on_the_way.pop((receive, source), None) or super().take(receive, source)
        if delivery is None:
            return None
        due = self._due(delivery, source)
        if due <= self.now():
            delivery.sent_ns, delivery.arrived_ns = max(delivery.sent_ns, due), max(delivery.arrived_ns, due)
            return delivery
        self._on_the_way[receive, source] = delivery
        return None

    def block(self, wait: Wait, deadline_ns: int) -> None:
        """Wait for a message, or for its time."""
        delivery = self._on_the_way.get((wait.receive, wait.source))
        if delivery is None:
            super().block(wait, deadline_ns)
        else:
            time.sleep(max(self._due(delivery, wait.source) - self.now(), 0) / 1e9)

    def _due(self, delivery: Delivery, source: int) -> int:
        return delivery.made_ns + self.late_ns.get(source, 0)


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


def searched(case: Case, random: torch.Generator) -> tuple[dl.Costs, Any]:
    """Measure stages by zb-h1, and return that with what rank 0 finds for them."""
    seen = []
    with case.pipeline("zb-h1") as first:
        for turn in range(12):
            step(first, case.batch(random))
            if turn >= 2:
                seen.append(first.timeline())
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        share = statistics.pstdev(TIMES) / statistics.mean(TIMES)
        spread = [share * (block == case.varies) for block in range(len(case.blocks))]
        costs = costs_of(seen, quickest=True)
        found = dl.search(
            costs,
            Placement.linear(len(case.blocks)),
            num_microbatches=case.num_microbatches,
            limit=dl.Limit(max_activations=case.max_activations),
            jitter=None if case.varies is None else dl.Jitter(spread, quantile=QUANTILE),
            seconds=20,
        )
        told[0] = (costs, found)
    dist.broadcast_object_list(told)
    found_for: tuple[dl.Costs, Any] = told[0]
    return found_for


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """Run one case on this rank."""
    if case.late_seconds:
        half = len(case.blocks) // 2
        other = {half - 1: half, half: half - 1}.get(dist.get_rank())
        LateChannel.late_ns = {} if other is None else {other: int(case.late_seconds * 1e9)}
        setattr(transports, "SharedMemoryChannel", LateChannel)  # noqa: B010 - mypy forbids it as an assignment
    random = torch.Generator().manual_seed(0)
    costs, found = searched(case, random)
    best = min(found.starts, key=lambda value: value.value)
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
        "costs": costs.to_json(),
        "predicted_gain": 1 - found.value / best.value,
        "measured_gain": 1 - (middle if case.varies is None else late["found"] / late["hand_made"]),
        "spread": [1 - high, 1 - low],
        "milliseconds": {name: statistics.median(each) * 1e3 for name, each in seconds.items()},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cases", nargs="*", choices=list(CASES), default=list(CASES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = {}
    for name, case in ((name, CASES[name]) for name in args.cases):
        rows[name] = row = dl.launch(measure, case, args.rounds, num_ranks=len(case.blocks))[0]
        before, after = row["milliseconds"].values()
        low, high = row["spread"]
        stages = " ".join(f"{value * 1e3:.2f}" for value in row["costs"]["forward"])
        edges = " ".join(f"{edge['from']}>{edge['to']} {edge['latency'] * 1e3:.2f}" for edge in row["costs"]["edges"])
        print(
            f"{name}, {case.max_activations} activations: {row['hand_made']} {before:.1f} ms, found {after:.1f} ms;"
            f" predicted {row['predicted_gain']:+.1%}, measured {row['measured_gain']:+.1%}"
            f" (steps {low:+.1%} to {high:+.1%}); F of stages {stages} ms, edges {edges} ms"
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
