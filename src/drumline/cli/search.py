"""`drumline search`: find the best program under a memory limit, with a lower bound and the gap."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from drumline.cli import flags, search_slices
from drumline.cli.output import PICTURES, PROGRAMS, TEXTS, Paper, deliver, files_of, progress, wrapped
from drumline.core.costs import Costs
from drumline.core.errors import PlanError, UsageError
from drumline.core.units import number, size_text
from drumline.plan.search.objective import OBJECTIVES, Jitter
from drumline.plan.search.search import PLACEMENTS, Everywhere, SearchResult, placement_named, search, search_all
from drumline.report.summary import counts, refused, summarize

EXAMPLE = "drumline search --ranks 4 --microbatches 8 --max-activations 4 --out found.csv"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    flags.add_counts(parser, "(needed)")
    flags.add_costs(parser)
    flags.add_limit(parser, finer="; with --placement all, v pairs count as one where a rank holds v stages")
    flags.add_json(parser)
    add, number, whole = flags.adder(parser), flags.number, flags.whole_number
    add("--placement", "how stages are placed on ranks", (*PLACEMENTS, "all"), "linear")
    add("--objective", "what to minimise", OBJECTIVES, "makespan")
    vary = "share by which the times of stages vary, for all stages or for each (default: they do not vary)"
    add("--jitter SHARE[,...]", vary, _shares)
    add("--quantile Q", "with --jitter: quantile to minimise", number, 0.9)
    add("--samples N", "with --jitter: number of samples", whole, 64)
    add("--seconds S", "seconds to search for (default 10; with --tries, no limit)", number)
    add("--tries N", "stop after this many programs (default: no limit)", whole)
    add("--seed N", "random seed", whole, 0)
    add("--pareto", "search under every memory limit, and show bubble against memory")
    search_slices.add_arguments(parser)
    flags.add_out(parser, PROGRAMS | PICTURES | TEXTS)


def run(args: argparse.Namespace) -> int:
    """Search and report the result."""
    _check(args)
    if args.slices is not None:
        return search_slices.run(args)
    if args.pareto:
        return _pareto(args)
    costs = flags.costs_of(args)
    everywhere = _search_result(args, costs)
    result, *others = everywhere
    left_out = [f"{name}: left out, {error}" for name, error in everywhere.left_out.items()]

    def make(form: str, paper: Paper) -> str | bytes:
        if form == "text":
            return wrapped("\n".join([_text(result, others), *left_out]), paper.width)
        return _written(form, result)

    deliver(args, make, lambda: _summary(result, others, everywhere.left_out))
    return 0


def _shares(text: str) -> float | tuple[float, ...]:
    numbers = flags.listed(flags.number)(text)
    return numbers[0] if len(numbers) == 1 else numbers


def _check(args: argparse.Namespace) -> None:
    flags.require(args, "ranks", "microbatches", example="search --ranks 4 --microbatches 8")
    flags.check_counts(args, "ranks", "microbatches", "samples", "stages_per_rank")
    if args.seconds is not None and args.seconds <= 0:
        raise UsageError(f"--seconds is {args.seconds:g}", expected="more than 0")
    if not 0 <= args.quantile <= 1:
        raise UsageError(f"--quantile is {args.quantile:g}", expected="a share from 0 to 1")
    if args.pareto:
        args.formats = PICTURES | TEXTS
        files_of(args)


def _search_result(args: argparse.Namespace, costs: Costs) -> Everywhere:
    jitter = None if args.jitter is None else Jitter(args.jitter, args.quantile, args.samples, args.seed)
    options = {**_options(args), "limit": flags.limit_of(args, costs), "jitter": jitter}
    if args.placement == "all":
        return search_all(costs, args.ranks, stages_per_rank=args.stages_per_rank, **options)
    placement = placement_named(args.placement, args.ranks, args.microbatches, args.stages_per_rank)
    return Everywhere([search(costs, placement, **options)])


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return what a search takes, under one memory limit or under all."""
    names = ("objective", "seconds", "tries", "seed")
    return {
        "num_microbatches": args.microbatches,
        "progress": progress,
        **{name: getattr(args, name) for name in names},
    }


def _summary(best: SearchResult, others: Sequence[SearchResult], left_out: Mapping[str, PlanError]) -> dict[str, Any]:
    summary = {
        **summarize(best.timeline),
        "objective": best.objective,
        "value": best.value,
        "lower_bound": best.bound.value,
        "bound": best.bound.name,
        "gap": best.gap,
        "search_seconds": best.seconds,
        "tried": best.num_tried,
        "starts": [{"schedule": start.name, "value": start.value} for start in best.starts],
        "interrupted": best.is_interrupted,
    }
    if others:
        summary["others"] = [
            {"placement": other.placement, "value": other.value, "lower_bound": other.bound.value, "gap": other.gap}
            for other in others
        ]
    if left_out:
        summary["left_out"] = [{"placement": name, **refused(error)} for name, error in left_out.items()]
    return summary


def _text(result: SearchResult, others: Sequence[SearchResult]) -> str:
    timeline, best = result.timeline, result.starts[0]
    what = {"makespan": "makespan", "span": "longest span", "steady": "step in steady state"}[result.objective]
    what += " at the quantile" if result.jitter else ""
    lines = [
        f"{result.placement}: {counts(result.program)}",
        f"{what} {number(result.value)}" + ("" if result.jitter else f", {result.verdict}"),
        f"bubble {timeline.bubble:.2%} of the makespan, {timeline.span_bubble:.2%} of the longest span",
        f"best hand-made start: {best.name}, {number(best.value)} ({best.value / result.value - 1:.1%} longer)"
        if best.value > result.value * 1.0005
        else f"no better than {best.name}, the best hand-made start",
        f"peak activations {' '.join(map(str, timeline.peak_activations))}",
    ]
    if timeline.peak_bytes is not None:
        lines.append(f"peak bytes {', '.join(map(size_text, timeline.peak_bytes))}")
    lines += [f"{other.placement}: {number(other.value)}, {other.verdict}" for other in others]
    return "\n".join(lines)


def _written(form: str, result: SearchResult) -> str | bytes:
    from drumline.core.lower.torch_text import for_torch
    from drumline.report.draw.html import picture

    if form == "csv":
        mirrored = result.program.placement.mirrored  # PyTorch does not support a second copy of a stage
        return result.program.format() if mirrored else for_torch(result.program)
    return picture(form, result.timeline)


def _pareto(args: argparse.Namespace) -> int:
    from drumline.plan.search.pareto import pareto
    from drumline.report.draw.pareto import pareto_page, pareto_svg, pareto_table

    costs = flags.costs_of(args)
    name = None if args.placement == "all" else args.placement
    options = _options(args)
    picture = pareto(costs, args.ranks, placement=name, stages_per_rank=args.stages_per_rank, **options)
    left_out = "\n".join(f"{name}: left out, {reason}" for name, reason in picture.left_out.items())

    def make(form: str, paper: Paper) -> str:
        if form != "text":
            return pareto_svg(picture) if form == "svg" else pareto_page(picture)
        below = ["", wrapped(left_out, paper.width)] if left_out else []
        return "\n".join([pareto_table(picture, width=paper.width), *below])

    deliver(args, make, picture.summary)
    return 0
