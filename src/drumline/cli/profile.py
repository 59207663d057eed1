"""`drumline profile MODEL`: seconds and bytes of every block on this device, links, and the executor's own work."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from drumline.cli import flags
from drumline.cli.output import print_json, progress, pytorch, save, terminal_width
from drumline.core.errors import UsageError
from drumline.plan.device.model_profile import ModelProfile, is_profile

_SUFFIXES = (".json", ".svg", ".html")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="FILE.py:NAME, a function that returns (model, loss_fn, batch, target); a Hugging Face config.json;"
        " or a profile to show again",
    )
    parser.add_argument(
        "--microbatch-sizes",
        type=_sizes,
        default=(1, 2, 4, 8),
        metavar="N,...",
        help="rows of a microbatch (default 1,2,4,8)",
    )
    whole = flags.whole_number
    parser.add_argument("--ranks", type=whole, default=2, metavar="P", help="that measure at once (default 2)")
    parser.add_argument("--threads", type=whole, default=1, metavar="N", help="of each rank (default 1)")
    parser.add_argument("--device", metavar="NAME", help="of PyTorch's, like cuda (default cpu)")
    length = "tokens of a row, for a config.json (default 512)"
    parser.add_argument("--sequence-length", type=whole, metavar="N", help=length)
    parser.add_argument("--runs", type=whole, default=12, metavar="N", help="of each size (default 12)")
    most = "of measuring a size, at most (default 20)"
    parser.add_argument("--seconds", type=flags.number, default=20.0, metavar="S", help=most)
    parser.add_argument(
        "--out",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="FILE.json for `drumline plan`; FILE.svg, FILE.html for a picture; may be repeated",
    )
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, write and show."""
    for path in args.out:
        if path.suffix not in _SUFFIXES:
            raise UsageError(f"--out is {path}", expected=f"a name that ends with {', '.join(_SUFFIXES)}")
    found = ModelProfile.load(args.model) if is_profile(args.model) else _measured(args)
    for path in args.out:
        save(path, _written(path, found))
    if args.json:
        import json

        table: dict[str, Any] = json.loads(found.to_json())
        print_json({**table, **({"out": [str(path) for path in args.out]} if args.out else {})})
        return 0
    from drumline.report.plan.profiles import profile_text

    print(profile_text(found, width=terminal_width()))
    for path in args.out:
        print(f"wrote {path}")
    return 0


def _measured(args: argparse.Namespace) -> ModelProfile:
    with pytorch("profile runs a model"):
        from drumline.pipeline.profiling import profile_model
    progress(f"profiling {args.model} on {args.ranks} ranks ...")
    try:
        with redirect_stdout(sys.stderr):  # where a model of the user's prints
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


def _written(path: Path, profile: ModelProfile) -> str:
    from drumline.report.plan.profiles import profile_page, profile_svg

    match path.suffix:
        case ".json":
            return profile.to_json()
        case ".svg":
            return profile_svg(profile)
        case _:
            return profile_page(profile)


def _sizes(text: str) -> tuple[int, ...]:
    """Parse sizes of microbatches; the message names the value."""
    sizes = tuple(flags.whole_number(part) for part in text.split(","))
    if min(sizes) < 1:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} has a size below 1")
    return sizes
