"""How fast programs become proven arrays: from the text form, from rows of actions, and when they are arrays already.

    python benchmarks/simulate_proof.py [--rounds N]

`benchmarks/simulate.py` prints the same. Processor time; a program that is read or proven is new in every round.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import drumline as dl
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.report.draw.table import table
from measure import interleaved, machine

# Schedule, ranks, microbatches.
CASES = [("1f1b", 64, 2000), ("zb-v", 32, 2000), ("chimera", 32, 4000), ("dualpipe", 32, 4000)]


def contestants(program: Program) -> dict[str, tuple[Callable[[], object], int]]:
    """Return what is timed, each with the number of its actions."""
    lowered = lower(Program.of_columns(program.columns))
    text, rows, columns, spelled = program.format(), program.rows, program.columns, lowered.columns

    def proven(made: Program) -> None:
        assert dl.validate(made) == []

    actions = program.num_actions
    return {
        "validate": (lambda: proven(Program.of_columns(columns)), actions),
        "validate, with messages": (lambda: proven(Program.of_columns(spelled)), lowered.num_actions),
        "lower": (lambda: lower(Program.of_columns(columns)), lowered.num_actions),
        "read CSV and validate": (lambda: proven(Program.parse(text)), actions),
        "rows to the clock": (lambda: dl.simulate(Program(rows)).makespan, actions),
    }


def measure(rounds: int) -> list[list[str]]:
    """Return a row per program with million actions per second."""
    rows = []
    for name, ranks, microbatches in CASES:
        program = dl.generate(name, num_ranks=ranks, num_microbatches=microbatches)
        timed = contestants(program)
        works = {way: work for way, (work, _) in timed.items()}
        timings = interleaved(works, rounds=rounds, clock=time.process_time)
        rates = [f"{timed[way][1] / timings[way].median / 1e6:.1f} ±{timings[way].spread:.0%}" for way in works]
        rows.append([f"{name} P{ranks} M{microbatches}", f"{program.num_actions}", *rates])
    return rows


HEADER = ["", "actions", "validate", "with messages", "lower", "read CSV and validate", "rows to the clock"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    print(f"{machine()}; million actions a second, processor time, medians of {args.rounds} interleaved rounds\n")
    print(table(HEADER, measure(args.rounds)))


if __name__ == "__main__":
    main()
