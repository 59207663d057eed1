"""`drumline replicas SCHEDULE`: simulate one step of many copies of a pipeline, action by action."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import TEXTS, Paper, deliver, wrapped
from drumline.core.errors import UsageError
from drumline.core.units import number

if TYPE_CHECKING:
    from drumline.report.replicas.spread import Spread
    from drumline.report.replicas.step import ReplicaStep

EXAMPLE = "drumline replicas 1f1b --ranks 256 --microbatches 256 --replicas 64 --jitter 0.1 --comm 0.05"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    flags.add_schedule(parser)
    add = flags.adder(parser)
    add("--replicas N", "number of copies of the pipeline (default 8)", flags.whole_number, 8)
    add("--reduce T", "time of a stage's gradient exchange between all copies (default 0)", flags.number)
    add("--jitter SHARE", "relative standard deviation of actions' times (default 0)", flags.number)
    add("--measured PATH", "take the variation of times from a recorded run, or a folder of profiler traces", Path)
    add("--link-jitter SHARE", "the same of links: every link draws one factor (default 0)", flags.number, 0.0)
    add("--seed N", "random seed (default 0)", flags.whole_number, 0)
    flags.add_costs(parser)
    flags.add_slices(parser)
    flags.add_json(parser)
    flags.add_out(parser, TEXTS | {".svg": "svg"})


def run(args: argparse.Namespace) -> int:
    """Simulate the step and report where its time went."""
    from dataclasses import replace

    from drumline.report.replicas.picture import drawing
    from drumline.report.replicas.step import replicas

    costs = flags.costs_of(args)
    costs = costs if args.reduce is None else replace(costs, reduce=args.reduce)
    step = replicas(flags.program_of(args), costs, num_replicas=args.replicas, spread=_spread(args), seed=args.seed)

    def make(form: str, paper: Paper) -> str:
        return drawing(step) if form == "svg" else _text(step, paper.width)

    deliver(args, make, step.summary)
    return 0


def _spread(args: argparse.Namespace) -> Spread:
    from drumline.report.replicas.spread import Spread

    if args.measured is None:
        return Spread.log_normal(args.jitter or 0.0, args.link_jitter)
    if args.jitter is not None:
        raise UsageError("--jitter and --measured both say how much times vary", fix="leave one of them out")
    from drumline.report.replicas.measured import measured_spread

    return measured_spread(args.measured, args.link_jitter)


def _text(step: ReplicaStep, width: int) -> str:
    from drumline.report.draw.table import table

    slowest = step.slowest
    where = (
        f"slowest link: rank {slowest.source} to {slowest.target} of replica {slowest.replica}, "
        f"{number(slowest.latency)} a message; ranks waited {number(slowest.waited)} for it"
        if slowest
        else "no rank waited for a link"
    )
    low, high = float(step.ends.min()), float(step.ends.max())
    lines = [
        f"{step.program.name}: {step.num_replicas} pipelines of {step.program.num_ranks} ranks, "
        f"{step.num_ranks} ranks, {step.num_actions} actions",
        f"makespan {number(step.makespan)}, bubble {step.bubble:.2%} of it",
        f"pipelines end after {number(low)} to {number(high)}, replica {step.straggler} last",
        where,
    ]
    rows = [[reason, f"{share:.2%}"] for reason, share in step.idle_shares.items() if share]
    return "\n".join(wrapped(line, width) for line in lines) + "\n\n" + table(["idle", "share"], rows)
