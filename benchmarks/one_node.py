"""Small GPT models on one node of A100s: fitted on half of the groups, shown on the other half, five times.

    python benchmarks/one_node.py [--halves N] [--json FILE]

`data/one_node_a100.csv` holds 788 iteration times of GPT models with fp16 and 1F1B in Megatron-LM of 2021-22, from the
repository of a public simulator; we were given them as measured. They cannot be measurements of whole iterations: in
every series they are linear in the number of microbatches to the nanosecond, and another number of data-parallel ranks
adds the same nanoseconds whatever else changes (`additivity`). They are sums of pieces. Agreement with them says that
pieces and composition are alike; it does not say that a run would take as long.

Whether layers were recomputed is not said with the rows, and a config in that repository has it switched on. We take it
to be off for all rows: with it, a layer of width 2048 would take 1.97 ms per sequence for 0.45 TFLOP of products and
about 0.5 ms of passes over memory, so products would reach 98% of an A100's peak. Without, they reach 66%.

A group is a model, a number of GPUs and a batch. The regret of a choice is how much longer the chosen layout takes
than the best one of the group. The planner's own constants are from an earlier fit, by squares of relative errors of
single rows, and stay as they are. Layouts that differ only in groups share their pieces, so halves are not independent:
`cells` fits without all rows of a (width, TP, microbatch) and shows those.
"""

from __future__ import annotations

import argparse
import csv
import json
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np

from drumline.plan.cluster.estimate import estimate
from drumline.plan.cluster.hardware import MACHINES, Machine
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.practice import Practice
from drumline.plan.cluster.transformer import Transformer
from published_runs import MEGATRON_2021, sc21

DATA = Path(__file__).parent / "data" / "one_node_a100.csv"
WORDS = 50257  # GPT-2's vocabulary; Megatron-LM pads it to a multiple of 128 per tensor-parallel rank
Group = tuple[Transformer, int, int]
Constants = dict[str, float]


@dataclass(frozen=True, slots=True)
class Sample:
    """One row: a layout of a model, and the seconds of its step."""

    transformer: Transformer
    layout: Layout
    seconds: float

    @property
    def group(self) -> tuple[int, int, int, int]:
        """Return what a planner would be asked: the model's width and layers, GPUs, batch."""
        return self.transformer.hidden, self.transformer.num_layers, self.layout.num_devices, self.layout.batch

    @property
    def cell(self) -> tuple[int, int, int]:
        """Return what decides the work of a layer: the width, TP and the microbatch."""
        return self.transformer.hidden, self.layout.tensor, self.layout.microbatch


