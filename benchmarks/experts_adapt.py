"""A sparse mixture of experts skews a pipeline: what more microbatches, another cut and another placement bring back.

    python benchmarks/experts_adapt.py [--blocks 24] [--hidden 192] [--rows 96] [--steps 30] [--out FOLDER]

Two ranks, one thread each. `dense`: all blocks are feedforward networks, cut in the middle, 8 microbatches. Then the
last third of the blocks are mixtures of 8 experts, of which each token takes 2, at the same cut. Against that: 16 and
32 microbatches; the cut that `pipe.repartition` takes after solving with measured times; `schedule="auto"` at that cut,
with one stage per rank; and `schedule="auto"` with an example, which chooses the placement at set-up.

All pipelines are made first, each in its final form. Then they take turns, one step each, so that a disturbance of the
machine hits all of them. Figures are medians over steps; `ratio` is bubble over utilisation, `beside` that of the dense
baseline, `processor` the time that both ranks computed. --out gets a plot of every rank's idle share.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import drumline as dl
from drumline.adapt.measured_step import stage_seconds
from drumline.adapt.rebalance import Layers

LOSS = nn.functional.mse_loss
_WARM_UPS = 3
_SEARCHED = 24  # steps after which schedule="auto" has decided


class Dense(nn.Module):
    """A feedforward network that adds to x."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what the network made of it."""
        made: Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return made


class Sparse(nn.Module):
    """Experts that add to x."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.moe = dl.MoE(hidden, 4 * hidden, num_experts=8, top_k=2)

    def forward(self, x: Tensor) -> Tensor:
        """Return x with what the experts made of it."""
        made: Tensor = x + self.moe(x)
        return made


def model_of(blocks: int, hidden: int, sparse: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*((Dense if at < blocks - sparse else Sparse)(hidden) for at in range(blocks)))


@dataclass(frozen=True)
class Case:
    """How one of the pipelines is made; `then` is what changes after a few steps."""

    sparse: bool = True
    microbatches: int = 8
    then: str = ""


CASES = {
    "dense": Case(sparse=False),
    "experts": Case(),
    "16 microbatches": Case(microbatches=16),
    "32 microbatches": Case(microbatches=32),
    "repartition": Case(then="cut"),
    "auto, one stage": Case(then="search"),
    "auto": Case(then="place"),
}


class Trained:
    """A pipeline of one case on this rank, in its final form."""

    def __init__(self, given: dict[str, int], case: Case) -> None:
        blocks, hidden = given["blocks"], given["hidden"]
        self.x = torch.randn(8 * given["rows"], 1, hidden, generator=torch.Generator().manual_seed(1))
        self.blocks, self.case = blocks, case
        middle = (blocks // 2, blocks - blocks // 2)
        self._make = partial(model_of, blocks, hidden, blocks // 3 if case.sparse else 0)
        settings: dict[str, Any] = {"balance": middle}
        if case.then == "place":
            settings = {"schedule": "auto", "example": self.x, "example_target": self.x}
        self._begin(**settings)
        if case.then in ("cut", "search"):
            counts = self._solved(middle)
            if case.then == "cut":
                self.pipe.repartition(balance=list(counts))
            else:
                self.pipe.close()
                self._begin(schedule="auto", stages_per_rank=1, balance=list(counts))
        self.steps(_SEARCHED if case.then in ("search", "place") else 0)

    def _begin(self, **settings: Any) -> None:
        self.pipe = dl.Pipeline(
            self._make(), loss_fn=LOSS, num_microbatches=self.case.microbatches, device="cpu", **settings
        )
        self.optimizer = self.pipe.optimizer(torch.optim.Adam, lr=1e-4)

    def _solved(self, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Return the cut that measured steps lead to."""
        number = self.case.microbatches
        profile = dl.balance(
            self._make(), self.x, target=self.x, loss_fn=LOSS, num_microbatches=number, num_runs=5
        ).profile
        measured = [stage_seconds(value) for value, _ in self.steps(_WARM_UPS + 5)[_WARM_UPS:]]
        layers = Layers(profile, dl.generate("1f1b", num_ranks=2, num_microbatches=number))
        each = [median(entry) for entry in zip(*measured, strict=True)]
        best: tuple[int, ...] = self.pipe.gather(layers.measured(counts, each).best().counts)[0]
        return best

    def steps(self, number: int) -> list[tuple[Any, float]]:
        """Run so many steps; return each one's timeline, and the seconds for which this rank computed."""
        seen = []
        for _ in range(number):
            begun = time.process_time()
            self.pipe.step(self.x, target=self.x)
            self.pipe.settle()
            seconds = time.process_time() - begun
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen.append((self.pipe.timeline(), seconds))
        return seen


