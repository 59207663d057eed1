"""`drumline show SCHEDULE`: the grid in the terminal, or the program written out."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import colour_wanted, deliver, print_json, terminal_width, wrapped
from drumline.core.errors import UsageError
from drumline.core.program import Program
from drumline.core.torch_text import NEWER, OLDER
from drumline.report.units import counts

if TYPE_CHECKING:
    from drumline.core.simulate.simulate import Simulation


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    flags.add_schedule(parser, optional=True)
    flags.add_frozen(parser)
    flags.add_costs(parser)
    flags.add_json(parser)
    flags.add_format(
        parser,
        ("text", "svg", "html", "perfetto", "csv", "torch", "torch-comms"),
        "text, svg, html: pictures; perfetto: a trace; csv: the program; torch, torch-comms: as PyTorch loads it",
    )
    parser.add_argument("--window", metavar="START:END", help="draw only this stretch of time")
    parser.add_argument("--memory", action="store_true", help="draw under each rank how many pairs it holds")
    parser.add_argument("--slots", action="store_true", help="draw every action as one slot, whatever it costs")
    parser.add_argument("--lower", action="store_true", help="spell sends and receives out first")
    flags.add_channel(
        parser,
        "with --lower: what has one queue of messages. `rank`, the default, is safe everywhere; `edge` is the order "
        "that Drumline's own runs use, with receives posted early, and may hang in PyTorch",
    )
    parser.add_argument(
        "--torch-version",
        default=OLDER,
        metavar="VERSION",
        help=f"with --format torch-comms: from {NEWER} on PyTorch wants a WAIT for every send and gradient exchange "
        f"(default {OLDER})",
    )


def run(args: argparse.Namespace) -> int:
    """Draw or write one schedule; without a name, list them."""
    if args.schedule is None:
        return _list(args)
    from drumline.core.lower import lower

    program = flags.pruned(flags.program_of(args), args)
    if args.lower:
        program = lower(program, channel=args.channel)
    written = _written(args, program)
    shown = {"out": str(args.out)} if args.out is not None else {"text": written}
    numbers = {"ranks": program.num_ranks, "stages": program.num_stages, "microbatches": program.num_microbatches}
    rows = [[str(action) for action in row] for row in program.rows]
    deliver(args, written, {"schedule": program.name, **numbers, "format": args.format, **shown, "rows": rows})
    return 0


def _written(args: argparse.Namespace, program: Program) -> str | bytes:
    """Return what --format asks for."""
    if args.format == "text":
        return _text(args, program)
    if args.format == "csv":
        return program.format()
    if args.format.startswith("torch"):
        from drumline.core.torch_text import for_torch

        lowered = args.format == "torch-comms"
        return for_torch(program, communication=lowered, version=args.torch_version).rstrip("\n")
    from drumline.report.draw.html import picture

    return picture(args.format, _timeline(args, program))


def _timeline(args: argparse.Namespace, program: Program) -> Simulation:
    from drumline.core.costs import Costs
    from drumline.core.simulate.simulate import simulate

    # Slots: every action takes one, a whole backward as much as a half.
    return simulate(program, Costs(backward=1, overlapped=1, update=1) if args.slots else flags.costs_of(args))


def _text(args: argparse.Namespace, program: Program) -> str:
    from drumline.report.draw.grid import grid, legend

    timeline = _timeline(args, program)
    window = _window(args.window)
    if window is not None and window[0] >= timeline.makespan:
        raise UsageError(f"--window begins at {window[0]:g}", expected=f"less than the makespan, {timeline.makespan:g}")
    to_terminal = args.out is None and not args.json
    width = terminal_width() if to_terminal else 200
    colour = to_terminal and colour_wanted()
    picture = grid(timeline, width=width, colour=colour, window=window, memory=args.memory)
    length = f"{timeline.makespan:g} slots" if args.slots else f"makespan {timeline.makespan:g}"
    figures = f"{length}, bubble {timeline.bubble:.2%} of it; of the longest span {timeline.span_bubble:.2%}"
    around = [f"{program.name}: {counts(program)}", figures, legend(timeline)]
    title, *rest = (wrapped(line, width) for line in around if line)
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
    from drumline.report.table import table
    from drumline.schedules import schedules

    known = schedules()
    if args.json:
        print_json({"schedules": {name: schedule.summary for name, schedule in known.items()}})
        return 0
    width = terminal_width()
    print(table(["schedule", "what it is"], [[name, one.summary] for name, one in known.items()], width=width, left=2))
    print("\n" + wrapped("`drumline show NAME --ranks 4 --microbatches 8` draws one.", width))
    return 0
