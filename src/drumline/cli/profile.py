"""`drumline profile MODEL`: measure every block on this device (seconds, bytes), the links, and the overhead."""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import redirect_stdout
from typing import Any

from drumline.cli import flags
from drumline.cli.output import PICTURES, TEXTS, Paper, deliver, files_of, progress, pytorch
from drumline.plan.device.model_profile import ModelProfile, is_profile

EXAMPLE = "drumline profile train.py:make --ranks 2 --out mine.json --out mine.html"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, whole = flags.adder(parser), flags.whole_number
    add(
        "MODEL",
        "FILE.py:NAME, a function that returns (model, loss_fn, batch, target); a Hugging Face config.json; "
        "or a profile to show again (- reads stdin)",
        flags.file,
    )
    add("--microbatch-sizes N,...", "microbatch sizes to measure, in rows (default 1,2,4,8)", _sizes, (1, 2, 4, 8))
    add("-r --ranks P", "number of ranks that measure at the same time", whole, 2)
    add("--threads N", "threads per rank", whole, 1)
    add("--device NAME", "PyTorch device to measure on, like cuda (default cpu)")
    add("--sequence-length N", "tokens per row, for a config.json (default 512)", whole)
    add("--slices S,...", "also measure sequences in so many slices, like 2,4,8, for plans of slices", _numbers)
    add("--runs N", "runs per size", whole, 12)
    add("--seconds S", "the most seconds to spend on one size", flags.number, 20.0)
    flags.add_out(parser, TEXTS | PICTURES, "write FILE.json for `drumline plan`, or FILE.svg, FILE.html, FILE.txt")
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, write and show."""
    profile = ModelProfile.load(args.model) if is_profile(args.model) else _measured(args)

    def make(form: str, paper: Paper) -> str:
        from drumline.report.plan.profiles import profile_page, profile_svg, profile_text

        if form == "text":
            return profile_text(profile, width=paper.width)
        return profile_svg(profile) if form == "svg" else profile_page(profile)

    deliver(args, make, lambda: _summary(args, profile))
    return 0


def _summary(args: argparse.Namespace, profile: ModelProfile) -> dict[str, Any]:
    """Return the profile's own object; --json adds the list of files."""
    table: dict[str, Any] = json.loads(profile.to_json())
    files = [str(path) for path, _ in files_of(args)]
    return {**table, "out": files} if args.json and files else table


def _measured(args: argparse.Namespace) -> ModelProfile:
    with pytorch("profile runs a model"):
        from drumline.pipeline.profiling import profile_model
    progress(f"profiling {args.model} on {args.ranks} ranks ...")
    with redirect_stdout(sys.stderr):  # the user's model may print
        return profile_model(
            args.model,
            microbatch_sizes=args.microbatch_sizes,
            num_ranks=args.ranks,
            device=args.device,
            num_threads=args.threads,
            num_runs=args.runs,
            max_seconds=args.seconds,
            length=args.sequence_length,
            slices=args.slices or (),
            shows=sys.stderr.isatty(),
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Parse numbers of slices; the error names the value."""
    counts = flags.listed(flags.whole_number)(text)
    if min(counts) < 2:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} contains a number below 2")
    return counts


def _sizes(text: str) -> tuple[int, ...]:
    """Parse microbatch sizes; the error names the value."""
    sizes = flags.listed(flags.whole_number)(text)
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} contains a size below 1")
    return sizes