def rank_run(given: dict[str, int], names: list[str]) -> dict[str, dict[str, Any]]:
    """Run all cases in turns; return each one's figures."""
    torch.set_num_threads(1)
    runs = {name: Trained(given, CASES[name]) for name in names}
    for run in runs.values():
        run.steps(_WARM_UPS)
    seen: dict[str, list[tuple[Any, float]]] = {name: [] for name in runs}
    for _ in range(given["steps"]):
        for name, run in runs.items():
            seen[name] += run.steps(1)
    rows = {name: figures(run, seen[name]) for name, run in runs.items()}
    for run in runs.values():
        run.pipe.close()
    return rows


def figures(run: Trained, seen: list[tuple[Any, float]]) -> dict[str, Any]:
    values = [value for value, _ in seen]
    bubble = median(value.bubble for value in values)
    return {
        "schedule": run.pipe.program.name,
        "bubble": bubble,
        "ratio": bubble / (1 - bubble),
        "idle": [median(value.idle[rank] / value.makespan for value in values) for rank in range(2)],
        "cut": [len(stage) for stage in run.pipe.blocks],
        "milliseconds": median(value.makespan for value in values) * 1e3,
        "processor": sum(run.pipe.gather(median(seconds for _, seconds in seen))) * 1e3,
    }


def draw(rows: dict[str, dict[str, Any]]) -> str:
    """Return a chart of every rank's idle share in each arrangement."""
    from drumline.report.draw.chart import HUES, Bar, bars

    drawn = [
        Bar(f"{name}, rank {rank}", {"busy": 100 * (1 - idle), "idle": 100 * idle}, note=f"{idle:.0%} idle")
        for name, row in rows.items()
        for rank, idle in enumerate(row["idle"])
    ]
    hues = {"busy": HUES[0], "idle": HUES[4]}
    return bars(drawn, hues, title="Where the time of every rank goes", x_label="% of a step", unit="%")


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in {"blocks": 24, "hidden": 192, "rows": 96, "steps": 30}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    given = {name: getattr(args, name) for name in ("blocks", "hidden", "rows", "steps")}
    rows = dl.launch(rank_run, given, list(CASES), num_ranks=2, prefix=False)[0]
    for name, row in rows.items():
        row["beside"] = row["ratio"] / rows["dense"]["ratio"]
        idle = " and ".join(f"{share:.1%}" for share in row["idle"])
        cut = " + ".join(map(str, row["cut"]))
        print(
            f"{name:15}  {row['schedule']:26}  cut {cut:22}  step {row['milliseconds']:7.1f} ms  "
            f"processor {row['processor']:7.1f} ms  bubble {row['bubble']:5.1%}  ratio {row['ratio']:.3f}  "
            f"beside {row['beside']:.2f}  idle {idle}",
            flush=True,
        )
    shorter = 1 - rows["auto"]["milliseconds"] / rows["repartition"]["milliseconds"]
    print(f"auto: a step {shorter:.1%} shorter than the repartition's, {rows['auto']['beside']:.2f} of the dense ratio")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "experts-adapt.svg").write_text(draw(rows), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
