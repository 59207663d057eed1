"""What is gained if ranks do not wait for each other before they update, beside what the simulator says.

    python benchmarks/postval.py [--rounds 30] [--seconds 60] [--steps 8] [--sizes 512x64] [--schedules zb-h2 zb-v 1f1b]
                                 [--json FILE]

Two ranks, one thread each, 8 blocks of Linear(D, D) + GELU, AdamW, gradients clipped by their global norm. Two
pipelines take turns in one run: one that waits for the norm of all ranks before every update (validated="before"), and
one that validates afterwards. A turn is so many steps in a row, from a barrier to a barrier; the norm never exceeds the
limit, so nothing is taken back. Printed: milliseconds of a step, medians; the ratio of both in the same round, with its
quartiles; the simulated ratio, from the actions that were measured here, with updates that take as long as they took
(clipping and `optimizer.step()`, waiting for nobody, copies included), and with copies that cost nothing.

A case prints its line when it is done. No case begins a round after `--seconds`, so all take a little more than
`--seconds` times the cases, 6 of them by default.

Last: the same with an update that is taken back in every turn, which is what a rollback costs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

BLOCKS = 8
KINDS = ("before", "after", "taken back")
NEVER = 1e9
WARM_UP = 2  # rounds that do not count


def validation_of(pipe: Any) -> Any:
    """Return what validates a pipeline's updates afterwards."""
    from drumline.features.validated.validated import Validation

    return next(validation for validation in pipe._site.observers.each if isinstance(validation, Validation))


class Most(NamedTuple):
    """How much to measure in a case: rounds of turns of so many steps, and no round after so many seconds."""

    rounds: int
    steps: int
    seconds: float


class Contender:
    """One pipeline, its optimizer, and how long its turns and updates took."""

    def __init__(self, kind: str, model: Any, **settings: Any) -> None:
        import torch
        from torch.nn import functional

        import drumline as dl

        self.kind = kind
        how: dict[str, Any] = {} if kind == "before" else {"validated": "after", "max_norm": NEVER}
        self.pipe = dl.Pipeline(copy.deepcopy(model), loss_fn=functional.mse_loss, **settings)
        self.optimizer = self.pipe.optimizer(torch.optim.AdamW, lr=1e-5, **how)
        self.turns: list[float] = []
        self.updates: list[float] = []
        self.timelines: list[Any] = []

    def turn(self, steps: int, x: Any, y: Any) -> None:
        """Run so many steps and updates."""
        import torch.distributed as dist

        dist.barrier()
        start = time.perf_counter()
        for step in range(steps):
            self.pipe.step(x, target=y)
            if self.kind == "before":
                self.pipe.clip_grad_norm_(NEVER)
            began = time.perf_counter()
            if self.kind == "taken back" and step == steps // 2:
                self._reject()
            else:
                self.optimizer.step()
                self.updates.append(time.perf_counter() - began)
            self.optimizer.zero_grad()
        self.pipe.settle()
        dist.barrier()
        self.turns.append((time.perf_counter() - start) / steps)
        self.timelines.append(self.pipe.timeline())

    def clipping(self, x: Any, y: Any) -> float:
        """Return what clipping takes on this rank, without waiting for others."""
        import torch

        from drumline.runtime.gradients import clip

        self.pipe.step(x, target=y)
        taken = []
        for _ in range(20):
            start = time.perf_counter()
            self.pipe._holdings.norms(2.0)
            clip.scale(self.pipe.parameters(), torch.ones(()), NEVER)
            taken.append(time.perf_counter() - start)
        self.pipe.zero_grad()
        return statistics.median(taken)

    def _reject(self) -> None:
        """Update ahead of a verdict that will find the norm too large; no rank knows that by itself."""
        validation = validation_of(self.pipe)
        norms = self.pipe._holdings.norms(2.0)
        most = max(sum(norm**2 for norm in norm.values()) ** 0.5 for norm in norms)
        told = self.pipe.gather(most)
        validation.max_norm = max(told)  # what the largest rank has, so less than all together have
        self.optimizer.step()