def samples(path: Path = DATA) -> list[Sample]:
    """Return every row."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_sample(row) for row in csv.DictReader(file)]


def _sample(row: dict[str, str]) -> Sample:
    tensor, hidden, layers = int(row["tensor"]), int(row["hidden"]), int(row["layers"])
    vocabulary = -(-WORDS // (128 * tensor)) * 128 * tensor
    item = Transformer(f"{hidden} x {layers}", layers, hidden, int(row["heads"]), vocabulary, int(row["sequence"]))
    layout = Layout(
        batch=int(row["batch"]),
        microbatch=int(row["microbatch"]),
        tensor=tensor,
        pipeline=int(row["pipeline"]),
        data=int(row["data"]),
        practice=MEGATRON_2021,
    )
    return Sample(item, layout, float(row["milliseconds"]) / 1e3)


def additivity(path: Path = DATA) -> tuple[int, int]:
    """Return how many triples of a series over microbatches there are, and how many are linear to 2 nanoseconds."""
    series: dict[tuple[str, ...], dict[int, Decimal]] = defaultdict(dict)
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            count = int(row["batch"]) // int(row["data"]) // int(row["microbatch"])
            names = ("gpus", "microbatch", "hidden", "layers", "tensor", "data", "pipeline")
            series[tuple(row[name] for name in names)][count] = Decimal(row["milliseconds"])
    triples = linear = 0
    for times in series.values():
        slopes = [(times[b] - times[a]) / (b - a) for a, b in pairwise(sorted(times))]
        for first, second in pairwise(slopes):
            triples += 1
            linear += abs(first - second) < Decimal("2e-6")
    return triples, linear


# What is free, with bounds of what is plausible.
FREE = {
    "product": (0.5, 0.95),  # share of the tensor cores' peak
    "memory": (0.4, 0.95),  # share of the memory's bandwidth
    "node": (0.4, 0.95),  # share of a node's links
    "meet": (1e-6, 3e-4),  # seconds that tensor-parallel ranks wait for each other at a collective
    "host": (2e-4, 2e-3),  # seconds of the host per layer and pass
    "meets": (0.0, 0.2),  # share that every further tensor-parallel rank adds to the host's seconds
    "loss": (30.0, 150.0),  # bytes read and written per logit
}


def default() -> Constants:
    """Return the constants that the planner has."""
    machine = MACHINES["a100-80"]
    return {
        "product": machine.device.reach.product,
        "memory": machine.device.reach.memory,
        "node": machine.node_reach,
        "meet": MEGATRON_2021.meet_seconds,
        "host": MEGATRON_2021.host_seconds,
        "meets": MEGATRON_2021.host_meets,
        "loss": MEGATRON_2021.loss_bytes,
    }


def applied(constants: Constants, machine: Machine, practice: Practice) -> tuple[Machine, Practice]:
    """Return a machine and a practice with other constants."""
    reach = replace(machine.device.reach, product=constants["product"], memory=constants["memory"])
    device = replace(machine.device, reach=reach)
    machine = replace(machine, device=device, node_reach=constants["node"])
    found = replace(
        practice,
        host_seconds=constants["host"],
        host_meets=constants["meets"],
        meet_seconds=constants["meet"],
        loss_bytes=constants["loss"],
    )
    return machine, found


def predicted(constants: Constants, rows: Iterable[Sample], *, rough: bool = False) -> list[float]:
    """Return the seconds of rows under these constants; `rough` takes pipelines by formula, as fits do."""
    machine, practice = applied(constants, MACHINES["a100-80"], MEGATRON_2021)
    clusters = {count: machine.cluster(count) for count in (1, 2, 4, 8)}
    return [
        estimate(
            row.transformer, clusters[row.layout.num_devices], replace(row.layout, practice=practice), rough=rough
        ).seconds.total
        for row in rows
    ]


def published(constants: Constants, *, rough: bool = False) -> list[float]:
    """Return the relative errors of the ten rows of SC'21's Table 1, the same framework in the same year."""
    found = []
    for run in sc21():
        machine, practice = applied(constants, MACHINES[run.hardware], run.layout.practice)
        layout = replace(run.layout, practice=practice)
        found_seconds = estimate(run.transformer, machine.cluster(layout.num_devices), layout, rough=rough).seconds
        found.append(found_seconds.total / run.seconds - 1)
    return found


def fit(rows: Sequence[Sample], *, start: Constants | None = None, steps: int = 10) -> Constants:
    """Return the constants with the least squares of errors, over the rows and SC'21's ten, half each.

    An error is the logarithm of a ratio: half as long is as wrong as twice as long. Every group counts as much as any
    other, however many layouts were tried for it.
    """
    names, constants = list(FREE), dict(start or default())
    real, sizes = np.array([row.seconds for row in rows]), Counter(row.group for row in rows)
    weights = np.array([1 / (sizes[row.group] * len(sizes)) for row in rows]) ** 0.5

    def errors(tried: Constants) -> np.ndarray:
        ours = np.log(np.array(predicted(tried, rows, rough=True)) / real) * weights
        theirs = np.log1p(published(tried, rough=True)) / 10**0.5
        return np.concatenate([ours, theirs])

    now, damping = errors(constants), 1e-3
    for _ in range(steps):
        slopes = np.stack(
            [(errors({**constants, name: constants[name] * 1.01}) - now) / 0.01 for name in names], axis=1
        )
        while damping < 1e3:
            matrix = slopes.T @ slopes
            move = np.linalg.solve(matrix + damping * np.diag(np.diag(matrix) + 1e-9), -slopes.T @ now)
            tried = {
                name: float(np.clip(constants[name] * (1 + np.clip(by, -0.5, 0.5)), *FREE[name]))
                for name, by in zip(names, move, strict=True)
            }
            then = errors(tried)
            if then @ then < now @ now:
                better = now @ now - then @ then
                constants, now, damping = tried, then, damping / 5
                break
            damping *= 4
        else:
            break
        if better < 1e-8:
            break
    return constants


@dataclass(frozen=True, slots=True)
class Shown:
    """How far off rows are: the mean error, and the mean and the largest regret of choosing in each group."""

    error: float
    regret: float
    worst: float

    def __str__(self) -> str:
        return f"{self.error:10.1%} {self.regret:12.1%} {self.worst:13.1%}"


def shown(rows: Sequence[Sample], seconds: Sequence[float]) -> Shown:
    """Return the errors of predictions, and the regrets of choosing by them."""
    errors = [abs(ours / row.seconds - 1) for row, ours in zip(rows, seconds, strict=True)]
    by_row = dict(zip(map(id, rows), seconds, strict=True))
    regrets = regrets_of(rows, lambda sample: by_row[id(sample)])
    return Shown(fmean(errors), fmean(regrets), max(regrets))


def regrets_of(rows: Sequence[Sample], key: Callable[[Sample], object]) -> list[float]:
    """Return, for every group, how much longer the row with the least key takes than the best."""
    groups: dict[object, list[Sample]] = defaultdict(list)
    for row in rows:
        groups[row.group].append(row)
    return [
        min(group, key=key).seconds / min(sample.seconds for sample in group) - 1  # type: ignore[arg-type]
        for group in groups.values()
    ]


def trivial(sample: Sample) -> tuple[int, int]:
    """Return the key of the rule "least TP x PP, then the largest microbatch"."""
    return sample.layout.tensor * sample.layout.pipeline, -sample.layout.microbatch


def halves(rows: Sequence[Sample], seed: int) -> tuple[list[Sample], list[Sample]]:
    """Return the rows of a random half of the groups, and those of the other half."""
    groups = sorted({row.group for row in rows})
    first = set(random.Random(seed).sample(groups, len(groups) // 2))
    return [row for row in rows if row.group in first], [row for row in rows if row.group not in first]


def words(constants: Constants) -> str:
    """Return constants in a line."""
    product, memory, node, meet, host, meets, loss = (constants[name] for name in FREE)
    return f"{product:8.3f} {memory:7.3f} {node:6.3f} {meet * 1e6:8.1f} {host * 1e3:8.3f} {meets:6.3f} {loss:5.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--halves", type=int, default=5, metavar="N", help="random halves (default 5)")
    parser.add_argument("--cells", action="store_true", help="also fit without each (width, TP, microbatch)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = samples()
    triples, linear = additivity()
    print(
        f"{len(rows)} rows; {linear} of {triples} triples over microbatches are linear to 2 ns: sums, not measurements"
    )
    print(f"{'held-out half':22} {'mean error':>10} {'mean regret':>12} {'worst regret':>13}", end="")
    print(f"   {'product':>8} {'memory':>7} {'node':>6} {'meet us':>8} {'host ms':>8} {'meets':>6} {'loss':>5}   SC21")
    written: dict[str, object] = {"rows": len(rows), "triples": triples, "linear": linear}
    held: list[Shown] = []
    for seed in range(options.halves):
        given, kept = halves(rows, seed)
        constants = fit(given)
        held.append(shown(kept, predicted(constants, kept)))
        sc = fmean(abs(value) for value in published(constants))
        print(f"{f'half {seed}':22} {held[-1]}   {words(constants)} {sc:6.1%}")
    mean = Shown(fmean(item.error for item in held), fmean(i.regret for i in held), max(item.worst for item in held))
    print(f"{'all halves':22} {mean}")
    constants = fit(rows)
    sc = fmean(abs(value) for value in published(constants))
    print(f"{'fitted to all rows':22} {shown(rows, predicted(constants, rows))}   {words(constants)} {sc:6.1%}")
    ours = shown(rows, predicted(default(), rows))
    sc = fmean(abs(value) for value in published(default()))
    print(f"{'as in the code':22} {ours}   {words(default())} {sc:6.1%}")
    rule = regrets_of(rows, trivial)
    print(f"{'least TP x PP, largest':22} {'':10} {fmean(rule):12.1%} {max(rule):13.1%}")
    written |= {"held_out": [mean.error, mean.regret, mean.worst], "code": [ours.error, ours.regret, ours.worst]}
    if options.cells:
        errors = []
        for cell in sorted({row.cell for row in rows}):
            constants = fit([row for row in rows if row.cell != cell], steps=4)
            kept = [row for row in rows if row.cell == cell]
            miss = fmean(abs(a / b.seconds - 1) for a, b in zip(predicted(constants, kept), kept, strict=True))
            errors += [miss] * len(kept)
            print(f"without width {cell[0]}, TP {cell[1]}, microbatch {cell[2]}: {miss:.1%}")
        print(f"mean error of rows whose width, TP and microbatch were left out: {fmean(errors):.1%}")
        written["cells"] = fmean(errors)
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
