"""`drumline verify [SCHEDULE]`: run a model pipelined and in one process, and compare the two."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import print_json, progress, pytorch, terminal_width, wrapped
from drumline.core.errors import counted

if TYPE_CHECKING:
    from drumline.pipeline.verify.verify import Verification

_MOST_NAMED = 5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    flags.add_schedule(parser, optional=True)
    parser.set_defaults(schedule="1f1b")
    parser.epilog = "Without more: 1f1b, on 2 ranks, with 8 microbatches."
    parser.add_argument(
        "--model",
        metavar="FILE.py:NAME",
        help="a function that returns (model, loss_fn, batch, target); a small MLP unless given",
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "in-process", "shared-memory", "gloo"),
        default="auto",
        help="what carries messages between processes; in-process: the ranks take turns in one (default auto)",
    )
    parser.add_argument(
        "--checkpoint", choices=("none", "full"), default="none", help="recompute activations (default none)"
    )
    parser.add_argument("--dropout", type=flags.number, default=0.0, metavar="P", help="of the MLP (default 0)")
    parser.add_argument("--steps", type=flags.whole_number, default=2, metavar="N", help="training steps (default 2)")
    parser.add_argument("--seed", type=flags.whole_number, default=0, metavar="S", help="of weights, data and dropout")
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run both, and say whether they agree."""
    from drumline.schedules import schedules

    if args.schedule in schedules():  # a file says its counts itself
        args.ranks = 2 if args.ranks is None else args.ranks
        args.microbatches = 8 if args.microbatches is None else args.microbatches
    program = flags.program_of(args)
    with pytorch("verify runs a model"):
        from drumline.pipeline.verify.verify import verify
    progress(f"{program.name}: {counted(args.steps, 'step')} on {counted(program.num_ranks, 'rank')} ...")
    try:
        with redirect_stdout(sys.stderr):  # where a model of the user's prints
            found = verify(
                program,
                model=args.model,
                transport=args.transport,
                checkpoint=args.checkpoint,
                dropout=args.dropout,
                num_steps=args.steps,
                seed=args.seed,
            )
    finally:
        progress("")
    if args.json:
        print_json(found.summary())
    else:
        print(_text(found))
    return 0 if found.passes else 1


def _text(result: Verification) -> str:
    from drumline.report.table import table

    width = terminal_width()
    numbers = (
        (result.num_ranks, "rank"),
        (result.num_stages, "stage"),
        (result.num_microbatches, "microbatch"),
        (result.num_steps, "step"),
    )
    rows = [
        ["loss", f"{result.loss_difference:.3g}", ""],
        ["gradients", f"{result.gradient_difference:.3g}", result.worst_parameter],
        ["weights", f"{result.weight_difference:.3g}", ""],
    ]
    head = f"{result.schedule}: {', '.join(counted(*one) for one in numbers)}, {result.transport}"
    over = {name: one for name, one in result.gradient_differences.items() if one > result.tolerance}
    worst = sorted(over, key=over.__getitem__, reverse=True)
    if result.identical:
        verdict = "The pipeline computes what one process computes: all bits agree."
    elif result.passes:
        verdict = f"The pipeline computes what one process computes, up to rounding ({result.tolerance:.3g} allowed)."
    else:
        allowed = f"{result.tolerance:.3g} is allowed" if result.tolerance else "all bits must agree"
        verdict = f"The pipeline does not compute what one process computes: {allowed}."
        if worst:
            more = f" and {len(worst) - _MOST_NAMED} more" if len(worst) > _MOST_NAMED else ""
            verdict += f" Off: the gradients of {', '.join(worst[:_MOST_NAMED])}{more}."
            verdict += f" The first in the model's order: {result.first_wrong_parameter}."
    turns = " between ranks that took turns" if result.transport == "in-process" else ""
    tail = f"loss {result.loss:.6g}; bubble measured{turns}: {result.bubble:.1%} of the last step"
    shown = table(["", "largest difference", "of parameter"], rows, width=width)
    return "\n".join([wrapped(head, width), shown, wrapped(verdict, width), wrapped(tail, width)])
