"""`drumline analyze TRACE...`: report the bubble of any PyTorch run from its profiler traces."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import PICTURES, PROGRAMS, TEXTS, TRACES, Paper, deliver, progress, wrapped
from drumline.core.units import number
from drumline.report.summary import counts

if TYPE_CHECKING:
    from drumline.core.timeline.timeline import Timeline
    from drumline.report.kineto.analysis import Analysis

EXAMPLE = "drumline analyze traces/1f1b --out bubble.html"
# The most violations, ranks or steps to print; --json has them all.
_MOST_SHOWN = 10
_MOST_DRAWN = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = flags.adder(parser)
    traces = "trace files of torch.profiler, .json or .json.gz, one per rank; or a folder of them"
    add("TRACE", traces, Path, nargs="+")
    add("--step N", "the step to report (default: the one with the median length)", flags.whole_number)
    flags.add_json(parser)
    flags.add_out(parser, TEXTS | PICTURES | TRACES | PROGRAMS)
    meaning = "text is the report; html and svg are pictures; perfetto is a trace; csv is the program that ran"
    flags.add_format(parser, ("text", "html", "svg", "perfetto", "csv"), f"{meaning} (default text)")


def run(args: argparse.Namespace) -> int:
    """Report one step; exit 1 if the traces break the rules of a pipeline."""
    from drumline.report.kineto.analysis import analyze

    analysis = analyze(args.trace, step=args.step, progress=progress)
    make = partial(_written, analysis)
    deliver(args, make, lambda: {**analysis.summary(), "advice": analysis.advice.sentence}, instead=True)
    return 1 if analysis.violations else 0


def _written(analysis: Analysis, form: str, paper: Paper) -> str | bytes:
    """Return the analysis in a format."""
    if form == "text":
        return _text(analysis, paper)
    if form == "csv":
        return analysis.timeline.ran.format()
    from drumline.report.draw.html import page, picture

    timeline = analysis.timeline
    name, title = timeline.program.name, f"{timeline.program.name}, step {timeline.step}, as recorded"
    if form != "html":
        return picture(form, timeline, title=title)
    shown: list[Timeline] = [_with_name(timeline, f"{name}, step {timeline.step}")]
    if analysis.ideal is not None:
        shown.append(_with_name(analysis.ideal, f"{name}, at best"))
    title = f"Recorded trace: {name}, step {timeline.step}"
    return page(shown, title=title, advice=analysis.advice.sentence, seconds=True)


def _with_name(timeline: Timeline, name: str) -> Timeline:
    return replace(timeline, program=replace(timeline.program, name=name))


def _text(analysis: Analysis, paper: Paper) -> str:
    from drumline.report.draw.grid import grid
    from drumline.report.draw.table import table
    from drumline.report.kineto.load import described

    timeline, width = analysis.timeline, paper.width
    head = [
        f"{timeline.program.name}: {counts(timeline.program)}; step {timeline.step} of {_steps(analysis)}, "
        f"actions found by {analysis.traces.found_by}"
    ]
    if timeline.num_ranks <= _MOST_DRAWN:
        head.append(grid(timeline, width=width, colour=paper.colour))
    lines = [
        f"step {_ms(timeline.step_seconds)} ms, of which the pipeline takes {_ms(timeline.makespan)} ms, "
        f"bubble {timeline.bubble:.2%} of the pipeline",
        *_told_apart(analysis),
        *_beside(analysis),
        f"clocks: {described(analysis.traces)}",
    ]
    if analysis.traces.num_others:
        lines.append(f"left out: the traces of {analysis.traces.num_others} more pipelines")
    parts = [
        *(wrapped(line, width) if "\n" not in line else line for line in head),
        *(wrapped(line, width) for line in lines),
        "\nmilliseconds per rank:",
        table(*_ranks(analysis), width=width, left=2, keep=("idle",)),
        "\nmilliseconds per step:",
        table(*_all_steps(analysis), width=width, keep=("bubble",)),
        *(["", *(wrapped(line, width) for line in _against(analysis))] if analysis.violations else []),
        "\n" + wrapped(analysis.advice.sentence, width),
    ]
    return "\n".join(parts)


def _steps(analysis: Analysis) -> str:
    numbers = list(analysis.traces.steps)
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _told_apart(analysis: Analysis) -> list[str]:
    """Describe steps that nothing marks, or that run their schedule several times."""
    traces, timeline = analysis.traces, analysis.timeline
    lines = []
    if traces.by_flushes and len(traces.steps) + len(traces.incomplete) > 1:
        lines.append("steps: the traces do not mark them; a step ends where the pipeline has run empty on all ranks")
    if timeline.num_flushes > 1:
        lines.append(
            f"the pipeline runs empty {timeline.num_flushes} times in this step: gradients accumulate over several "
            "turns of a schedule, or the profiler's mark covers several steps"
        )
    return lines


def _beside(analysis: Analysis) -> list[str]:
    """Return the simulated best case with the same action times, and the slowest stage."""
    lines = []
    if analysis.ideal is not None:
        lines.append(
            f"at best {_ms(analysis.ideal.makespan)} ms, bubble {analysis.ideal.bubble:.2%}: "
            "the same order and action times, simulated without transfer and overhead"
        )
    slow, mean = analysis.slowest, sum(stage.total for stage in analysis.stages) / len(analysis.stages)
    if len(analysis.stages) > 1 and mean > 0:
        home = analysis.timeline.program.placement.homes[slow.stage]
        lines.append(
            f"slowest stage: {slow.stage}, on rank {home}; a microbatch takes {_ms(slow.total)} ms, "
            f"{slow.total / mean:.2f} times the mean"
        )
    return lines


def _ranks(analysis: Analysis) -> tuple[list[str], list[list[str]]]:
    from drumline.report.summary import rank_rows

    header, rows = rank_rows(analysis.timeline, _ms)
    if (kernels := analysis.timeline.kernel_seconds) is not None:
        header.insert(3, "kernels")
        for row, seconds in zip(rows, kernels, strict=True):
            row.insert(3, _ms(seconds))
    return header, rows


def _all_steps(analysis: Analysis) -> tuple[list[str], list[list[str]]]:
    steps = list(analysis.traces.steps.items())
    rows = [
        [str(number), _ms(step.step_seconds), _ms(step.makespan), f"{step.bubble:.2%}"]
        for number, step in steps[-_MOST_SHOWN:]
    ]
    return ["step", "step time", "pipeline", "bubble"], rows


def _against(analysis: Analysis) -> list[str]:
    violations = analysis.violations
    more = [f"... and {len(violations) - _MOST_SHOWN} more (--json lists all)"] if len(violations) > _MOST_SHOWN else []
    return ["The traces break the rules of a pipeline:", *map(str, violations[:_MOST_SHOWN]), *more]


def _ms(seconds: float) -> str:
    return number(seconds * 1e3, 4)
