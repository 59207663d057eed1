"""`drumline search --slices`: find lengths of slices and an order of their units, with a bound for all of them."""

from __future__ import annotations

import argparse
from typing import Any

from drumline.cli import flags
from drumline.cli.output import Paper, deliver, progress, wrapped
from drumline.core.errors import UsageError, counted
from drumline.core.units import number, size_text
from drumline.plan.search.search import placement_named
from drumline.plan.slices.results import SliceOrder, SliceResult
from drumline.plan.slices.search import search_slices
from drumline.report.summary import summarize

TOKENS, MULTIPLE = 4096, 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add = flags.adder(parser, "slices of sequences; costs are then those of whole sequences")
    whole = flags.whole_number
    add("--slices S[,...]", "find lengths and an order of so many slices; of several numbers, the best", _numbers)
    add(
        "--attention A[,...]",
        "part of the time that attention takes, for all stages or for each (default: as in costs)",
        _parts,
    )
    add("--key-value-bytes K", "bytes of a sequence's keys and values, among its activations (default 0)", flags.number)
    add("--tokens T", "length of a sequence", whole, TOKENS)
    add("--multiple N", "lengths of slices are multiples of so many tokens", whole, MULTIPLE)
    add("--slice-overhead N", "a slice takes as long as so many tokens more", flags.number, 0.0)
    add("--whole-backwards", "leave out orders that split backwards into I and W")


def run(args: argparse.Namespace) -> int:
    """Search and report the result."""
    _check(args)
    costs = flags.costs_of(argparse.Namespace(**vars(args) | {"slices": None, "attention": None}))
    placement = placement_named(args.placement, args.ranks, args.microbatches, args.stages_per_rank)
    result = search_slices(
        costs,
        placement,
        num_microbatches=args.microbatches,
        slices=args.slices,
        tokens=args.tokens,
        attention=args.attention if args.attention is None or len(args.attention) > 1 else args.attention[0],
        overhead=args.slice_overhead,
        multiple=args.multiple,
        split=not args.whole_backwards,
        limit=flags.limit_of(args, costs),
        seconds=args.seconds,
        tries=args.tries,
        seed=args.seed,
        progress=progress,
    )

    def make(form: str, paper: Paper) -> str | bytes:
        if form == "text":
            return wrapped(slices_text(result), paper.width)
        if form == "csv":
            return result.program.format()
        from drumline.report.draw.html import picture

        return picture(form, result.timeline)

    deliver(args, make, lambda: slices_summary(result))
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return flags.listed(flags.whole_number)(text)


def _parts(text: str) -> tuple[float, ...]:
    return flags.listed(flags.number)(text)


def _check(args: argparse.Namespace) -> None:
    flags.check_counts(args, "tokens", "multiple")
    if min(args.slices) < 1:
        raise UsageError(f"--slices is {min(args.slices)}", expected="whole numbers of 1 or more")
    for flag, setting, expected in (
        ("--placement", args.placement if args.placement in ("all", "bidirectional") else "", "linear, loop or v"),
        ("--objective", args.objective if args.objective != "makespan" else "", "makespan"),
        ("--jitter", "given" if args.jitter is not None else "", "times that do not vary"),
        ("--pareto", "given" if args.pareto else "", "one limit"),
    ):
        if setting:
            raise UsageError(f"{flag} is {setting}, with --slices", expected=expected, fix=f"leave out {flag}")


def slices_summary(result: SliceResult) -> dict[str, Any]:
    """Return the result as plain values."""

    def value(order: SliceOrder | None) -> float | None:
        return None if order is None else order.value

    return {
        **summarize(result.timeline),
        "microbatches": result.program.num_microbatches,
        "slices": result.num_slices,
        "lengths": list(result.lengths),
        "value": result.value,
        "lower_bound": result.bound,
        "gap": result.gap,
        "gain": result.gain,
        "reference": None if result.reference is None else result.reference.name,
        "reference_value": value(result.reference),
        "equal_slices": value(result.equal),
        "same_order": value(result.same),
        "order": result.name,
        "search_seconds": result.seconds,
        "tried": result.num_tried,
        "interrupted": result.is_interrupted,
        "program": result.program.format().split("\n"),
    }


def slices_text(result: SliceResult) -> str:
    """Return the result in words."""
    timeline, program = result.timeline, result.program
    microbatches = counted(program.num_microbatches, "microbatch")
    lines = [
        f"{counted(program.num_ranks, 'rank')}, {counted(program.num_stages, 'stage')}, {microbatches} in"
        f" {counted(result.num_slices, 'slice')}; order: {result.name}",
        f"lengths {' '.join(map(str, result.lengths))}",
        f"makespan {number(result.value)}, {result.verdict}",
    ]
    if result.reference is not None and result.gain is not None:
        name = result.reference.name
        lines.append(f"{name} in as many equal slices {number(result.reference.value)}: {result.gain:.1%} saved")
        if result.same is not None:
            lines.append(f"the best lengths in {name} {number(result.same.value)}")
    if result.equal is not None:
        lines.append(f"the best order of equal slices {number(result.equal.value)}")
    lines.append(f"bubble {timeline.bubble:.2%} of the makespan, {timeline.span_bubble:.2%} of the longest span")
    if timeline.peak_bytes is not None:
        lines.append(f"peak bytes {', '.join(map(size_text, timeline.peak_bytes))}")
    return "\n".join(lines)
