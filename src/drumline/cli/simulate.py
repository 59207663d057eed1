"""`drumline simulate SCHEDULE`: print the times, the idle time by cause, and the memory of one program."""

from __future__ import annotations

import argparse

from drumline.cli import flags
from drumline.cli.output import PICTURES, TEXTS, TRACES, Paper, deliver, wrapped
from drumline.core.prove.validate import validate
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.units import number, size_text
from drumline.report.summary import counts, peak_queues, rank_rows, summarize

EXAMPLE = "drumline simulate 1f1b --ranks 4 --microbatches 8 --comm 0.1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    flags.add_schedule(parser)
    flags.add_frozen(parser)
    flags.add_costs(parser)
    flags.add_slices(parser)
    flags.add_limit(parser)
    flags.add_json(parser)
    flags.add_out(parser, TEXTS | PICTURES | TRACES)
    flags.adder(parser)("--intervals", "list every idle interval with its cause")


def run(args: argparse.Namespace) -> int:
    """Simulate one program and report its figures."""
    program, costs = flags.pruned(flags.program_of(args), args), flags.costs_of(args)
    limit = flags.limit_of(args, costs)
    timeline = simulate(program, costs, limit=limit)
    over = validate(program, limit=limit, costs=costs) if limit else []
    more = {"over_limit": [str(violation) for violation in over]} if limit else {}
    intervals = [
        {"rank": cause.rank, "start": cause.start, "end": cause.end, "cause": cause.cause.value, "why": str(cause)}
        for cause in (timeline.causes if args.intervals else ())
    ]

    def make(form: str, paper: Paper) -> str | bytes:
        if form == "text":
            below = [*more.get("over_limit", []), *(str(interval["why"]) for interval in intervals)]
            return "\n".join([_text(timeline, paper.width), *below])
        from drumline.report.draw.html import picture

        return picture(form, timeline)

    def summary() -> dict[str, object]:
        path = [str(span.action) for span in timeline.critical_path]
        figures = {**summarize(timeline), "queue_depth": peak_queues(timeline), "critical_path": path, **more}
        return {**figures, **({"intervals": intervals} if args.intervals else {})}

    deliver(args, make, summary)
    return 1 if over else 0


def _text(timeline: Simulation, width: int) -> str:
    from drumline.report.draw.table import table

    program = timeline.program
    header, rows = rank_rows(timeline, number)
    peaks = [("peak activations", map(str, timeline.peak_activations))]
    if timeline.peak_bytes is not None:
        peaks.append(("peak bytes", map(size_text, timeline.peak_bytes)))
    for name, column in peaks:
        header.append(name)
        rows = [[*row, cell] for row, cell in zip(rows, column, strict=True)]
    path = timeline.critical_path
    head = "\n".join(
        [
            f"{program.name}: {counts(program)}, {program.num_actions} actions",
            f"makespan {number(timeline.makespan)}, bubble {timeline.bubble:.2%} of it",
            f"longest span {number(timeline.span)}, span bubble {timeline.span_bubble:.2%}",
            f"critical path: {len(path)} actions, {path[0].action} on rank {path[0].rank} "
            f"to {path[-1].action} on rank {path[-1].rank}",
        ]
    )
    return f"{wrapped(head, width)}\n\n{table(header, rows, width=width, left=2, keep=('idle', 'peak activations'))}"
