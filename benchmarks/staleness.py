"""What old weights cost: training without a flush beside synchronous training, with AdamW and with Muon.

    python benchmarks/staleness.py [--problems quadratic mlp gpt] [--steps 200] [--ranks 4] [--rates 0.3 1 3]
                                   [--optimizers AdamW Muon] [--schedules 1f1b pipedream-2bw pipedream]
                                   [--device cuda] [--size small] [--json FILE] [--plot FOLDER] [--found FILE ...]

Every run is a real pipeline whose ranks take turns in one process, on any device; all see the same batches and begin
with the same weights. Steps have as many microbatches as there are ranks.

    1f1b             synchronous: an update per step, with the gradients of the weights it changes
    pipedream-2bw    an update per step, with gradients of the weights one update ago
    pipedream        an update per microbatch, with gradients of weights up to P-1 updates ago; its learning rate is
                     divided by the microbatches of a step, so that a step moves weights about as far

    quadratic   matrices whose sum should be a given one, with curvatures from 1 to 100 and noise
    mlp         a student of four layers and a random teacher
    gpt         a byte-level decoder on the text that Drumline ships; --size 10m has about 10 million parameters

A run's figure is the mean loss of its last tenth; "diverged" is a loss that is not finite, or over 10 times the first.
`--rates` multiply each optimizer's own rate; the best of them counts for each schedule. A long study can be divided
between processes by `--optimizers` and `--schedules`; `--found` then prints and draws what their JSON files hold.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import drumline as dl
from drumline.core.errors import NonFiniteError

SCHEDULES = ("1f1b", "pipedream-2bw", "pipedream")
OPTIMIZERS = {"AdamW": 3e-3, "Muon": 2e-2}
SIZES = {"small": (64, 4, 64, 8), "10m": (384, 6, 256, 32)}  # width, layers, length, rows


@dataclass(frozen=True)
class Problem:
    """What is trained: a chain of blocks, its loss, and batches."""

    model: Callable[[], nn.Sequential]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]


class Plus(nn.Module):
    """Adds a matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(size, size) / size)

    def forward(self, x: Tensor) -> Tensor:
        """Add it."""
        return x + self.matrix


def quadratic(ranks: int) -> Problem:
    size = 16
    curvature = torch.logspace(0, 2, size).sqrt()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) * curvature.to(output.device)).square().mean()

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        wanted = torch.eye(size).expand(4 * ranks, size, size)
        return torch.zeros(4 * ranks, size, size), wanted + 0.1 * torch.randn(wanted.shape, generator=generator)

    return Problem(lambda: nn.Sequential(*(Plus(size) for _ in range(ranks))), loss, batch)


def mlp(ranks: int) -> Problem:
    width = 32

    def net() -> nn.Sequential:
        return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(max(ranks, 4))))

    torch.manual_seed(7)
    teacher = net()
    for param in teacher.parameters():
        nn.init.normal_(param, std=1.5 / math.sqrt(width))

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(16 * ranks, width, generator=generator)
        with torch.no_grad():
            return x, teacher(x)

    return Problem(net, functional.mse_loss, batch)


