"""`drumline check FILE.csv`: the proof that a program can run, or every violation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial

from drumline.cli import flags
from drumline.cli.output import print_json
from drumline.core.channel import Queues
from drumline.core.prove.frozen import untrained
from drumline.core.prove.validate import validate
from drumline.report.summary import listed
from drumline.report.units import counts

# More than anybody reads; --json has them all.
MAX_PRINTED = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    flags.add_schedule(parser)
    flags.add_costs(parser)
    flags.add_limit(parser)
    flags.add_json(parser)
    flags.add_channel(
        parser,
        "what has one queue of messages where sends and receives are spelled out: a directed edge (Drumline's own "
        "transports, gloo), a pair of ranks or a rank (PyTorch over NCCL); what runs on `rank`, the default, runs on "
        "all",
    )
    parser.add_argument(
        "--placement", choices=flags.PLACEMENTS, help="where stages belong (default: where most of their work is)"
    )


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
    if args.json:
        print_json({"ok": not violations, "channel": args.channel, "violations": listed(violations)})
    elif violations:
        for violation in violations[:MAX_PRINTED]:
            print(violation)
        if len(violations) > MAX_PRINTED:
            print(f"... and {len(violations) - MAX_PRINTED} more (--json lists all)")
        count = f"{len(violations)} violation{'s' if len(violations) > 1 else ''}"
        freer = next((one for one in _freer(args.channel) if where and not proof(channel=one)), None)
        print(f"{count}: {program.name} cannot run{where if freer else ''}")
        if freer:
            print(f"with one per {freer.words} it can (--channel {freer})")
    else:
        frozen = "".join(f"; {what}" for what in untrained(program))
        print(
            f"{program.name} is proven: {counts(program)}, {program.num_actions} actions; "
            f"nothing is missing, nothing can hang{where}{frozen}"
        )
    return 1 if violations else 0


def _freer(channel: str) -> Sequence[Queues]:
    """Return the channels on which more can run, the strictest of them first."""
    kinds = list(Queues)
    return kinds[: kinds.index(Queues(channel))][::-1]
