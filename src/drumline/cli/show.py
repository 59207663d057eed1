"""`drumline show SCHEDULE`: draw the grid in the terminal, or write the program."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import FILE, PICTURES, PROGRAMS, TEXTS, TRACES, Paper, deliver, files_of, wrapped
from drumline.core.errors import UsageError
from drumline.core.lower.torch_text import NEWER, OLDER
from drumline.core.program import Program
from drumline.core.units import number
from drumline.report.summary import counts

if TYPE_CHECKING:
    from drumline.core.simulate.simulate import Simulation

EXAMPLE = "drumline show zb-v --ranks 4 --microbatches 8 --out zb-v.svg --out zb-v.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    flags.add_schedule(parser, optional=". Without it, list all schedules")
    flags.add_frozen(parser)
    flags.add_costs(parser)
    flags.add_slices(parser)
    flags.add_json(parser)
    flags.add_out(parser, TEXTS | PICTURES | TRACES | PROGRAMS)
    flags.add_format(
        parser,
        ("text", "svg", "html", "perfetto", "csv", "torch", "torch-comms"),
        "text, svg and html are pictures; perfetto is a trace; csv is the program; torch and torch-comms are the "
        "program as PyTorch loads it (default text)",
    )
    add = flags.adder(parser)
    add("--window START:END", "draw only this time interval (default: everything)")
    add("--memory", "draw, below each rank, how many activations it holds")
    add("--slots", "draw every action one slot wide, whatever its cost")
    add("--lower", "write sends and receives as separate actions")
    flags.add_channel(
        parser,
        "with --lower: which messages share a queue. `rank` (default) is safe everywhere; `edge` is the order of "
        "Drumline's own runs, with receives posted early, and may hang in PyTorch",
    )
    newer = f"PyTorch {NEWER} and newer need a WAIT for every send and gradient exchange"
    add("--torch-version VERSION", f"with --format torch-comms: {newer}", str, OLDER)


def run(args: argparse.Namespace) -> int:
    """Draw or write one schedule; without a name, list them."""
    if args.schedule is None:
        return _list(args)
    from drumline.core.lower.lower import lower

    program = flags.pruned(flags.program_of(args), args)
    if args.lower:
        program = lower(program, channel=args.channel)
    make = partial(_written, args, program)
    deliver(args, make, lambda: _summary(args, program, make), instead=True)
    return 0


def _summary(
    args: argparse.Namespace, program: Program, make: Callable[[str, Paper], str | bytes]
) -> dict[str, object]:
    files = files_of(args)
    form = args.format or (files[0][1] if files else "text")
    text = {} if files else {"text": make(form, FILE)}
    numbers = {"ranks": program.num_ranks, "stages": program.num_stages, "microbatches": program.num_microbatches}
    numbers["slices"] = program.num_slices
    rows = [[str(action) for action in row] for row in program.rows]
    return {"schedule": program.name, **numbers, "format": form, **text, "rows": rows}


def _written(args: argparse.Namespace, program: Program, form: str, paper: Paper) -> str | bytes:
    """Return the program in a format."""
    if form == "text":
        return _text(args, program, paper)
    if form == "csv":
        return program.format()
    if form.startswith("torch"):
        from drumline.core.lower.torch_text import for_torch

        lowered = form == "torch-comms"
        return for_torch(program, communication=lowered, version=args.torch_version).rstrip("\n")
    from drumline.report.draw.html import picture

    return picture(form, _timeline(args, program))


def _timeline(args: argparse.Namespace, program: Program) -> Simulation:
    from drumline.core.costs import Costs
    from drumline.core.simulate.simulate import simulate

    # Slots: every action takes one; a whole backward counts like a half.
    return simulate(program, Costs(backward=1, overlapped=1, update=1) if args.slots else flags.costs_of(args))


def _text(args: argparse.Namespace, program: Program, paper: Paper) -> str:
    from drumline.report.draw.grid import grid, legend
    from drumline.schedules.equal_slices import equal_slices_seconds

    timeline = _timeline(args, program)
    window = _window(args.window)
    if window is not None and window[0] >= timeline.makespan:
        raise UsageError(
            f"--window begins at {window[0]:g}", expected=f"less than the makespan, {number(timeline.makespan)}"
        )
    picture = grid(timeline, width=paper.width, colour=paper.colour, window=window, memory=args.memory)
    length = f"{number(timeline.makespan)} slots" if args.slots else f"makespan {number(timeline.makespan)}"
    figures = f"{length}, bubble {timeline.bubble:.2%} of it; of the longest span {timeline.span_bubble:.2%}"
    formula = equal_slices_seconds(program, timeline.costs)
    equal = "" if formula is None else f"formula for slices of equal time: makespan {number(formula)}"
    around = [f"{program.name}: {counts(program)}", figures, equal, legend(timeline)]
    title, *rest = (wrapped(line, paper.width) for line in around if line)
    return "\n".join([title, picture, *rest])


def _window(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        start, end = (flags.number(part) for part in text.split(":"))
    except (ValueError, argparse.ArgumentTypeError):
        start = end = 0.0
    if not 0 <= start < end:
        raise UsageError(f"--window is {text[:40]!r}", expected="two times like 0:20")
    return start, end


def _list(args: argparse.Namespace) -> int:
    from drumline.report.draw.table import table
    from drumline.schedules import schedules

    known = {name: schedule.summary for name, schedule in schedules().items()}

    def make(form: str, paper: Paper) -> str:
        listed = table(["schedule", "what it is"], list(known.items()), width=paper.width, left=2)
        below = "`drumline show NAME --ranks 4 --microbatches 8` draws one of them."
        return f"{listed}\n\n{wrapped(below, paper.width)}"

    args.formats, args.format = TEXTS, None
    deliver(args, make, lambda: {"schedules": known}, instead=True)
    return 0
