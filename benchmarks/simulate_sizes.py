"""How fast programs come from a recipe to the clock, how that grows, and one step of 16,384 ranks; processor time.

    python benchmarks/simulate_sizes.py [--json FILE] [--rounds N] [--most MILLIONS]

"to the clock" is `dl.generate` and `dl.simulate(...).makespan`, from nothing. "with causes" adds the cause of every
idle interval and every rank's memory. The Python form, "before", runs interleaved on the same counts. Growth is the
exponent of seconds over actions, fitted in their logarithms. Each size has a process of its own, which tells its
memory: the most it held, beyond the most it held before.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import drumline as dl
from drumline.core import memory
from drumline.core.clock import evaluate, producers
from drumline.core.kernel.library import kernel
from drumline.core.simulate import durations, walks
from drumline.core.timeline import causes
from drumline.report.draw.table import table
from drumline.report.replicas.measured import measured_spread
from drumline.report.replicas.picture import drawing
from drumline.report.replicas.step import replicas
from drumline.schedules import building_block, cells, hanayo
from measure import Timing, interleaved, machine

ASKING = (evaluate, producers, durations, memory, walks, causes, cells, building_block, hanayo)
# Schedule, ranks, microbatches.
WRITTEN = [
    *((name, 64, 1000) for name in ("1f1b", "zb-h1", "interleaved-1f1b", "zb-v", "v-half", "v-min", "hanayo")),
    *((name, 256, 256) for name in ("1f1b", "interleaved-1f1b", "zb-v")),
]
MILLIONS = (1, 3, 10, 30, 50)
TRACES = Path(__file__).parents[1] / "docs" / "traces"


def without_kernel(work: Callable[[], object]) -> Callable[[], object]:
    """Return a call that works as an installation without a kernel does."""

    def run() -> None:
        for module in ASKING:
            module.kernel = lambda: None  # type: ignore[attr-defined]
        try:
            work()
        finally:
            for module in ASKING:
                module.kernel = kernel  # type: ignore[attr-defined]

    return run


def to_clock(name: str, ranks: int, microbatches: int, *, causes: bool = False) -> int:
    """Return how many actions were generated and timed."""
    program = dl.generate(name, num_ranks=ranks, num_microbatches=microbatches)
    timeline = dl.simulate(program)
    _ = timeline.makespan
    if causes:
        _ = timeline.causes, timeline.peak_activations
    return program.num_actions


def measure_written(name: str, ranks: int, microbatches: int, rounds: int) -> dict[str, Any]:
    """Return millions of actions a second, with the kernel and without."""
    counts = name, ranks, microbatches
    actions = to_clock(*counts)
    contestants = {
        "to the clock": lambda: to_clock(*counts),
        "with causes": lambda: to_clock(*counts, causes=True),
        "before": without_kernel(lambda: to_clock(*counts)),
    }
    timings = interleaved(contestants, rounds=rounds, clock=time.process_time)
    ratios = zip(timings["before"].seconds, timings["to the clock"].seconds, strict=True)
    faster = Timing(tuple(before / now for before, now in ratios))
    rates = {way: actions / timing.median / 1e6 for way, timing in timings.items()}
    facts = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "actions": actions}
    return {**facts, **rates, "times_faster": faster.median, "spread": faster.spread}


def sizes(most: float) -> list[tuple[str, int, int, str]]:
    """Return schedule, ranks, microbatches and what grows."""
    chosen = [int(millions * 1e6) for millions in MILLIONS if millions <= most]
    return [
        *(("1f1b", 64, count // 128, "M at P = 64") for count in chosen),
        *(("1f1b", count // 512, 256, "P at M = 256") for count in chosen),
    ]


def one_size(name: str, ranks: int, microbatches: int) -> dict[str, Any]:
    """Return seconds and bytes of one size, in a process of its own."""
    command = [sys.executable, __file__, "--size", name, str(ranks), str(microbatches)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def timed_size(name: str, ranks: int, microbatches: int) -> None:
    """Print what one size takes; the first run of a small program loads the library."""
    assert kernel() is not None, "there is no kernel"
    to_clock(name, 2, 2)
    before, begun = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    actions = to_clock(name, ranks, microbatches)
    seconds = time.process_time() - begun
    size = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    print(json.dumps({"actions": actions, "seconds": seconds, "bytes": size}))


def measure_growth(rounds: int, most: float) -> list[dict[str, Any]]:
    """Return the sizes, the fastest of a few runs for each, and the exponent fitted to those of a kind."""
    rows: list[dict[str, Any]] = []
    for name, ranks, microbatches, grows in sizes(most):
        each = [one_size(name, ranks, microbatches) for _ in range(rounds)]
        rows.append({"grows": grows, "ranks": ranks, "microbatches": microbatches} | min(each, key=_seconds))
    for grows in dict.fromkeys(row["grows"] for row in rows):
        kind = [row for row in rows if row["grows"] == grows]
        actions, seconds = (np.log([row[name] for row in kind]) for name in ("actions", "seconds"))
        slope = np.cov(actions, seconds)[0, 1] / np.var(actions, ddof=1)
        for row in kind:
            row["exponent"] = float(slope)
    return rows


def _seconds(row: dict[str, Any]) -> float:
    return float(row["seconds"])


def measure_replicas() -> list[dict[str, Any]]:
    """Return what a step of 16,384 ranks takes, with its picture."""
    rows = []
    for name in ("1f1b", "zb-v"):
        begun = time.process_time()
        program = dl.generate(name, num_ranks=256, num_microbatches=256)
        spread = measured_spread(TRACES / name, links=0.3)
        step = replicas(program, dl.Costs(comm=0.05, reduce=20.0), num_replicas=64, spread=spread)
        size = len(drawing(step))
        rows.append({**step.summary(), "seconds": time.process_time() - begun, "picture": size})
        del rows[-1]["replica_makespans"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=50, help="millions of actions (default 50)")
    parser.add_argument("--size", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.size:
        timed_size(args.size[0], *map(int, args.size[1:]))
        return
    assert kernel() is not None, "there is no kernel"
    print(f"{machine()}; processor time, medians of {args.rounds} interleaved rounds\n")
    written = [measure_written(*case, rounds=args.rounds) for case in WRITTEN]
    head = ["million actions/s", "before", "to the clock", "with causes", "x", ""]
    rows = [
        [
            f"{row['schedule']} P{row['ranks']} M{row['microbatches']}",
            *(f"{row[way]:.2f}" for way in ("before", "to the clock", "with causes")),
            f"{row['times_faster']:.0f}",
            f"±{row['spread']:.0%}",
        ]
        for row in written
    ]
    print(table(head, rows), "\n")
    growth = measure_growth(max(2, args.rounds // 2), args.most)
    rows = [
        [
            f"1f1b P{row['ranks']} M{row['microbatches']}",
            str(row["actions"]),
            f"{row['seconds']:.3f}",
            f"{row['actions'] / row['seconds'] / 1e6:.1f}",
            f"{row['bytes'] / row['actions']:.0f}",
            f"{row['grows']}: {row['exponent']:.3f}",
        ]
        for row in growth
    ]
    print(table(["", "actions", "s", "M/s", "bytes/action", "exponent"], rows), "\n")
    steps = measure_replicas()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rows = [
        [
            f"{row['schedule']} 64 x P256 M256",
            str(row["actions"]),
            f"{row['seconds']:.2f}",
            f"{row['bubble']:.1%}",
        ]
        for row in steps
    ]
    print(table(["", "actions", "s", "bubble"], rows))
    for row in steps:
        shares = ", ".join(f"{reason} {share:.1%}" for reason, share in row["idle_shares"].items())
        print(f"idle in {row['schedule']}: {shares}")
        link = row["slowest_link"]
        print(f"slowest link of {row['schedule']}: {link['source']}->{link['target']} of replica {link['replica']}")
    print(f"most memory of this process: {peak:.0f} MiB")
    if args.json:
        report = {"machine": machine(), "written": written, "growth": growth, "replicas": steps, "peak_mib": peak}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
