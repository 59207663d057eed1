"""`drumline demo`: train a two-stage model end to end, and write the report."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import (
    check_out_folder,
    colour_wanted,
    print_json,
    progress,
    pytorch,
    save,
    terminal_width,
    wrapped,
)

if TYPE_CHECKING:
    from drumline.train.demo import Outcome

EXAMPLE = "drumline demo --out out/demo --epochs 1"
_BAR = 30
_DRAWN = ("gpipe-4", "1f1b-4", "zb-h1-4", "pipedream-2bw-4")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = flags.adder(parser)
    add("-o --out FOLDER", "folder for the runs and the report", Path, Path("out/demo"))
    add("--width N", "width of a layer", flags.whole_number, 512)
    add("--epochs N", "number of epochs", flags.whole_number, 5)
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Train with every schedule, compare, and say where the report is."""
    with pytorch("demo trains a model"):
        from drumline.train.demo import run_demo
        from drumline.train.demo_panel import opening
        from drumline.train.two_stages import Build
    from drumline.report.run.page import run_page
    from drumline.report.run.report import reports_of

    flags.check_counts(args, "width", "epochs")
    check_out_folder(args.out)
    build = Build(width=args.width, num_epochs=args.epochs)
    if not args.json:
        print(
            wrapped(
                f"The two-stage build: ten linear layers of width {build.width}, five on each of two ranks."
                " Ranks compute on the CPU and use shared-memory."
                f" {build.num_points} points in batches of {build.batch_rows}, Adam, {build.num_epochs} epochs.\n",
                terminal_width(),
            ),
            flush=True,
        )
    tell = {} if args.json else {"finished": _tell}
    outcomes = run_demo(args.out, build, progress=_show, **tell)
    page, reports = args.out / "report.html", reports_of([outcome.run for outcome in outcomes])
    busy = next((report.steadiness.sentence for report in reports if report.steadiness.busy), "")
    title = f"Demo: one model trained with {len({outcome.trial.schedule for outcome in outcomes})} schedules"
    save(page, run_page(reports, title=title, opening=opening(outcomes, busy=busy)))
    if args.json:
        rows, devices = [outcome.summary() for outcome in outcomes], outcomes[0].run.environment["devices"]
        print_json({"devices": devices, "rows": rows, "busy_machine": busy, "report": str(page)})
    else:
        print()
        _print(outcomes)
        if busy:
            print("\n" + wrapped(f"{busy} Compare these times again on a quiet machine.", terminal_width()))
        print(f"\nThe report explains the idle time of every run and says what to change: {page}")
    return 0 if all(outcome.difference == 0 for outcome in outcomes) else 1


def _show(done: int, of: int, what: str) -> None:
    filled = _BAR * done // of
    progress(f"[{'#' * filled}{'.' * (_BAR - filled)}] {done}/{of} steps  {what}")


def _tell(done: int, of: int, what: str) -> None:
    """Print a line for every run: on a slow machine, all of them take minutes."""
    progress("")
    print(wrapped(f"trained {done} of {of}: {what}", terminal_width()), flush=True)


def _print(outcomes: Sequence[Outcome]) -> None:
    from drumline.core.units import number
    from drumline.report.draw.grid import grid
    from drumline.report.draw.table import table

    width = terminal_width()
    for outcome in outcomes:
        if outcome.trial.name in _DRAWN:
            print(f"{outcome.trial.schedule}, one measured step:")
            print(grid(outcome.timeline, width=width, colour=colour_wanted()) + "\n")
    header = ["schedule", "M", "recompute", "loss", "step ms", "utilisation", "bound", "queue"]
    header += ["stash KiB", "one process"]
    rows = []
    for outcome in outcomes:
        summary = outcome.summary()
        rows.append(
            [
                outcome.trial.schedule,
                str(outcome.trial.num_microbatches),
                outcome.trial.checkpoint,
                f"{outcome.losses[0]:.3f} > {outcome.losses[-1]:.3f}",
                f"{summary['step_seconds'] * 1e3:.1f}",
                f"{outcome.utilisation:.1%}",
                f"{outcome.bound:.1%}",
                number(summary["peak_queue"]),
                " + ".join(f"{size / 1024:.0f}" for size in outcome.peak_stash),
                "same bits" if outcome.difference == 0 else f"off by {outcome.difference:.2g}",
            ]
        )
    print(table(header, rows, width=width, keep=("M", "utilisation")))
    print(
        "\n"
        + wrapped(
            "bound: the most that the schedule allows with equal stages and free messages. Two flushed stages cannot"
            " exceed M / (M + 1), 80% at M = 4; zb-h1 fills the drain with weight gradients, and pipedream-2bw has no"
            " flush. Its updates come one step late, so its losses differ from those of the others; it is compared"
            " with one process that updates as late. stash: activations held at once for backwards, on"
            " rank 0 + rank 1. GPipe holds the whole batch for any M. 1F1B holds at most two"
            " microbatches on rank 0, and these get smaller. Recomputing keeps only the inputs of stages, plus the"
            " microbatch in its backward.",
            width,
        )
    )
