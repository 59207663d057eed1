"""The best programs for a frozen base with adapters: F = I, and W nothing or 2% of F.

    python benchmarks/frozen_schedules.py [--ranks 2 4] [--microbatches 4 8] [--update]

Every figure is the time of a step over the work of one rank: 1 is a step without idle time, the number of ranks one
rank at a time. All schedules cut the same model, and searched programs hold no more than 1f1b: P microbatches on every
rank. A star says that a figure is proven: it equals a lower bound for its number of stages per rank. Otherwise the
bound follows. `--update` writes the table into docs/frozen-bases.md.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from drumline.core.costs import Costs, cut_finer
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.prove.whole import join
from drumline.core.simulate.simulate import simulate
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds.instance import Instance
from drumline.plan.search.bounds.lower_bounds import lower_bound
from drumline.plan.search.search import search
from drumline.schedules import generate

RANKS, MICROBATCHES = tuple(range(2, 9)), (4, 8, 16, 32)
SMALL = 0.02  # W of adapters, as a share of F
FINER = (2, 4)  # stages per rank
PAGE = Path(__file__).resolve().parent.parent / "docs" / "frozen-bases.md"
HEADER = ("P", "M", "naive", "1f1b", "interleaved x2", "x4", "best x2", "x4", "1f1b", "best x2", "x4", "x4 whole")
_TRIES = 3000
_SAME = 1e-9


@dataclass(frozen=True)
class Best:
    """The best program found for some stages per rank, what it and its form with whole backwards take, and a bound."""

    program: Program
    seconds: float
    whole_seconds: float
    bound: float

    @property
    def is_proven(self) -> bool:
        """Whether no program is shorter."""
        return self.seconds <= self.bound * (1 + _SAME)


def costs_of(weight: float, stages_per_rank: int = 1) -> Costs:
    """Return the costs of a stage of a frozen base: a microbatch takes a rank 1 forward, 1 backward, and W."""
    return cut_finer(Costs(backward_weight=weight), stages_per_rank)


def named(name: str, num_ranks: int, num_microbatches: int, weight: float, stages_per_rank: int = 1) -> float:
    """Return what a step by a schedule takes, with whole backwards."""
    program = generate(name, num_ranks=num_ranks, num_microbatches=num_microbatches, stages_per_rank=stages_per_rank)
    return float(simulate(program, costs_of(weight, stages_per_rank)).makespan)


def best(num_ranks: int, num_microbatches: int, weight: float, stages_per_rank: int) -> Best:
    """Return the best program found in the memory of 1f1b, on a V or a loop of stages.

    Where no program found for this W is proven, one that was found for the other W may be better.
    """
    costs, limit = costs_of(weight, stages_per_rank), Limit(max_activations=num_ranks * stages_per_rank)
    makers = (Placement.v, Placement.loop)
    placements = [maker(num_ranks, stages_per_rank=stages_per_rank) for maker in makers]
    bounds = [lower_bound(Instance(costs, placement, num_microbatches, limit)).value for placement in placements]
    least, results = min(bounds), list[tuple[float, Program]]()
    for other in (weight, SMALL - weight):
        for placement, bound in sorted(zip(placements, bounds, strict=True), key=lambda pair: pair[1]):
            if results and bound >= min(value for value, _ in results) * (1 - _SAME):
                continue
            searched = costs_of(other, stages_per_rank)
            found = search(searched, placement, num_microbatches=num_microbatches, limit=limit, tries=_TRIES).program
            results.append((float(simulate(found, costs).makespan), found))
    seconds, program = min(results, key=lambda pair: pair[0])
    whole = join(program, [True] * program.num_stages)
    return Best(program, seconds, float(simulate(whole, costs).makespan), float(least))


def row_of(num_ranks: int, num_microbatches: int) -> list[str]:
    """Return a line of the table: no W on the left, a small one on the right."""
    counts = num_ranks, num_microbatches
    works = {weight: num_microbatches * (2 + weight) for weight in (0.0, SMALL)}

    def share(seconds: float, weight: float) -> str:
        return f"{seconds / works[weight]:.3f}"

    def told(found: Best, weight: float) -> str:
        bound = "*" if found.is_proven else f" ({share(found.bound, weight)})"
        return share(found.seconds, weight) + bound

    free, short = ([best(*counts, weight, finer) for finer in FINER] for weight in (0.0, SMALL))
    return [
        str(num_ranks),
        str(num_microbatches),
        share(named("naive", *counts, 0.0), 0.0),
        share(named("1f1b", *counts, 0.0), 0.0),
        *(share(named("interleaved-1f1b", *counts, 0.0, finer), 0.0) for finer in FINER),
        *(told(found, 0.0) for found in free),
        share(named("1f1b", *counts, SMALL), SMALL),
        *(told(found, SMALL) for found in short),
        share(short[-1].whole_seconds, SMALL),
    ]


def lines_of(ranks: Sequence[int], microbatches: Sequence[int]) -> Iterator[str]:
    """Yield the table as lines of Markdown."""
    yield "| " + " | ".join(HEADER) + " |"
    yield "|" + "---:|" * len(HEADER)
    for num_ranks in ranks:
        for num_microbatches in microbatches:
            yield "| " + " | ".join(row_of(num_ranks, num_microbatches)) + " |"


def main() -> None:
    """Print the table, or write it into its page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--microbatches", type=int, nargs="+", default=MICROBATCHES)
    parser.add_argument("--update", action="store_true", help="write the table into docs/frozen-bases.md")
    given = parser.parse_args()
    lines = []
    for line in lines_of(given.ranks, given.microbatches):
        print(line, flush=True)
        lines.append(line)
    if given.update:
        text = PAGE.read_text(encoding="utf-8")
        head = re.escape(lines[0])
        changed, count = re.subn(rf"{head}\n(?:\|.*\n)*", lambda _: "\n".join(lines) + "\n", text)
        if count != 1:
            sys.exit(f"{PAGE.name} has {count} tables with this header; expected one")
        PAGE.write_text(changed, encoding="utf-8")


if __name__ == "__main__":
    main()
