"""Rows that were given to us as measured and are not: small GPT models on one node of A100s. No constant is from them.

    python benchmarks/one_node.py

`data/one_node_a100.csv` holds 788 iteration times of GPT models with fp16 and 1F1B in Megatron-LM of 2021-22, from the
repository of a public simulator, which calls them measured. They cannot be measurements of whole iterations. In every
series they are linear in the number of microbatches to the nanosecond, and another number of data-parallel ranks adds
the same nanoseconds whatever else changes (`additivity`). They are sums of pieces. Until November 2026 they gave half
of the fit, and bent it: 128 bytes that the loss passes over per logit, where counting gives 52.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from decimal import Decimal
from itertools import pairwise
from pathlib import Path

DATA = Path(__file__).parent / "data" / "one_node_a100.csv"


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


def main() -> None:
    triples, linear = additivity()
    print(f"{linear} of {triples} triples over microbatches are linear to 2 ns: sums, not measurements")


if __name__ == "__main__":
    main()
