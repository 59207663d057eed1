"""How fast the simulator is, beside PyTorch's own dry run of the same program.

    python benchmarks/simulate.py [--json FILE] [--rounds N]

"times alone" starts from the program's rows, compiling included; "new costs" reuses the compiled form, as a search
does; "with attribution and memory" adds the cause of every idle interval and every rank's memory.

The clock is timed by itself, too: the compiled kernel beside the Python form, in processor time, with the graph, the
seconds and the lags given. `benchmarks/before_after.py` compares with an earlier state of the tree.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import drumline as dl
import simulate_proof
from drumline.core.action import TIMED_OPS
from drumline.core.clock import evaluate as clock
from drumline.core.kernel.library import kernel
from drumline.core.program import Program
from drumline.core.simulate.durations import lags, node_seconds, work_seconds
from drumline.core.simulate.simulate import compiled
from drumline.report.draw.table import table
from measure import Timing, interleaved, machine

CASES = [
    ("1f1b", 8, 256, None),
    ("1f1b", 8, 4000, None),
    ("1f1b", 32, 1000, None),
    ("zb-h1", 8, 3000, None),
    ("zb-v", 8, 1500, None),
]
COSTS = dl.Costs()
OTHER = dl.Costs(forward=1.0, backward_input=1.1, backward_weight=0.8)
LATENCY = dl.Costs(comm=0.1)
SAMPLES = 256
# Schedule, ranks, microbatches: 64,000 actions each, or a little more.
CLOCKED = [("1f1b", 8, 4000), ("1f1b", 32, 1000), ("zb-h1", 8, 3000), ("zb-v", 8, 1500)]


def torch_dry_run(program: Program) -> Any | None:
    """Return a call that runs torch's `_simulate_comms_compute` on the program, or None where torch is not there."""
    try:
        from torch.distributed.pipelining import schedules
    except ImportError:
        return None
    logging.getLogger("torch.distributed.pipelining").setLevel(logging.ERROR)
    # Its dry run takes a receive for blocking, so it refuses receives that are posted ahead: let torch add its own.
    homes = program.placement.homes
    plain = {rank: [schedules._Action.from_str(str(action)) for action in row] for rank, row in enumerate(program.rows)}
    rows = schedules._add_send_recv(plain, lambda stage: homes[stage], program.num_stages)
    return lambda: schedules._simulate_comms_compute(rows, lambda stage: homes[stage], program.num_stages)


def cold(program: Program, costs: dl.Costs = COSTS) -> dl.Timeline:
    """Simulate from the rows alone, nothing kept from before."""
    fresh = Program(program.rows, program.name)
    timeline = dl.simulate(fresh, costs)
    _ = timeline.makespan
    return timeline


def full(program: Program) -> None:
    """Simulate, attribute every idle interval, and follow the memory."""
    timeline = cold(program)
    _ = timeline.causes, timeline.peak_activations


def measure(name: str, ranks: int, microbatches: int, stages: int | None, rounds: int) -> dict[str, Any]:
    """Return actions per second of every way, and the ratio to the peer."""
    program = dl.generate(name, num_ranks=ranks, num_microbatches=microbatches, stages_per_rank=stages)
    actions = sum(action.op in TIMED_OPS for row in program.rows for action in row)
    contestants: dict[str, Any] = {
        "times alone": lambda: cold(program),
        "times alone, with latency": lambda: cold(program, LATENCY),
        "new costs": lambda: dl.simulate(program, OTHER).makespan,
        "with attribution and memory": lambda: full(program),
    }
    # The peer pops from the front of lists, so its cost grows faster than the program: only the small case.
    peer = torch_dry_run(program) if actions <= 5000 else None
    if peer is not None:
        contestants["torch _simulate_comms_compute"] = peer
    timings = interleaved(contestants, rounds=rounds)
    result: dict[str, Any] = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "actions": actions}
    result["actions_per_second"] = {way: actions / timing.median for way, timing in timings.items()}
    result["spread"] = {way: timing.spread for way, timing in timings.items()}
    if peer is not None:
        ours, theirs = timings["times alone"].median, timings["torch _simulate_comms_compute"].median
        result["torch_over_ours"] = theirs / ours
    return result


def repeated(work: Callable[[], object], times: int) -> Callable[[], object]:
    """Return a call that works so many times: what takes a fraction of a millisecond is timed in bulk."""

    def many() -> None:
        for _ in range(times):
            work()

    return many


def in_python(work: Callable[[], object]) -> Callable[[], object]:
    """Return a call that works as an installation without a kernel does."""

    def without() -> None:
        clock.kernel = lambda: None  # type: ignore[attr-defined]
        try:
            work()
        finally:
            clock.kernel = kernel  # type: ignore[attr-defined]

    return without


