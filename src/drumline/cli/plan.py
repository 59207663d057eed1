"""`drumline plan SUBJECT`: what to run a model by, from its profile on this device or from its sizes on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

from drumline.cli import flags, plan_cluster, plan_profile
from drumline.core.errors import UsageError
from drumline.core.files import is_regular
from drumline.plan.device.model_profile import is_profile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes: what both kinds of subject share, then the flags of each."""
    parser.add_argument(
        "subject",
        metavar="SUBJECT",
        help="a JSON file of `drumline profile`; or, for a cluster, a model's name or its config.json",
    )
    whole = flags.whole_number
    parser.add_argument("--batch", type=whole, metavar="B", help="rows (sequences) of a step")
    parser.add_argument("--memory", type=flags.size, metavar="BYTES", help="of a rank (device), like 8e9 or 8GiB")
    parser.add_argument("--headroom", type=flags.number, metavar="SHARE", help="of the memory that stays free (0.1)")
    parser.add_argument("--schedules", type=flags.names, metavar="NAME,...", help="to choose from (default: all)")
    parser.add_argument("--stages-per-rank", type=whole, metavar="V", help="number of stages on each rank")
    parser.add_argument("--out", type=Path, metavar="FILE", help="FILE.json; of a cluster .html, .svg, .toml, .args")
    flags.add_json(parser)
    plan_profile.add_arguments(parser)
    plan_cluster.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Hand over to the half that the subject is for."""
    if is_profile(args.subject):
        _refuse(args, plan_cluster.add_arguments, "a model on a cluster, and this is a profile")
        return plan_profile.run(args)
    if args.subject.endswith(".json") and not is_regular(args.subject):
        raise UsageError(
            f"{args.subject}: no such file",
            expected="a JSON file that `drumline profile --out FILE.json` wrote, or a Hugging Face model's config.json",
        )
    _refuse(args, plan_profile.add_arguments, "a profile, and this is a model on a cluster")
    return plan_cluster.run(args)


def _refuse(args: argparse.Namespace, others: Callable[[argparse.ArgumentParser], None], subject: str) -> None:
    """Refuse flags that the other kind of subject has."""
    parser = argparse.ArgumentParser(add_help=False)
    others(parser)
    for action in parser._actions:
        if getattr(args, action.dest) != action.default:
            raise UsageError(f"{action.option_strings[0]} is for {subject}", fix="leave it out")
