"""`drumline check FILE.csv`: the proof that a program can run, or every violation."""

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
from drumline.report.summary import listed
from drumline.report.units import counts

# More than anybody reads; --json has them all.
MAX_PRINTED = 1000

EXAMPLE = "drumline check zb-v --ranks 4 --microbatches 8 --placement v"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    flags.add_schedule(parser)
    flags.add_costs(parser)
    flags.add_limit(parser)
    flags.add_json(parser)
    flags.add_out(parser, TEXTS)
    flags.add_channel(
        parser,
        "what shares one queue of messages, for programs that have sends and receives: a directed edge (Drumline's own "
        "transports, gloo), a pair of ranks or a rank (PyTorch over NCCL). What runs on `rank`, the default, runs on "
        "all of them",
    )
    belongs = "how stages must be laid on ranks (default: each where most of its work is)"
    parser.add_argument("--placement", choices=flags.PLACEMENTS, help=belongs)


def run(args: argparse.Namespace) -> int:
    """Check one program; exit 1 if anything is wrong with it."""
    program, costs = flags.program_of(args), flags.costs_of(args)
    proof = partial(
        validate,
        program,
        placement=flags.placement_of(args.placement, program),
        limit=flags.limit_of(args, costs),
        costs=costs,
    )
    violations = proof(channel=args.channel)
    where = f" with one queue of messages per {Queues(args.channel).words}" if program.has_communication else ""

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
        freer = next((one for one in _freer(args.channel) if where and not proof(channel=one)), None)
        lines.append(f"{counted(len(violations), 'violation')}: {program.name} cannot run{where if freer else ''}")
        if freer:
            lines.append(f"with one per {freer.words} it can (--channel {freer})")
        return "\n".join(lines)

    deliver(args, make, lambda: {"ok": not violations, "channel": args.channel, "violations": listed(violations)})
    return 1 if violations else 0


def _freer(channel: str) -> Sequence[Queues]:
    """Return the channels on which more can run, the strictest of them first."""
    kinds = list(Queues)
    return kinds[: kinds.index(Queues(channel))][::-1]