def clocked(name: str, ranks: int, microbatches: int, costs: dl.Costs) -> dict[str, tuple[Callable[[], object], int]]:
    """Return what both forms of the clock are timed at, and how often the kernel does it in a round."""
    program = dl.generate(name, num_ranks=ranks, num_microbatches=microbatches)
    graph = compiled(program, costs)
    jitter = np.random.default_rng(0).lognormal(0.0, 0.1, (len(graph.node), 32))
    work = work_seconds(graph, [costs])
    seconds = node_seconds(graph, costs, work[:, 0] * jitter[:, 0])
    many = node_seconds(graph, costs, work * jitter)
    late = lags(graph, [costs], seconds[:, None])
    lag = None if late is None else late[:, 0]
    return {
        "evaluate": (lambda: clock.evaluate(graph, seconds, lag), 50),
        "simulate(program, costs).makespan": (lambda: dl.simulate(program, costs).makespan, 20),
        "32 samples": (lambda: clock.latest_ends(clock.order_of(graph), many, lag=late), 2),
    }


def measure_clock(name: str, ranks: int, microbatches: int, rounds: int) -> list[dict[str, Any]]:
    """Return how many times faster the kernel is than the Python form, in processor time."""
    results = []
    for costs in (OTHER, LATENCY):
        for way, (work, times) in clocked(name, ranks, microbatches, costs).items():
            contestants = {"kernel": repeated(work, times), "Python": in_python(work)}
            timings = interleaved(contestants, rounds=rounds, clock=time.process_time)
            pairs = zip(timings["Python"].seconds, timings["kernel"].seconds, strict=True)
            ratios = Timing(tuple(python / compiled * times for python, compiled in pairs))
            seconds = timings["kernel"].median / times
            facts = {"schedule": name, "ranks": ranks, "microbatches": microbatches, "latency": costs.comm, "way": way}
            results.append({**facts, "seconds": seconds, "times_faster": ratios.median, "spread": ratios.spread})
    return results


def measure_samples(rounds: int) -> dict[str, Any]:
    """Return how much faster many cost samples at once are than one by one."""
    program = dl.generate("zb-h1", num_ranks=8, num_microbatches=32)
    rng = np.random.default_rng(0)
    factors = rng.uniform(0.9, 1.1, (SAMPLES, program.num_actions))
    many = [dl.Costs(*rng.uniform(0.9, 1.1, 3).tolist()) for _ in range(SAMPLES)]
    timings = interleaved(
        {
            "one by one": lambda: [dl.simulate(program, costs).makespan for costs in many],
            "all at once, costs": lambda: dl.makespans(program, many),
            "all at once, jitter": lambda: dl.makespans(program, COSTS, factors=factors),
        },
        rounds=rounds,
    )
    alone = timings["one by one"].median
    return {
        "samples": SAMPLES,
        "actions": program.num_actions,
        "times_faster": {way: alone / timing.median for way, timing in timings.items()},
        "spread": {way: timing.spread for way, timing in timings.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"{machine()}; medians of {args.rounds} interleaved rounds, ± half the distance between the quartiles\n")
    clocks = [result for case in CLOCKED for result in measure_clock(*case, rounds=args.rounds)] if kernel() else []
    print("the kernel beside the Python form, processor time; the kernel's milliseconds, and how many times faster")
    rows = [
        [
            f"{each['schedule']} P{each['ranks']} M{each['microbatches']}{', latency' if each['latency'] else ''}",
            each["way"],
            f"{each['seconds'] * 1e3:.2f}",
            f"{each['times_faster']:.0f}",
            f"±{each['spread']:.0%}",
        ]
        for each in clocks
    ]
    print(table(["", "", "ms", "x", ""], rows) if rows else "there is no kernel", "\n")
    results = []
    for case in CASES:
        results.append(measure(*case, rounds=args.rounds))
        latest = results[-1]
        print(f"{latest['schedule']} P{latest['ranks']} M{latest['microbatches']}: {latest['actions']} actions")
        rows = [
            [way, f"{rate / 1e3:.0f}k", f"±{latest['spread'][way]:.0%}"]
            for way, rate in latest["actions_per_second"].items()
        ]
        print(table(["", "actions/s", ""], rows))
        if "torch_over_ours" in latest:
            print(f"torch takes {latest['torch_over_ours']:.1f} times as long as ours")
        print()
    samples = measure_samples(max(3, args.rounds // 3))
    print(f"{samples['samples']} cost samples of zb-h1 P8 M32 ({samples['actions']} actions), times faster than apart:")
    print(
        table(
            ["", "x", ""], [[w, f"{x:.1f}", f"±{samples['spread'][w]:.0%}"] for w, x in samples["times_faster"].items()]
        )
    )
    print("\nproof, text and rows: million actions a second, processor time")
    proof = simulate_proof.measure(max(3, args.rounds // 2))
    print(table(simulate_proof.HEADER, proof))
    if args.json:
        report = {"machine": machine(), "clock": clocks, "cases": results, "samples": samples}
        args.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(f"\nwrote {args.json}")


if __name__ == "__main__":
    main()
