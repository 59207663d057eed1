"""A sparse mixture of experts skews a pipeline: what more microbatches, another cut and a searched program bring back.

    python benchmarks/experts_adapt.py [--blocks 24] [--hidden 192] [--rows 96] [--steps 30] [--out FOLDER]

Two ranks, one thread each. `dense`: all blocks are feedforward networks, cut in the middle, 8 microbatches. Then the
last third of the blocks are mixtures of 8 experts, of which each token takes 2, at the same cut. Against that: 16 and
32 microbatches, the cut that `pipe.repartition` takes after solving with measured times, and a program searched for
measured times at the new cut. Figures are medians over steps; `ratio` is bubble over utilisation, `beside` that of the
dense baseline. --out gets a plot of every rank's idle share before and after.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import drumline as dl
from drumline.adapt.measured_step import stage_seconds
from drumline.adapt.rebalance import Layers
from drumline.core.measured.costs import costs_of

_WARM_UPS = 3


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


def run(given: dict[str, int], *, sparse: int, microbatches: int, then: str = "") -> dict[str, Any]:
    """Train on this rank, with the cut in the middle; `then` is what to change after a few steps."""
    torch.set_num_threads(1)
    blocks, hidden = given["blocks"], given["hidden"]
    x = torch.randn(8 * given["rows"], 1, hidden, generator=torch.Generator().manual_seed(1))
    settings: dict[str, Any] = {"schedule": "zb-h1" if then == "search" else "1f1b", "example": x, "example_target": x}
    with dl.Pipeline(
        model_of(blocks, hidden, sparse),
        loss_fn=nn.functional.mse_loss,
        num_microbatches=microbatches,
        balance=[blocks // 2, blocks - blocks // 2],
        **settings,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=1e-4)
        profile = dl.balance(
            model_of(blocks, hidden, sparse), x, target=x, loss_fn=nn.functional.mse_loss,
            num_microbatches=microbatches, num_runs=5,
        ).profile if then else None  # fmt: skip

        def steps(number: int) -> list[Any]:
            seen = []
            for _ in range(number):
                pipe.step(x, target=x)
                optimizer.step()
                optimizer.zero_grad()
                seen.append(pipe.timeline())
            return seen

        cut: tuple[int, ...] = (blocks // 2, blocks - blocks // 2)
        if profile is not None:
            told = steps(_WARM_UPS + 5)[_WARM_UPS:]
            layers = Layers(profile, dl.generate("1f1b", num_ranks=2, num_microbatches=microbatches))
            each = [median(entry) for entry in zip(*map(stage_seconds, told), strict=True)]
            cut = pipe.gather(layers.measured(cut, each).best().counts)[0]
            if cut != pipe.gather((blocks // 2, blocks - blocks // 2))[0]:
                pipe.repartition(balance=list(cut))
        if then == "search":
            costs = costs_of(steps(_WARM_UPS + 5)[_WARM_UPS:], quickest=True)
            limit = dl.Limit(max_activations=max(dl.simulate(pipe.program).peak_activations))
            found = dl.search(
                costs, pipe.program.placement, num_microbatches=microbatches, limit=limit, seconds=3.0
            ).program if pipe.rank == 0 else None  # fmt: skip
            pipe.take_program(pipe.gather(found)[0])
        seen = steps(_WARM_UPS + given["steps"])[_WARM_UPS:]
    idle = [median(value.idle[rank] / value.makespan for value in seen) for rank in range(2)]
    bubble = median(value.bubble for value in seen)
    return {
        "bubble": bubble,
        "ratio": bubble / (1 - bubble),
        "idle": idle,
        "cut": list(cut),
        "milliseconds": median(value.makespan for value in seen) * 1e3,
    }


def rank_run(given: dict[str, int], settings: dict[str, Any]) -> dict[str, Any]:
    return run(given, **settings)


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
    sparse = args.blocks // 3
    cases: dict[str, dict[str, Any]] = {
        "dense": {"sparse": 0, "microbatches": 8},
        "experts": {"sparse": sparse, "microbatches": 8},
        "16 microbatches": {"sparse": sparse, "microbatches": 16},
        "32 microbatches": {"sparse": sparse, "microbatches": 32},
        "repartition": {"sparse": sparse, "microbatches": 8, "then": "cut"},
        "cut and search": {"sparse": sparse, "microbatches": 8, "then": "search"},
    }
    rows: dict[str, dict[str, Any]] = {}
    for name, settings in cases.items():
        entry = rows[name] = dl.launch(rank_run, given, settings, num_ranks=2)[0]
        entry["beside"] = entry["ratio"] / rows["dense"]["ratio"]
        idle = " and ".join(f"{share:.1%}" for share in entry["idle"])
        print(
            f"{name:16} cut {entry['cut'][0]:2} + {entry['cut'][1]:2}  step {entry['milliseconds']:6.1f} ms  bubble "
            f"{entry['bubble']:.1%}  ratio {entry['ratio']:.3f}  beside {entry['beside']:.2f}  idle {idle}",
            flush=True,
        )
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "experts-adapt.svg").write_text(draw(rows), encoding="utf-8")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