def measure(width: int, depth: int, microbatches: int, name: str, most: Most) -> dict[str, Any]:
    """Run one case on this rank; all ranks stop after the same round."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(BLOCKS)))
    x, y = (torch.randn(microbatches * depth, width) for _ in range(2))
    each = [Contender(kind, model, schedule=name, num_microbatches=microbatches) for kind in KINDS]
    began, turn = time.perf_counter(), 0
    while turn < most.rounds + WARM_UP:
        for contender in each[turn % 3 :] + each[: turn % 3]:  # no contender always follows the same one
            contender.turn(most.steps, x, y)
            validation_of(contender.pipe).max_norm = NEVER
        turn += 1
        if max(each[0].pipe.gather(time.perf_counter() - began)) > most.seconds and turn > WARM_UP:
            break
    waits, ahead = (statistics.median(contender.updates[WARM_UP * most.steps :]) for contender in each[:2])
    told = each[0].pipe.gather([waits + each[0].clipping(x, y), ahead])
    row = {"schedule": name, "width": width, "rows": depth, "microbatches": microbatches, "steps": most.steps,
           "rounds": turn - WARM_UP, **compared(each), **simulated(each[0], told)}  # fmt: skip
    row["taken_back"] = validation_of(each[2].pipe).num_taken_back
    for contender in each:
        contender.pipe.close()
    return row


def compared(each: list[Contender]) -> dict[str, Any]:
    """Return the times of a step, and the ratios to the first contender in the same round."""
    found: dict[str, Any] = {f"{item.kind}_ms": statistics.median(item.turns[WARM_UP:]) * 1e3 for item in each}
    for item in each[1:]:
        ratios = sorted(first / own for first, own in zip(each[0].turns[WARM_UP:], item.turns[WARM_UP:], strict=True))
        found[item.kind] = {
            "ratio": statistics.median(ratios),
            "low": ratios[len(ratios) // 4],
            "high": ratios[3 * len(ratios) // 4],
        }
    return found


def simulated(before: Contender, updates: list[list[float]]) -> dict[str, Any]:
    """Return the simulated ratios; `updates` are each rank's seconds of an update before and after."""
    from drumline.core.measured.costs import costs_of
    from drumline.core.simulate.steps import step_seconds

    program, costs = before.pipe.program, costs_of(before.timelines[WARM_UP:])
    homes = program.placement.homes
    shares = [homes.count(rank) for rank in homes]

    def seconds(number: int) -> Any:
        each = [updates[rank][number] / share for rank, share in zip(homes, shares, strict=True)]
        return step_seconds(program, replace(costs, update=each))

    waits, ahead = seconds(0), seconds(1)
    return {
        "update_ms": [[value * 1e3 for value in rank] for rank in updates],
        "simulated_ms": [waits.before * 1e3, ahead.after * 1e3],
        "simulated": waits.before / ahead.after,
        "without_copies": waits.gain,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="most rounds of a case (default 30)")
    parser.add_argument("--seconds", type=float, default=60.0, help="begin no round of a case after these (default 60)")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sizes", nargs="*", default=["512x64", "512x256"])
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedules", nargs="*", default=["zb-h2", "zb-v", "1f1b"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import drumline as dl

    cases = [(*map(int, size.split("x")), name) for size in args.sizes for name in args.schedules]
    most, rows = Most(args.rounds, args.steps, args.seconds), []
    head = "D/rows    schedule   rounds  before ms  after ms  before/after (quartiles)   simulated  without copies"
    print(f"{head}  update ms", flush=True)
    for number, (width, depth, name) in enumerate(cases, 1):
        began = f"{width}/{depth} {name}: case {number} of {len(cases)}, about {args.seconds:g} s at most"
        print(began, file=sys.stderr, flush=True)
        row = dl.launch(measure, width, depth, args.microbatches, name, most, num_ranks=2)[0]
        rows.append(row)
        after, (waits, ahead) = row["after"], row["update_ms"][0]
        print(
            f"{row['width']:4d}/{row['rows']:<4d} {row['schedule']:9s} {row['rounds']:7d} {row['before_ms']:10.2f}"
            f" {row['after_ms']:9.2f}  {after['ratio']:.4f} ({after['low']:.3f} to {after['high']:.3f})"
            f"  {row['simulated']:10.4f}  {row['without_copies']:14.4f}  {waits:.2f} and {ahead:.2f}",
            flush=True,
        )
    print(f"\nOne of {args.steps} updates taken back: a step takes")
    for row in rows:
        after = row["taken back"]
        case = f"{row['width']:4d}/{row['rows']:<4d} {row['schedule']:9s} {row['taken back_ms']:10.2f} ms,"
        print(f"{case} before/after {after['ratio']:.4f} ({after['low']:.3f} to {after['high']:.3f})")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
