"""`drumline demo`: a short tour, from one schedule to the choice among all of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from drumline.cli import flags
from drumline.cli.output import colour_wanted, print_json, save, terminal_width, wrapped

TOUR = (
    ("gpipe", "all forwards, then all backwards. Every microbatch is stashed."),
    ("1f1b", "backwards as soon as they can. The same time, a fraction of the stash."),
    ("zb-h1", "the backward split in two. Weight gradients (W) fill the drain."),
    ("zb-v", "two stages per rank, down and up again. No rank waits between its first and last action."),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    flags.add_counts(parser)
    flags.add_json(parser)
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write the comparison as a page there")


def run(args: argparse.Namespace) -> int:
    """Draw four schedules, then compare all."""
    from drumline.core.costs import Costs
    from drumline.core.simulate import simulate
    from drumline.report.advice import advise
    from drumline.report.compare import compare, compare_table
    from drumline.report.grid import grid
    from drumline.schedules import find

    ranks = 4 if args.ranks is None else args.ranks
    microbatches = 8 if args.microbatches is None else args.microbatches
    programs = {name: find(name).build(ranks, microbatches) for name, _ in TOUR}
    rows = compare(ranks, num_microbatches=microbatches, stages_per_rank=args.stages_per_rank)
    if args.out is not None:
        from drumline.report.compare_page import compare_page

        save(args.out, compare_page(rows, num_ranks=ranks, num_microbatches=microbatches))
    if args.json:
        written = {"out": str(args.out)} if args.out is not None else {}
        print_json({"rows": [row.summary() for row in rows], "advice": advise(rows), **written})
        return 0
    width = terminal_width()
    print(f"One model on {ranks} ranks, {microbatches} microbatches. F forward, B backward, I and W its two halves.\n")
    for name, what in TOUR:
        per_stage = 1 / find(name).stages_per_rank
        costs = Costs(forward=per_stage, backward_input=per_stage, backward_weight=per_stage)
        timeline = simulate(programs[name], costs)
        print(f"{name}: {what}")
        print(grid(timeline, width=width, colour=colour_wanted()))
        print(f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}\n")
    print("All schedules, best first:\n")
    print(compare_table(rows, width=width))
    print("\n" + wrapped(advise(rows), width))
    if args.out is not None:
        print(f"\nThe same as a page that explains every box and every gap: {args.out}")
    print("\nNext: drumline show zb-v --ranks 4 --microbatches 8, or drumline explore")
    return 0
