"""`drumline show SCHEDULE`: the grid in the terminal, or the program written out."""

from __future__ import annotations

import argparse
from pathlib import Path

from drumline.cli import flags
from drumline.cli.output import colour_wanted, counts, print_json, terminal_width
from drumline.core.errors import UsageError
from drumline.core.program import Program

FORMATS = ("text", "csv", "torch", "torch-comms")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    flags.add_schedule(parser, optional=True)
    flags.add_costs(parser)
    flags.add_json(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default="text",
        help="text: the picture; csv: the program; torch, torch-comms: the CSV that PyTorch loads",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write there instead of printing")
    parser.add_argument("--window", metavar="START:END", help="draw only this stretch of time")
    parser.add_argument("--lower", action="store_true", help="spell sends and receives out first")


def run(args: argparse.Namespace) -> int:
    """Draw or write one schedule; without a name, list them."""
    if args.schedule is None:
        return _list(args)
    from drumline.core.lower import lower

    program = flags.program_of(args)
    if args.lower:
        program = lower(program)
    text = _written(args, program)
    if args.out is not None:
        _save(args.out, text)
    if args.json:
        shown = {"out": str(args.out)} if args.out is not None else {"text": text}
        counts = {"ranks": program.num_ranks, "stages": program.num_stages, "microbatches": program.num_microbatches}
        rows = [[str(action) for action in row] for row in program.rows]
        print_json({"schedule": program.name, **counts, "format": args.format, **shown, "rows": rows})
    else:
        print(text if args.out is None else f"wrote {args.out}")
    return 0


def _written(args: argparse.Namespace, program: Program) -> str:
    if args.format == "text":
        return _picture(args, program)
    if args.format == "csv":
        return program.format()
    from drumline.core.torch_text import for_torch

    return for_torch(program, communication=args.format == "torch-comms").rstrip("\n")


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", fix="choose another --out") from None


def _picture(args: argparse.Namespace, program: Program) -> str:
    from drumline.core.simulate import simulate
    from drumline.report.grid import grid, legend

    timeline = simulate(program, flags.costs_of(args))
    to_terminal = args.out is None and not args.json
    picture = grid(
        timeline,
        width=terminal_width() if to_terminal else 200,
        colour=to_terminal and colour_wanted(),
        window=_window(args.window),
    )
    lines = [
        f"{program.name}: {counts(program)}",
        picture,
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.2%} of it; "
        f"of the longest span {timeline.span_bubble:.2%}",
    ]
    if note := legend(timeline):
        lines.append(note)
    width = terminal_width() if to_terminal else 200
    return "\n".join(line if "\x1b" in line else "\n".join(_wrapped(line, width)) for line in lines)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return [
        piece for line in text.split("\n") for piece in (textwrap.wrap(line, width) if len(line) > width else [line])
    ]


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
    print("\n`drumline show NAME --ranks 4 --microbatches 8` draws one.")
    return 0
