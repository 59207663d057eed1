"""`drumline verify [SCHEDULE]`: run a model pipelined and in one process, and compare the two."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import TEXTS, deliver, progress, pytorch, wrapped
from drumline.core.errors import counted

if TYPE_CHECKING:
    from drumline.verification.result import Verification

_MOST_NAMED = 5
_RANKS = 2
EXAMPLE = "drumline verify zb-h1 --ranks 2 --microbatches 4 --transport in-process"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    flags.add_schedule(parser, optional=" (default 1f1b)", ranks=_RANKS)
    parser.set_defaults(schedule="1f1b")
    add, whole = flags.adder(parser), flags.whole_number
    add("--model FILE.py:NAME", "a function that returns (model, loss_fn, batch, target) (default: a small MLP)")
    ways = ("auto", "in-process", "shared-memory", "gloo")
    how = "how messages travel between processes; in-process makes the ranks take turns in one"
    add("--transport", how, ways, "auto")
    add("--checkpoint", "which activations to recompute", ("none", "full"), "none")
    add("--dropout P", "dropout of the small MLP", flags.number, 0.0)
    meaning = "axes of a mesh with their sizes, like pp=2,dp=2: pp, dp, cp, ep and tp (default: a pipeline alone)"
    add("--mesh AXIS=N,...", meaning, flags.mesh)
    add("--zero N", "what dp divides: 1 optimizer state, 3 all", whole, 0)
    add("--sequence-parallel", "with tp, also divide the tokens between its layers")
    add("--slices S", "number of slices of every sequence, or the tokens of each, like 7,6,3", flags.listed(whole))
    add("--steps N", "training steps to compare, each with another batch", whole, 2)
    add("--seed S", "random seed", whole, 0)
    flags.add_out(parser, TEXTS)
    flags.add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Run both, and say whether they match."""
    program = flags.program_of(args, ranks=args.mesh.get("pp", 1) if args.mesh else _RANKS)
    with pytorch("verify runs a model"):
        from drumline.verification.verify import verify
    progress(f"{program.name}: {counted(args.steps, 'step')} on {counted(program.num_ranks, 'rank')} ...")
    with redirect_stdout(sys.stderr):  # the user's model may print
        verification = verify(
            program,
            model=args.model,
            transport=args.transport,
            checkpoint=args.checkpoint,
            dropout=args.dropout,
            num_steps=args.steps,
            seed=args.seed,
            mesh=args.mesh,
            zero=args.zero,
            sequence_parallel=args.sequence_parallel,
            slices=flags.slices_of(args),
        )
    deliver(args, lambda form, paper: _text(verification, paper.width), verification.summary)
    return 0 if verification.passes else 1


def _text(result: Verification, width: int) -> str:
    from drumline.report.draw.table import table

    numbers = (
        (result.num_ranks, "rank"),
        (result.num_stages, "stage"),
        (result.num_microbatches, "microbatch"),
        *([(result.num_slices, "slice")] if result.num_slices > 1 else []),
        (result.num_steps, "step"),
    )
    rows = [
        ["loss", f"{result.loss_difference:.3g}", ""],
        ["gradients", f"{result.gradient_difference:.3g}", result.worst_parameter],
        ["weights", f"{result.weight_difference:.3g}", ""],
    ]
    mesh = f"{result.mesh}, {f'ZeRO {result.zero}, ' if result.zero else ''}" if result.mesh else ""
    sizes = ", ".join(counted(*number) for number in numbers)
    head = f"{result.schedule}: {mesh}{sizes}, {result.transport} on {result.devices.places}"
    over = {name: value for name, value in result.gradient_differences.items() if value > result.tolerance}
    worst = sorted(over, key=over.__getitem__, reverse=True)
    steps = f" in {counted(result.num_steps, 'step')}"
    if result.identical:
        verdict = f"The pipeline matches single-process training{steps}: all bits are equal."
    elif result.passes:
        verdict = f"The pipeline matches single-process training{steps}, up to rounding "
        verdict += f"({result.tolerance:.3g} allowed)."
    else:
        allowed = f"{result.tolerance:.3g} is allowed" if result.tolerance else "all bits must be equal"
        verdict = f"The pipeline does not match single-process training: {allowed}."
        if worst:
            more = f" and {len(worst) - _MOST_NAMED} more" if len(worst) > _MOST_NAMED else ""
            verdict += f" Wrong gradients: {', '.join(worst[:_MOST_NAMED])}{more}."
            verdict += f" {_where(result)}"
    turns = " as they took turns" if result.transport == "in-process" else ""
    batches = (
        ""
        if result.num_steps == 1
        else "; every step had another batch"
        if result.batches_differ
        else ("; every step had the same batch")
    )
    idle = f"measured{turns}: ranks idle for {result.bubble:.1%} of the last step, of a small model mostly for messages"
    tail = f"loss {result.loss:.6g}{batches}; {idle}"
    shown = table(["", "largest difference", "of parameter"], rows, width=width, keep=("largest difference",))
    return "\n".join([wrapped(head, width), shown, wrapped(verdict, width), wrapped(tail, width)])


def _where(result: Verification) -> str:
    """Return where to look for the cause: gradients flow from the last block to the first."""
    if result.loss_difference > result.tolerance:
        first = result.first_wrong_parameter
        return f"The loss differs too: look for the cause in the forward. The first in model order: {first}."
    last, behind = result.last_wrong_parameter, result.first_right_parameter
    until = f", and at what follows it up to {behind}, which is right" if behind else ""
    return f"Gradients flow from the model's end to its start: look first at {last}, the last that is wrong{until}."