class Block(nn.Module):
    """A layer of a decoder."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then compute on every place."""
        rows, length, width = x.shape
        q, k, v = (value.view(rows, length, -1, 32).transpose(1, 2) for value in self.qkv(self.first(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        made: Tensor = x + self.down(functional.gelu(self.up(self.second(x))))
        return made


class Start(nn.Module):
    """Bytes and positions as vectors."""

    def __init__(self, width: int, length: int) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(length, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add both."""
        made: Tensor = self.bytes(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return made


def gpt(ranks: int, size: str) -> Problem:
    width, layers, length, rows = SIZES[size]
    text = Path(dl.__file__).parent / "train" / "data" / "shipped" / "genesis.txt"
    data = torch.tensor(list(text.read_bytes()))

    def net() -> nn.Sequential:
        head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))
        return nn.Sequential(Start(width, length), *(Block(width) for _ in range(layers)), head)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return functional.cross_entropy(output.flatten(0, 1), target.flatten())

    def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        starts = torch.randint(len(data) - length - 1, (rows * ranks // 4 * 4,), generator=generator)
        found = torch.stack([data[at : at + length + 1] for at in starts.tolist()])
        return found[:, :-1], found[:, 1:]

    return Problem(net, loss, batch)


def run(problem: Problem, schedule: str, optimizer: str, rate: float, given: argparse.Namespace) -> list[float]:
    """Train, and return the loss of every step; shorter if it diverges."""
    torch.manual_seed(0)
    pipe = dl.Pipeline(
        problem.model().to(given.device), loss_fn=problem.loss, schedule=schedule, num_ranks=given.ranks,
        num_microbatches=given.ranks, transport="in-process", device=given.device, record=False, check_model=False,
    )  # fmt: skip
    lr = OPTIMIZERS[optimizer] * rate / (given.ranks if schedule == "pipedream" else 1)
    names = pipe.parameter_shapes()
    # Muon is for the matrices inside; the ends of a decoder, and all vectors, have AdamW.
    inner = [name for name, shape in names.items() if len(shape) == 2 and "bytes" not in name and "places" not in name]
    inner = inner if optimizer == "Muon" else []
    plain = [name for name in names if name not in inner]
    adam = 3e-3 * rate / (given.ranks if schedule == "pipedream" else 1)
    made = [pipe.optimizer(torch.optim.Muon, names=inner, lr=lr)] if inner else []
    made += [pipe.optimizer(torch.optim.AdamW, names=plain, lr=adam if inner else lr)] if plain else []
    generator, losses = torch.Generator().manual_seed(1), []
    began = time.perf_counter()
    try:
        for at in range(given.steps):
            if at and at % 100 == 0:
                each = (time.perf_counter() - began) / at
                print(f"{schedule}, {optimizer}, rate x {rate:g}: step {at}, {each * 1e3:.0f} ms each", file=sys.stderr)
            x, y = problem.batch(generator)
            result = pipe.step(x.to(given.device), target=y.to(given.device))
            if schedule == "1f1b":
                for updater in made:
                    updater.step()
                    updater.zero_grad()
            assert result.loss is not None
            losses.append(float(result.loss))
            if not losses[-1] < 10 * losses[0]:
                break
    except NonFiniteError:
        pass
    return losses


def figure(losses: list[float], steps: int) -> float:
    """Return the mean loss of the last tenth; infinity if the run diverged."""
    if len(losses) < steps or not losses[-1] < 10 * losses[0]:
        return math.inf
    return statistics.fmean(losses[-max(1, steps // 10) :])


def studied(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield every problem, optimizer and schedule with all its runs."""
    for name in given.problems:
        if name == "gpt":
            problem = gpt(given.ranks, given.size)
        else:
            problem = (quadratic if name == "quadratic" else mlp)(given.ranks)
        for optimizer in given.optimizers:
            for schedule in given.schedules:
                runs = {rate: run(problem, schedule, optimizer, rate, given) for rate in given.rates}
                figures = {rate: figure(losses, given.steps) for rate, losses in runs.items()}
                best = min(figures, key=lambda rate: figures[rate])
                yield {"problem": name, "optimizer": optimizer, "schedule": schedule, "figures": figures,
                       "best": best, "losses": runs[best]}  # fmt: skip


def already(files: list[Path]) -> Iterator[dict[str, Any]]:
    """Yield what earlier runs wrote, in the order in which one run would have."""
    found = [load for file in files for load in json.loads(file.read_text())]
    order = [*OPTIMIZERS, *SCHEDULES]
    for value in sorted(found, key=lambda item: (order.index(item["optimizer"]), order.index(item["schedule"]))):
        yield value | {"figures": {float(rate): loss for rate, loss in value["figures"].items()}}


def plot(found: list[dict[str, Any]], folder: Path) -> None:
    """Draw each problem's curves at the best rate of each schedule."""
    from matplotlib import pyplot

    for name in dict.fromkeys(entry["problem"] for entry in found):
        sheet, axes = pyplot.subplots(1, len(OPTIMIZERS), figsize=(9, 3.2), sharey=True)
        for axis, optimizer in zip(axes, OPTIMIZERS, strict=True):
            for entry in found:
                if (entry["problem"], entry["optimizer"]) == (name, optimizer):
                    axis.plot(
                        *_thinned(entry["losses"]), label=f"{entry['schedule']}, rate x {entry['best']:g}", linewidth=1
                    )
            axis.set_title(f"{name}, {optimizer}")
            axis.set_xlabel("step")
            axis.set_yscale("log")
            axis.legend(fontsize=7)
        axes[0].set_ylabel("loss")
        sheet.tight_layout()
        sheet.savefig(folder / f"staleness-{name}.svg", metadata={"Date": None})


def _thinned(losses: list[float]) -> tuple[list[int], list[float]]:
    """Return at most about 200 points: steps, and the mean loss of those that each stands for."""
    each = max(1, len(losses) // 200)
    steps = list(range(0, len(losses), each))
    return steps, [statistics.fmean(losses[at : at + each]) for at in steps]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", nargs="+", default=["quadratic", "mlp"], choices=["quadratic", "mlp", "gpt"])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.3, 1.0, 3.0])
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", default="small", choices=SIZES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--found", type=Path, nargs="+", help="JSON files of earlier runs, instead of running")
    given = parser.parse_args()
    print(f"{given.ranks} ranks, {given.steps} steps on {given.device}; loss of the last tenth, by rate")
    found = []
    for entry in already(given.found) if given.found else studied(given):
        found.append(entry)
        shown = "  ".join(f"x{rate:g} {'diverged' if math.isinf(loss) else f'{loss:.4g}'}"
                          for rate, loss in entry["figures"].items())  # fmt: skip
        print(f"{entry['problem']:10} {entry['optimizer']:6} {entry['schedule']:14} {shown}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(found))
    if given.plot:
        plot(found, given.plot)


if __name__ == "__main__":
    main()
