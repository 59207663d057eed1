"""Whether advice holds: a run with a slow stage on two CPU ranks, the advice it gives, and the run that follows it.

    python benchmarks/advice.py [--json FILE] [--rounds N] [--steps N]

The blocks of the second half do their work several times. First the even cut runs alone, and is asked what to change;
then both cuts run in turns, step by step on the same ranks, so that other work on the machine meets both alike. Held
against each other are the gain that is predicted from the first cut's steps and the one that was measured, both of the
quietest steps: a step in which a rank had to share its core says nothing of either. There is no peer that predicts;
the figures are ours alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import drumline as dl
from drumline.plan.device.advice import Remedy
from drumline.report.draw.table import table
from drumline.report.run.report import RunReport, report_of
from measure import machine

BLOCKS, MICROBATCHES, ROWS = 12, 8, 64
CASES = [("1f1b", 256, 2), ("1f1b", 256, 3), ("zb-h1", 256, 2), ("gpipe", 256, 2)]  # schedule, width, times


class Repeated(nn.Module):
    """A block that does its work several times over."""

    def __init__(self, width: int, times: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        """Return the result of the last time."""
        for _ in range(self.times):
            x = torch.tanh(self.linear(x))
        return x


def train(folders: dict[str, list[int]], schedule: str, width: int, times: int, steps: int) -> None:
    """Train a model for every folder, cut as it says, in turns."""
    torch.set_num_threads(1)
    loss = nn.functional.mse_loss
    with ExitStack() as stack:
        pipes = []
        for folder, balance in folders.items():
            torch.manual_seed(0)
            model = nn.Sequential(*(Repeated(width, times if at >= BLOCKS // 2 else 1) for at in range(BLOCKS)))
            settings: dict[str, Any] = {"schedule": schedule, "num_microbatches": MICROBATCHES, "balance": balance}
            pipe = stack.enter_context(dl.Pipeline(model, loss_fn=loss, record=folder, **settings))
            pipes.append((pipe, pipe.optimizer(torch.optim.SGD, lr=0.01)))
        for _ in range(steps):
            batch = torch.randn(MICROBATCHES * ROWS, width)
            for pipe, optimizer in pipes:
                pipe.step(batch, target=batch)
                optimizer.step()
                optimizer.zero_grad()


def quietest(folder: Path) -> RunReport:
    """Return the report of the step with the shortest makespan."""
    run = dl.read_run(folder)
    spans = {metric["step"]: metric["pp/makespan_seconds"] for metric in run.metrics()}
    return report_of(run, step=min(spans, key=spans.__getitem__))


def advised(report: RunReport) -> Remedy | None:
    """Return the cut that a report advises."""
    return next((remedy for remedy in report.advice.remedies if remedy.kind == "cut"), None)


def measure(schedule: str, width: int, times: int, *, rounds: int, steps: int) -> dict[str, Any]:
    """Return what was advised, what was predicted of it, and what following it gained, round by round."""
    even = [BLOCKS // 2, BLOCKS // 2]
    found: dict[str, Any] = {"schedule": schedule, "width": width, "times": times}
    found |= {"balances": [], "sentences": [], "predicted": [], "gained": []}
    with tempfile.TemporaryDirectory() as name:
        for turn in range(rounds):
            alone, before, after = (Path(name) / f"{turn}-{what}" for what in ("alone", "before", "after"))
            dl.launch(train, {str(alone): even}, schedule, width, times, steps, num_ranks=2)
            first = quietest(alone)
            cut = advised(first)
            assert cut is not None, f"no other cut was advised: {first.advice.sentence}"
            balance = cut.settings["balance"]
            dl.launch(train, {str(before): even, str(after): balance}, schedule, width, times, steps, num_ranks=2)
            report, other = quietest(before), quietest(after)
            again = advised(report)
            found["balances"].append(balance)
            found["sentences"].append(first.advice.sentence)
            found["predicted"].append(cut.gain if again is None else again.gain)
            found["gained"].append(1 - other.step.measured.makespan / report.step.measured.makespan)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    print(f"{machine()}; {args.rounds} rounds of {args.steps} steps each\n")
    cases = [measure(*case, rounds=args.rounds, steps=args.steps) for case in CASES]
    header = ["schedule", "width", "slow blocks", "advised cut", "predicted", "gained", "spread", "off by points"]
    rows = []
    for case in cases:
        spread = 100 * (max(case["gained"]) - min(case["gained"]))
        rows.append(
            [
                case["schedule"],
                str(case["width"]),
                f"x{case['times']}",
                " ".join(map(str, case["balances"][0])),
                f"{statistics.median(case['predicted']):.1%}",
                f"{statistics.median(case['gained']):.1%}",
                f"{spread:.1f}",
                f"{100 * abs(statistics.median(case['predicted']) - statistics.median(case['gained'])):.1f}",
            ]
        )
    print(table(header, rows))
    print(f"\n{cases[0]['sentences'][0]}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=2) + "\n")
        print(f"\nwrote {args.json}")


if __name__ == "__main__":
    main()
