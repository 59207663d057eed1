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
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=flags.file,
        help="FILE.py:NAME, a function that returns (model, loss_fn, batch, target); a Hugging Face config.json; "
        "or a profile to show again (- reads stdin)",
    )
    parser.add_argument(
        "--microbatch-sizes",
        type=_sizes,
        default=(1, 2, 4, 8),
        metavar="N,...",
        help="microbatch sizes to measure, in rows (default 1,2,4,8)",
    )
    whole = flags.whole_number
    flags.add_ranks(parser, "number of ranks that measure at the same time (default 2)", 2)
    parser.add_argument("--threads", type=whole, default=1, metavar="N", help="threads per rank (default 1)")
    parser.add_argument("--device", metavar="NAME", help="PyTorch device to measure on, like cuda (default cpu)")
    length = "tokens per row, for a config.json (default 512)"
    parser.add_argument("--sequence-length", type=whole, metavar="N", help=length)
    parser.add_argument("--runs", type=whole, default=12, metavar="N", help="runs per size (default 12)")
    most = "the most seconds to spend on one size (default 20)"
    parser.add_argument("--seconds", type=flags.number, default=20.0, metavar="S", help=most)
    flags.add_out(parser, TEXTS | PICTURES, "write FILE.json for `drumline plan`, or FILE.svg, FILE.html, FILE.txt")
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, write and show."""
    found = ModelProfile.load(args.model) if is_profile(args.model) else _measured(args)

    def make(form: str, paper: Paper) -> str:
        from drumline.report.plan.profiles import profile_page, profile_svg, profile_text

        if form == "text":
            return profile_text(found, width=paper.width)
        return profile_svg(found) if form == "svg" else profile_page(found)

    deliver(args, make, lambda: _summary(args, found))
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
    try:
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
                shows=sys.stderr.isatty(),
            )
    finally:
        progress("")


def _sizes(text: str) -> tuple[int, ...]:
    """Parse microbatch sizes; the error names the value."""
    sizes = tuple(flags.whole_number(part) for part in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} contains a size below 1")
    return sizes
