"""`drumline check FILE.csv`: the proof that a program can run, or every violation."""

from __future__ import annotations

import argparse

from drumline.cli import flags
from drumline.cli.output import counts, print_json
from drumline.core.frozen import untrained
from drumline.core.validate import validate

# More than anybody reads; --json has them all.
MAX_PRINTED = 1000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes."""
    flags.add_schedule(parser)
    flags.add_costs(parser)
    flags.add_limit(parser)
    flags.add_json(parser)
    parser.add_argument(
        "--placement", choices=flags.PLACEMENTS, help="where stages belong (default: where most of their work is)"
    )


def run(args: argparse.Namespace) -> int:
    """Check one program; exit 1 if anything is wrong with it."""
    program, costs = flags.program_of(args), flags.costs_of(args)
    violations = validate(
        program,
        placement=flags.placement_of(args.placement, program),
        limit=flags.limit_of(args, costs),
        costs=costs,
    )
    if args.json:
        found = [
            {
                "rank": v.rank,
                "index": v.index,
                "action": None if v.action is None else str(v.action),
                "reason": v.reason,
            }
            for v in violations
        ]
        print_json({"ok": not violations, "violations": found})
    elif violations:
        for violation in violations[:MAX_PRINTED]:
            print(violation)
        if len(violations) > MAX_PRINTED:
            print(f"... and {len(violations) - MAX_PRINTED} more (--json lists all)")
        print(f"{len(violations)} violation{'s' if len(violations) > 1 else ''}: {program.name} cannot run")
    else:
        frozen = "".join(f"; {what}" for what in untrained(program))
        print(
            f"{program.name} is proven: {counts(program)}, {program.num_actions} actions; "
            f"nothing is missing, nothing can hang{frozen}"
        )
    return 1 if violations else 0
