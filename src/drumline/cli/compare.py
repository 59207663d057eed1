"""`drumline compare`: compare all schedules for one model on given ranks, best first."""

from __future__ import annotations

import argparse

from drumline.cli import flags
from drumline.cli.output import TEXTS, Paper, deliver, progress, wrapped
from drumline.core.errors import ScheduleError, UsageError
from drumline.report.compare import compare, compare_page, compare_table, left_out_text, recommend

EXAMPLE = "drumline compare --ranks 4 --microbatches 16 --comm 0.1 --out compare.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    flags.add_counts(parser)
    flags.add_frozen(parser)
    flags.add_costs(parser)
    flags.add_limit(parser)
    flags.add_json(parser)
    flags.add_out(parser, {".html": "html", ".htm": "html", **TEXTS})


def run(args: argparse.Namespace) -> int:
    """Compare and print; costs are those of a stage when every rank holds one."""
    flags.check_counts(args, "ranks", "microbatches", "stages_per_rank")
    ranks, microbatches = args.ranks or flags.RANKS, args.microbatches or flags.MICROBATCHES
    if args.frozen and max(args.frozen) >= ranks:
        raise UsageError(f"--frozen names stage {max(args.frozen)}", expected=f"stages 0 to {ranks - 1}, one per rank")
    costs = flags.costs_of(args)
    rows = compare(
        ranks,
        num_microbatches=microbatches,
        costs=costs,
        stages_per_rank=args.stages_per_rank,
        frozen=args.frozen or (),
        limit=flags.limit_of(args, costs),
        progress=progress,
    )
    progress("")
    if not rows:
        raise ScheduleError(
            f"no schedule supports {ranks} ranks and {microbatches} microbatches",
            expected=rows.left_out[0].reason.expected if rows.left_out else "",
            fix="try smaller counts",
        )
    advice = str(recommend(rows))

    def make(form: str, paper: Paper) -> str:
        if form == "html":
            return compare_page(rows, num_ranks=ranks, num_microbatches=microbatches)
        below = [text for text in (left_out_text(rows.left_out), advice) if text]
        parts = [compare_table(rows, width=paper.width), *(wrapped(text, paper.width) for text in below)]
        return "\n\n".join(parts)

    def summary() -> dict[str, object]:
        left_out = [one.summary() for one in rows.left_out]
        return {"rows": [row.summary() for row in rows], "left_out": left_out, "advice": advice}

    deliver(args, make, summary)
    return 0 if rows[0].fits else 1
