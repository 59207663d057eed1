"""`drumline report RUN...`: recorded runs as one offline page, as text, plots or a trace."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import colour_wanted, deliver, print_json, save, terminal_width
from drumline.core.errors import UsageError
from drumline.core.measured.run import read_run

if TYPE_CHECKING:
    from drumline.core.timeline.timeline import Timeline
    from drumline.report.run.report import RunReport

PAGE = "report.html"
_ENDINGS = {
    ".html": "html",
    ".htm": "html",
    ".txt": "text",
    ".svg": "svg",
    ".png": "png",
    ".gz": "perfetto",
    ".pftrace": "perfetto",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder that record= named")
    parser.add_argument("--step", type=flags.whole_number, metavar="N", help="this step, not the typical one")
    parser.add_argument(
        "--format",
        choices=("html", "text", "svg", "png", "perfetto"),
        help="html: a page; text; svg, png: plots, by matplotlib; perfetto: a trace (default: as --out ends, or html)",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help=f"write there (default: {PAGE} in the first RUN)")
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Report runs: write a file, and say in short what it says."""
    from drumline.report.run.report import reports_of

    form = _format(args)
    reports = reports_of([read_run(path) for path in args.runs], step=args.step)
    out = args.out
    if out is None and args.format is None and not args.json:
        out = args.runs[0] / PAGE
    written = _written(reports, form) if out is not None or not args.json else ""
    if out is not None:
        save(out, written)
    if args.json:
        print_json({"runs": [one.to_json() for one in reports], **({} if out is None else {"out": str(out)})})
    elif out is not None:
        print(_terminal_text(reports))
        print(f"\nwrote {out}")
    else:
        deliver(args, _terminal_text(reports) if form == "text" else written, {})
    return 0


def _format(args: argparse.Namespace) -> str:
    if args.format is not None:
        return str(args.format)
    if args.out is None:
        return "html"
    found = _ENDINGS.get(args.out.suffix.lower())
    if found is None:
        raise UsageError(f"--out is {args.out}", expected=f"a name that ends in {', '.join(_ENDINGS)}, or --format")
    return found


def _terminal_text(reports: Sequence[RunReport]) -> str:
    from drumline.report.run.text import reports_text

    return reports_text(reports, width=terminal_width(), colour=colour_wanted())


def _written(reports: Sequence[RunReport], form: str) -> str | bytes:
    """Return what a file holds."""
    if form == "text":
        from drumline.report.run.text import reports_text

        return reports_text(reports)
    if form == "html":
        from drumline.report.run.page import run_page

        return run_page(reports)
    if form == "perfetto":
        return _perfetto(reports)
    from drumline.report.run.plots import plots

    drawn = plots(reports, file_type=form)
    return drawn.decode() if form == "svg" else drawn


def _perfetto(reports: Sequence[RunReport]) -> bytes:
    from drumline.report.draw.trace import traces

    timelines: dict[str, Timeline] = {}
    for one in reports:
        prefix = f"{one.name}, " if len(reports) > 1 else ""
        timelines[f"{prefix}measured"] = one.seen.measured
        timelines[f"{prefix}simulated"] = one.seen.simulated
    return traces(timelines)
