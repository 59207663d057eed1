"""Steps that were published against what the cluster model says of them, every row.

    python benchmarks/published.py [--exact] [--fit] [--found] [--json FILE]

The A100's constants are from the ten rows of Megatron-LM's SC'21 paper. `--fit` takes them from there once more: the
three of them that are free, by least squares of the relative errors. The rows of the second table were not used for
anything. Beside the estimate stands what one constant rate per device would give: the best one for the SC'21 rows, and
the best one that there is for the rows of the table itself. `--exact` simulates every microbatch where otherwise a
formula does.

The estimates of a table take for each paper what its software did (`Practice`). Below the tables stands how far off
they are if one practice is taken for all twelve rows of the second: that is what to expect of software that nobody
looked into.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drumline.plan.cluster.estimate import Estimate, estimate
from drumline.plan.cluster.hardware import MACHINES, NODE_REACH, REACH, cluster
from published_compared import (
    best_constant,
    compared,
    errors_of,
    practice_errors,
    practices_table,
    table,
)
from published_left_out import table as left_out_table
from published_rows import found_table, reserved_table
from published_runs import Run, fp8, held_out, holdings, llama3, sc21, sc21_scaling, sc21_sharded

START = (0.7, 0.7, 0.7)


def squares(runs: Sequence[Run], constants: Sequence[float]) -> float:
    """Return the sum of squares of log(estimated / published) for (product, memory, node)."""
    found = 0.0
    for run in runs:
        found += math.log(_estimated(run, constants, rough=True).seconds.total / run.seconds) ** 2
    return found


def fit(runs: Sequence[Run]) -> tuple[list[float], float]:
    """Return the constants with the least squares, by steps along each and along each pair, ever smaller."""
    best, step = list(START), 0.08
    least = squares(runs, best)
    moves = [(a, b, c) for a in (-1, 0, 1) for b in (-1, 0, 1) for c in (-1, 0, 1) if (a, b, c) != (0, 0, 0)]
    while step > 0.0002:
        tried = [[old + step * by for old, by in zip(best, move, strict=True)] for move in moves]
        found = [(squares(runs, row), row) for row in tried if all(0.3 <= value <= 1 for value in row)]
        lower, row = min(found)
        if lower < least:
            least, best = lower, row
        else:
            step /= 2
    return best, math.sqrt(least / len(runs))


def _estimated(run: Run, constants: Sequence[float], *, rough: bool = False) -> Estimate:
    machine = MACHINES[run.hardware]
    reach = replace(machine.device.reach, product=constants[0], memory=constants[1])
    tried = replace(machine, device=replace(machine.device, reach=reach), node_reach=constants[2])
    return estimate(run.transformer, tried.cluster(run.layout.num_devices), run.layout, rough=rough)


def held() -> list[tuple[str, float, float, float, float]]:
    """Return GiB that arXiv 2205.05198 computes, each beside ours: weights with optimizer, and activations."""
    rows = []
    for holding in holdings():
        size = estimate(holding.transformer, cluster("a100-80", holding.layout.num_devices), holding.layout).bytes
        weights = (size.weights + size.gradients + size.optimizer) / 2**30
        rows.append((holding.name, holding.weights, weights, holding.activations, size.activations / 2**30))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--exact", action="store_true", help="simulate every microbatch")
    parser.add_argument("--fit", action="store_true", help="take the three free constants from the SC'21 rows again")
    parser.add_argument("--found", action="store_true", help="also rows of 2023 and later, and each source left out")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    written: dict[str, object] = {}
    if options.fit:
        constants, rest = fit(sc21())
        print(
            f"least squares: product {constants[0]:.3f}, memory {constants[1]:.3f}, node {constants[2]:.3f};", end=" "
        )
        print(f"root mean square error {rest:.2%}")
        print(f"in the code:   product {REACH.product}, memory {REACH.memory}, node {NODE_REACH}\n")
        written["fit"] = {"product": constants[0], "memory": constants[1], "node": constants[2], "error": rest}
    for title, runs in (
        ("The constants come from these rows", sc21()),
        ("No constant comes from these rows", held_out()),
        ("Found when all was settled", sc21_scaling()),
        ("The same with sharded weights, where the model fails", sc21_sharded()),
        ("H100: one constant comes from these rows and others", llama3()),
        ("FP8: a share of NeMo 24.07 and one of 25.09 come from these rows", fp8()),
    ):
        print(f"{title}\n\n{table(runs, exact=options.exact)}\n")
        rows = compared(runs, (best_constant(sc21()), best_constant(runs)), exact=options.exact)
        mean, worst = errors_of(rows)
        written[title] = {"rows": [row.to_json() for row in rows], "mean": mean, "worst": worst}
    print(f"The twelve rows that gave no constant\n\n{practices_table(held_out(), exact=options.exact)}\n")
    written["practices"] = practice_errors(held_out(), exact=options.exact)
    if options.found:
        print(f"Rows of 2023 and later that gave no constant\n\n{found_table()}\n")
        print(f"The same with experts\n\n{found_table('experts')}\n")
        print(f"Each source left out\n\n{left_out_table()}\n")
        print(f"Memory that torchtitan reserved, GiB\n\n{reserved_table()}\n")
    print("GiB of a device, arXiv 2205.05198 and ours\n")
    for name, weights, ours, kept, our_kept in held():
        print(f"{name:16} weights {weights:6.2f} {ours:6.2f}   activations {kept:6.2f} {our_kept:6.2f}")
    written["held"] = held()
    if options.json:
        options.json.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
