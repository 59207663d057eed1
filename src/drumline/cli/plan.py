"""`drumline plan SUBJECT`: what to run a model by, from its profile on this device or from its sizes on a cluster."""

from __future__ import annotations

import argparse
import importlib
from importlib.util import find_spec
from pathlib import Path

from drumline.cli import flags, plan_profile
from drumline.core.errors import UsageError
from drumline.plan.model_profile import is_profile

_CLUSTER = "drumline.cli.plan_cluster"
_GIB = 2**30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes: flags of both kinds of subject, and those that they share."""
    parser.add_argument(
        "subject",
        metavar="SUBJECT",
        help="a JSON file of `drumline profile`; or, for a cluster, a model's name or its config.json",
    )
    if find_spec(_CLUSTER) is not None:
        importlib.import_module(_CLUSTER).add_arguments(parser)
    plan_profile.add_arguments(parser)
    add = plan_profile.adder(parser)
    add("--batch", type=flags.whole_number, metavar="B", help="rows (sequences) of a step")
    add("--memory", type=flags.size, metavar="BYTES", help="of a rank (device), like 8e9 or 8GiB (default: no limit)")
    add("--headroom", type=flags.number, metavar="SHARE", help="of the memory that stays free")
    add("--stages-per-rank", type=flags.whole_number, metavar="V", help="number of stages on each rank (default: any)")
    add("--out", type=Path, metavar="FILE", help="FILE.json for Pipeline(plan=FILE); more for clusters")
    add("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Hand over to the half that the subject is for; both take memory and schedules by either flag."""
    gib = getattr(args, "memory_gib", None)
    one = getattr(args, "schedule", None)
    names = one.split(",") if isinstance(one, str) else one
    if is_profile(args.subject):
        args.memory = args.memory if args.memory is not None or gib is None else gib * _GIB
        args.schedules = args.schedules or names
        return plan_profile.run(args)
    if find_spec(_CLUSTER) is None or (args.subject.endswith(".json") and not Path(args.subject).is_file()):
        raise UsageError(
            f"{args.subject}: {'not a profile' if Path(args.subject).is_file() else 'no such file'}",
            expected="a JSON file that `drumline profile --out FILE.json` wrote",
        )
    args.memory_gib = gib if gib is not None or args.memory is None else args.memory / _GIB
    args.schedule = one if one is not None or not args.schedules else ",".join(args.schedules)
    code: int = importlib.import_module(_CLUSTER).run(args)
    return code
