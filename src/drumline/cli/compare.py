"""`drumline compare [SCHEDULE ...]`: compare schedules, or all of them, for one model on given ranks, best first."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from drumline.cli import flags
from drumline.cli.output import TEXTS, Paper, deliver, progress, wrapped
from drumline.core.errors import ScheduleError, UsageError
from drumline.core.program import Program
from drumline.report.compare import LeftOut, compare, compare_page, compare_table, left_out_text, recommend

EXAMPLE = "drumline compare 1f1b zb-h1 --ranks 4 --microbatches 16 --comm 0.1 --out compare.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    meaning = "the schedules to compare, by name, CSV file or FILE.py[:NAME] (default: all)"
    parser.add_argument("schedules", nargs="*", metavar="SCHEDULE", help=meaning)
    flags.add_counts(parser)
    flags.add_frozen(parser)
    flags.add_costs(parser)
    flags.add_slices(parser)
    flags.add_limit(parser, finer="; v pairs count as one where a rank holds v stages")
    flags.add_json(parser)
    flags.add_out(parser, {".html": "html", ".htm": "html", **TEXTS})


def run(args: argparse.Namespace) -> int:
    """Compare and print; costs are those of a stage when every rank holds one."""
    flags.check_counts(args, "ranks", "microbatches", "stages_per_rank")
    ran: dict[str, tuple[str, ...]] = {}
    chosen = [flags.named(schedule, ran) for schedule in args.schedules]
    ranks, microbatches, slices = _counts(args, chosen)
    if args.frozen and max(args.frozen) >= ranks:
        raise UsageError(f"--frozen names stage {max(args.frozen)}", expected=f"stages 0 to {ranks - 1}, one per rank")
    costs = flags.costs_of(args)
    rows = compare(
        ranks,
        num_microbatches=microbatches,
        costs=costs,
        stages_per_rank=args.stages_per_rank,
        slices=slices,
        frozen=args.frozen or (),
        limit=flags.limit_of(args, costs),
        only=chosen or None,
        progress=progress,
    )
    if not rows:
        raise _nothing(rows.left_out, args.schedules, ranks, microbatches)
    advice = str(recommend(rows))

    def make(form: str, paper: Paper) -> str:
        if form == "html":
            return compare_page(rows, num_ranks=ranks, num_microbatches=microbatches)
        below = [text for text in (left_out_text(rows.left_out), advice) if text]
        parts = [compare_table(rows, width=paper.width), *(wrapped(text, paper.width) for text in below)]
        return "\n\n".join(parts)

    def summary() -> dict[str, object]:
        left_out = [schedule.summary() for schedule in rows.left_out]
        return {"rows": [row.summary() for row in rows], "left_out": left_out, "advice": advice}

    deliver(args, make, summary)
    return 0 if rows[0].fits else 1


def _counts(args: argparse.Namespace, chosen: Sequence[str | Program]) -> tuple[int, int, int | tuple[int, ...]]:
    """Return the ranks, microbatches and slices to compare with: as given, else those of the first file."""
    file = next((program for program in chosen if isinstance(program, Program)), None)
    ranks = file.num_ranks if file else flags.RANKS
    microbatches = file.num_microbatches if file else flags.MICROBATCHES
    slices = file.num_slices if file and args.slices is None else flags.slices_of(args)
    return args.ranks or ranks, args.microbatches or microbatches, slices


def _nothing(left_out: Sequence[LeftOut], named: Sequence[str], ranks: int, microbatches: int) -> ScheduleError:
    """Return why there is nothing to compare."""
    if not named:
        return ScheduleError(
            f"no schedule admits {ranks} ranks and {microbatches} microbatches",
            expected=left_out[0].reason.expected if left_out else "",
            fix="try smaller counts",
        )
    return left_out[0].reason
