"""`drumline compare`: all schedules for one model on given ranks, best first."""

from __future__ import annotations

import argparse
from pathlib import Path

from drumline.cli import flags
from drumline.cli.output import progress, report, save, terminal_width, wrapped
from drumline.core.errors import ScheduleError, UsageError
from drumline.report.compare import compare, compare_page, compare_table, left_out_text, recommend


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    flags.add_counts(parser)
    flags.add_frozen(parser)
    flags.add_costs(parser)
    flags.add_limit(parser)
    flags.add_json(parser)
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="write the side-by-side page there")


def run(args: argparse.Namespace) -> int:
    """Compare and print; costs are those of a stage when every rank holds one."""
    flags.require(args, "ranks", "microbatches", example="compare --ranks 4 --microbatches 8")
    flags.check_counts(args, "ranks", "microbatches", "stages_per_rank")
    if args.frozen and max(args.frozen) >= args.ranks:
        raise UsageError(
            f"--frozen names stage {max(args.frozen)}", expected=f"stages 0 to {args.ranks - 1}, one a rank"
        )
    costs = flags.costs_of(args)
    rows = compare(
        args.ranks,
        num_microbatches=args.microbatches,
        costs=costs,
        stages_per_rank=args.stages_per_rank,
        frozen=args.frozen or (),
        limit=flags.limit_of(args, costs),
        progress=progress,
    )
    progress("")
    if not rows:
        raise ScheduleError(
            f"no schedule admits {args.ranks} ranks and {args.microbatches} microbatches",
            expected=rows.left_out[0].reason.expected if rows.left_out else "",
            fix="try smaller counts",
        )
    advice = str(recommend(rows))
    if args.out is not None:
        save(args.out, compare_page(rows, num_ranks=args.ranks, num_microbatches=args.microbatches))
    left_out = [one.summary() for one in rows.left_out]
    summary = {"rows": [row.summary() for row in rows], "left_out": left_out, "advice": advice} if args.json else {}
    width = terminal_width()
    below = [text for text in (left_out_text(rows.left_out), advice) if text]
    text = "\n\n".join([compare_table(rows, width=width), *(wrapped(text, width) for text in below)])
    report(args, text, summary)
    return 0 if rows[0].fits else 1
