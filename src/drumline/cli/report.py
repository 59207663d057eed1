"""`drumline report RUN...`: turn recorded runs into an offline page, text, plots or a trace."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import PICTURES, TEXTS, TRACES, Paper, deliver
from drumline.core.measured.run import CONFIG, read_run

if TYPE_CHECKING:
    from drumline.core.timeline.timeline import Timeline
    from drumline.report.run.report import RunReport

PAGE = "report.html"
EXAMPLE = "drumline report runs/first --out first.html --out first.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = flags.adder(parser)
    add("RUN", "the folder you gave to record=, or a folder of such folders", Path, nargs="+")
    add("--step N", "the step to show (default: a typical one)", flags.whole_number)
    meaning = "html is a page; svg and png are plots (they need matplotlib); perfetto is a trace (default html)"
    flags.add_format(parser, ("html", "text", "svg", "png", "perfetto"), meaning)
    formats = PICTURES | TEXTS | TRACES | {".png": "png"}
    endings = f"its extension determines the format: {' '.join(formats)} (default: RUN/{PAGE})"
    flags.add_out(parser, formats, f"write a file; {endings}")
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Report runs: write a file, and print a summary."""
    from drumline.report.run.report import reports_of

    folders = [folder for path in args.run for folder in _runs_in(path)]
    reports = reports_of([read_run(path) for path in folders], step=args.step)
    if not args.out and args.format is None and not args.json:
        args.out = [args.run[0] / PAGE]
    deliver(args, partial(_written, reports), lambda: {"runs": [report.to_json() for report in reports]}, gap="\n")
    return 0


def _runs_in(path: Path) -> Sequence[Path]:
    """Return the folder of a run, or all runs in a folder of runs, by name."""
    if os.path.exists(path / CONFIG) or not os.path.isdir(path):
        return [path]
    return sorted(config.parent for config in path.glob(f"*/{CONFIG}")) or [path]


def _written(reports: Sequence[RunReport], form: str, paper: Paper) -> str | bytes:
    """Return the reports in a format."""
    if form == "text":
        from drumline.report.run.text import reports_text

        return reports_text(reports, width=paper.width, colour=paper.colour)
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
    for report in reports:
        prefix = f"{report.name}, " if len(reports) > 1 else ""
        timelines[f"{prefix}measured"] = report.step.measured
        timelines[f"{prefix}simulated"] = report.step.simulated
    return traces(timelines)
