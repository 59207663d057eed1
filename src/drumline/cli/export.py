"""`drumline export MODEL --out DIR`: a model as ONNX stages that `drumline serve` serves."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import check_out_folder, print_result, progress, pytorch
from drumline.core.errors import UsageError, installing

if TYPE_CHECKING:
    from drumline.serve.wire.manifest import Manifest

EXAMPLE = "drumline export out/train/gpt --stages 2 --out served"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    add, whole = flags.adder(parser), flags.whole_number
    add(
        "MODEL",
        "the folder of a run of `drumline train`, whose newest checkpoint is taken; a folder or config.json of "
        "Hugging Face; a config.toml of `drumline train`; or FILE.py:NAME, a function that returns (model, example)",
    )
    add("--stages N", "number of stages", whole, 2)
    add("--out -o DIR", "the folder to write, new or empty", Path, required=True)
    add("--name NAME", "what clients call the model (default: from MODEL)")
    add("--rows N", "rows of the microbatch by which stages are timed and balanced", whole, 4)
    add("--length N", "tokens per row of that microbatch, for text", whole, 32)
    most = "the most tokens per row that clients may send (default: the model's positions; for FILE.py:NAME 2048)"
    add("--max-length N", most, whole)
    add("--cuts NAME,...", "the first block of every stage but the first, instead of cuts by measured times")
    add("--seed S", "random seed", whole, 0)
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Export, and print the stages and how far they are from PyTorch."""
    with pytorch("export traces a model"):
        from drumline.train.export_models import finished_model
    try:
        from drumline.serve.export.check import Subject
        from drumline.serve.export.export import check_new, export
    except ModuleNotFoundError as error:
        raise UsageError(f"export needs {error.name}", fix=installing("serve")) from None
    check_out_folder(args.out)
    check_new(args.out)
    with redirect_stdout(sys.stderr):  # the user's model may print
        model = finished_model(args.model, seed=args.seed, max_length=args.max_length)
        manifest = export(
            Subject(args.name or model.name, model.model, model.example, model.most),
            args.out,
            num_stages=args.stages,
            rows=args.rows,
            length=args.length,
            cuts=args.cuts.split(",") if args.cuts else None,
            tell=progress,
        )
    print_result(args, {"out": str(args.out), **manifest.to_json()}, _text(manifest, args.out))
    return 0


def _text(manifest: Manifest, out: Path) -> str:
    from drumline.core.units import size_text
    from drumline.report.draw.table import table

    rows = []
    for number, stage in enumerate(manifest.stages):
        size = sum(size for size, _ in stage.files.values())
        ends = stage.blocks[0] if len(stage.blocks) == 1 else f"{stage.blocks[0]} to {stage.blocks[-1]}"
        rows.append([str(number), ends, size_text(size), f"{stage.seconds * 1e3:.3g} ms"])
    check = manifest.check
    has_length = len(manifest.dimensions) > 1
    sizes = ", ".join(f"{rows}x{length}" if has_length else str(rows) for rows, length in check["sizes"])
    return "\n".join(
        [
            table(("stage", "blocks", "files", "time"), rows),
            f"largest difference to PyTorch: {check['largest_difference']:.3g}, {check['relative']:.2g} of the largest"
            f" output (at {'rows x length' if has_length else 'rows'} {sizes})",
            f"wrote {out}   (serve it: drumline serve {out})",
        ]
    )
