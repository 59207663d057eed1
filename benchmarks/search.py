"""The search beside what was published, and beside proven optima.

    python benchmarks/search.py [--json FILE] [--optima N] [--tried]

The first table has the rows of the zero-bubble paper (arXiv 2401.10241): costs of its table 9, rates of tables 5 and 8,
within its byte limits. "gap" is how far the result is at most from the best possible; 0 is a proof. The second counts
programs tried in ten seconds where no bound ends the search: uneven stages with little memory. The third counts,
over instances drawn at random, how often the search finds the optimum that CP-SAT has proven (`search_oracle.py`).
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import drumline as dl
from drumline.core.timeline.idle import Limit
from drumline.plan.search.search import search
from drumline.report.draw.table import table
from measure import machine
from search_instances import drawn
from search_oracle import OPTIMA

# P, M, F, I, W, c, h, a; the published rates within kP(34h + 5as) bytes, k = 1 and 2, with s = 1024.
LINEAR: list[tuple[float, ...]] = [
    (8, 24, 18.522, 18.086, 9.337, 0.601, 2304, 24, 0.1585, 0.0433),
    (8, 64, 18.546, 18.097, 9.321, 0.762, 2304, 24, 0.0674, 0.0026),
    (8, 24, 29.718, 29.444, 19.927, 0.527, 4096, 32, 0.1323, 0.0029),
    (16, 48, 11.347, 11.248, 8.132, 0.377, 5120, 40, 0.1397, 0.0066),
    (32, 96, 10.419, 10.207, 7.715, 0.408, 6144, 48, 0.1421, 0.0038),
    (32, 256, 10.402, 10.248, 7.698, 0.460, 6144, 48, 0.0594, 0.0018),
]
V: list[tuple[float, ...]] = [
    (16, 48, 14407, 14380, 9676, 1610, 4096, 32, 0.0697),
    (16, 128, 14316, 14306, 9639, 1619, 4096, 32, 0.0274),
    (32, 96, 9458, 9748, 7288, 879, 6144, 48, 0.0593),
]


def published(row: tuple[float, ...], k: int, placement: dl.Placement, rate: float) -> dict[str, Any]:
    """Return what the search finds for one published row."""
    num_ranks, num_microbatches = int(row[0]), int(row[1])
    f, i, w, c, h, a = row[2:8]
    full = 34 * h + 5 * a * 1024
    found = search(
        dl.Costs(f, i, w, comm=c, activation_bytes=full, held_until_weight_bytes=32 * h),
        placement,
        num_microbatches=num_microbatches,
        limit=Limit(max_bytes=k * num_ranks * full),
        objective="span",
        seconds=10.0 if num_ranks <= 16 else 60.0,
    )
    return {
        "placement": placement.name,
        "ranks": num_ranks,
        "microbatches": num_microbatches,
        "k": k,
        "published": rate,
        "ours": found.timeline.span_bubble,
        "gap": found.gap,
        "best_start": found.starts[0].name,
        "seconds": found.seconds,
        "reached": round(found.timeline.span_bubble, 4) <= rate,
    }


def tried(num_ranks: int, num_microbatches: int, seconds: float = 10.0) -> dict[str, Any]:
    """Return how many programs a search tries, and the processor seconds that it takes."""
    uneven = [1 + 0.1 * (7 * rank % 5) for rank in range(num_ranks)]
    began = time.process_time()
    found = search(
        dl.Costs(forward=uneven, backward_input=uneven, comm=0.1),
        dl.Placement.linear(num_ranks),
        num_microbatches=num_microbatches,
        limit=Limit(max_activations=num_ranks * 3 // 4),
        seconds=seconds,
    )
    took = time.process_time() - began
    return {
        "ranks": num_ranks,
        "microbatches": num_microbatches,
        "tried": found.num_tried,
        "seconds": found.seconds,
        "processor_seconds": took,
        "per_second": found.num_tried / took,
        "value": found.value,
        "gap": found.gap,
    }


def against_oracle(count: int) -> dict[str, Any]:
    """Return how often the search finds the optimum, and how far it is at most from it."""
    optima = json.loads(OPTIMA.read_text(encoding="utf-8"))["makespan"]
    over, seconds, closed = [], 0.0, 0
    for seed in list(optima)[:count]:
        instance = drawn(int(seed))
        found = search(
            instance.costs,
            instance.placement,
            num_microbatches=instance.num_microbatches,
            limit=instance.limit,
            seconds=4.0,
        )
        over.append(max(0.0, found.value / optima[seed] - 1))
        seconds += found.seconds
        closed += found.gap <= 1e-9
    return {
        "instances": len(over),
        "optimal": sum(value <= 1e-9 for value in over),
        "proven_by_the_bound": closed,
        "worst": max(over),
        "mean_seconds": seconds / len(over),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--optima", type=int, default=200, help="how many instances to hold against proven optima")
    parser.add_argument("--tried", action="store_true", help="only count the programs that are tried")
    args = parser.parse_args()
    print(f"{machine()}; at most 10 s, on 32 ranks 60 s\n")
    many = [tried(*counts) for counts in ((8, 24), (16, 48), (32, 96), (64, 64), (64, 256))]
    names = ("tried", "per_second", "value")
    rows = [
        [f"linear P{each['ranks']} M{each['microbatches']}", *(f"{each[name]:,.0f}" for name in names)] for each in many
    ]
    print(table(["uneven stages", "tried", "per processor second", "makespan"], rows) + "\n")
    if args.tried:
        return
    jobs = [(row, k, dl.Placement.linear(int(row[0])), row[7 + k]) for k in (1, 2) for row in LINEAR]
    jobs += [(row, 2, dl.Placement.v(int(row[0])), row[8]) for row in V]
    results = [published(*job) for job in jobs]
    rows = [
        [
            f"{result['placement']} P{result['ranks']} M{result['microbatches']} k{result['k']}",
            f"{result['published']:.4f}",
            f"{result['ours']:.4f}",
            f"{result['ours'] / result['published']:.3f}",
            f"{result['gap']:.2%}",
            f"{result['seconds']:.1f}",
            "" if result["reached"] else "WORSE",
        ]
        for result in results
    ]
    print(table(["span bubble", "published", "ours", "ratio", "gap", "seconds", ""], rows))
    oracle = against_oracle(args.optima) if args.optima else None
    if oracle is not None:
        print(
            f"\n{oracle['optimal']} of {oracle['instances']} optima found, {oracle['proven_by_the_bound']} of them"
            f" proven by the bound alone; at worst {oracle['worst']:.2%} above; {oracle['mean_seconds']:.2f} s each"
        )
    if args.json:
        report = {"machine": machine(), "tried": many, "published": results, "oracle": oracle}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")


if __name__ == "__main__":
    main()
