"""`drumline check FILE.csv`: prove that a program can run, or list every violation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from drumline.cli import flags
from drumline.cli.output import TEXTS, Paper, deliver
from drumline.core.channel import Queues
from drumline.core.errors import counted
from drumline.core.prove.frozen import untrained
from drumline.core.prove.validate import validate
from drumline.report.summary import counts, listed

# The most violations to print; --json has them all.
MAX_PRINTED = 1000

EXAMPLE = "drumline check zb-v --ranks 4 --microbatches 8 --placement v"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    flags.add_schedule(parser)
    flags.add_costs(parser)
    flags.add_slices(parser)
    flags.add_limit(parser)
    flags.add_json(parser)
    flags.add_out(parser, TEXTS)
    flags.add_channel(
        parser,
        "which messages share a queue, if the program has sends and receives: those of a directed edge (Drumline's own "
        "transports, gloo); of a pair of ranks; of a rank (PyTorch over NCCL). A program that runs on `rank` (default) "
        "runs on all of them",
    )
    placed = "how stages must be placed on ranks (default: each on the rank with most of its work)"
    flags.adder(parser)("--placement", placed, flags.PLACEMENTS)


def run(args: argparse.Namespace) -> int:
    """Check one program; exit 1 if anything is wrong."""
    program, costs = flags.program_of(args), flags.costs_of(args)
    proof = partial(
        validate,
        program,
        placement=flags.placement_of(args.placement, program),
        limit=flags.limit_of(args, costs),
        costs=costs,
    )
    violations = proof(channel=args.channel)
    where = f" with one message queue per {Queues(args.channel).words}" if program.has_communication else ""

    def make(form: str, paper: Paper) -> str:
        if not violations:
            frozen = "".join(f"; {what}" for what in untrained(program))
            return (
                f"{program.name} is proven: {counts(program)}, {program.num_actions} actions; "
                f"nothing is missing, nothing can hang{where}{frozen}"
            )
        lines = [str(violation) for violation in violations[:MAX_PRINTED]]
        if len(violations) > MAX_PRINTED:
            lines.append(f"... and {len(violations) - MAX_PRINTED} more (--json lists all)")
        freer = next((queues for queues in _freer(args.channel) if where and not proof(channel=queues)), None)
        lines.append(f"{counted(len(violations), 'violation')}: {program.name} cannot run{where if freer else ''}")
        if freer:
            lines.append(f"it can run with one queue per {freer.words} (--channel {freer})")
        return "\n".join(lines)

    deliver(args, make, lambda: {"ok": not violations, "channel": args.channel, "violations": listed(violations)})
    return 1 if violations else 0


def _freer(channel: str) -> Sequence[Queues]:
    """Return the channels on which more programs can run, the strictest first."""
    kinds = list(Queues)
    return kinds[: kinds.index(Queues(channel))][::-1]
