"""Whether advice holds: a run with a slow stage on two CPU ranks, the advice it gives, and the run that follows it.

    python benchmarks/advice.py [--json FILE] [--rounds N] [--steps N]

The blocks of the second half do their work several times. The advised cut is run in turns with the first one; held
against each other are the predicted gain and the one that was measured, of the typical step's makespan. There is no
peer that predicts; the figures are ours alone.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import drumline as dl
from drumline.report.run_report import RunReport, report_of
from drumline.report.table import table
from measure import machine

BLOCKS, MICROBATCHES = 12, 8
CASES = [("1f1b", 512, 2), ("1f1b", 512, 3), ("zb-h1", 512, 2), ("gpipe", 384, 2)]  # schedule, width, times


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


def train(folder: str, schedule: str, width: int, times: int, balance: list[int], steps: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Repeated(width, times if at >= BLOCKS // 2 else 1) for at in range(BLOCKS)))
    loss = nn.functional.mse_loss
    settings: dict[str, Any] = {"schedule": schedule, "num_microbatches": MICROBATCHES, "balance": balance}
    with dl.Pipeline(model, loss_fn=loss, record=folder, **settings) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01)
        for _ in range(steps):
            batch = torch.randn(MICROBATCHES * 64, width)
            pipe.step(batch, target=batch)
            optimizer.step()
            optimizer.zero_grad()


def report(folder: Path, *case: Any) -> RunReport:
    """Run a case on two ranks and return its report."""
    dl.launch(train, str(folder), *case, num_ranks=2)
    return report_of(dl.read_run(folder))


def measure(schedule: str, width: int, times: int, *, rounds: int, steps: int) -> dict[str, Any]:
    """Return what was advised, what was predicted of it, and what following it gained, round by round."""
    even = [BLOCKS // 2, BLOCKS // 2]
    predicted, gained, sentences, balances = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            before = report(Path(folder) / f"{turn}-before", schedule, width, times, even, steps)
            (cut,) = [one for one in before.advice.remedies if one.kind == "cut"]
            balance = cut.settings["balance"]
            after = report(Path(folder) / f"{turn}-after", schedule, width, times, balance, steps)
            predicted.append(cut.gain)
            gained.append(1 - after.seen.measured.makespan / before.seen.measured.makespan)
            sentences.append(before.advice.sentence)
            balances.append(balance)
    return {
        "schedule": schedule,
        "width": width,
        "times": times,
        "balances": balances,
        "sentences": sentences,
        "predicted": predicted,
        "gained": gained,
        "off_by_points": [100 * abs(a - b) for a, b in zip(predicted, gained, strict=True)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=25)
    args = parser.parse_args()
    print(f"{machine()}; {args.rounds} rounds of {args.steps} steps each\n")
    cases = [measure(*case, rounds=args.rounds, steps=args.steps) for case in CASES]
    header = ["schedule", "width", "slow blocks", "advised cut", "predicted", "gained", "spread", "off by points"]
    rows = []
    for one in cases:
        spread = 100 * (max(one["gained"]) - min(one["gained"]))
        rows.append(
            [
                one["schedule"],
                str(one["width"]),
                f"x{one['times']}",
                " ".join(map(str, one["balances"][0])),
                f"{statistics.median(one['predicted']):.1%}",
                f"{statistics.median(one['gained']):.1%}",
                f"{spread:.1f}",
                f"{100 * abs(statistics.median(one['predicted']) - statistics.median(one['gained'])):.1f}",
            ]
        )
    print(table(header, rows))
    print(f"\n{cases[0]['sentences'][0]}")
    if args.json:
        args.json.write_text(json.dumps({"machine": machine(), "cases": cases}, indent=2) + "\n")
        print(f"\nwrote {args.json}")


if __name__ == "__main__":
    main()
