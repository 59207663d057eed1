"""`drumline plan SUBJECT`: what to run a model by, from its profile on this device or from its sizes on a cluster."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from drumline.cli import flags, plan_cluster, plan_profile
from drumline.cli.output import TEXTS, Paper, deliver
from drumline.core.errors import UsageError
from drumline.core.files import is_regular
from drumline.plan.device.model_profile import is_profile

EXAMPLE = "drumline plan gpt-1.7b --hardware a100-40 --gpus 8 --batch 16 --brief"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what the verb takes: what both kinds of subject share, then the flags of each."""
    add, whole = parser.add_argument, flags.whole_number
    add(
        "subject",
        metavar="SUBJECT",
        nargs="?",
        type=flags.file,
        help="a JSON file from `drumline profile` (- reads it from stdin); or for a cluster, a model's name or its "
        "config.json",
    )
    add("--list", action="store_true", help="list the models and the hardware that have names")
    add("--batch", type=whole, metavar="B", help="rows (sequences) in a step (needed)")
    memory = "memory of a rank, like 8e9 or 8GiB (default: no limit for a profile, the hardware's for a cluster)"
    add("--memory", type=flags.size, metavar="BYTES", help=memory)
    add("--headroom", type=flags.number, metavar="SHARE", help="share of the memory to keep free (default 0.1)")
    add("--schedules", type=flags.names, metavar="NAME,...", help="schedules to choose from (default: all)")
    add("--stages-per-rank", type=whole, metavar="V", help="number of stages on each rank (default: any)")
    formats = plan_profile.FORMATS | plan_cluster.FORMATS
    meaning = "write FILE.json, .html, .svg or .txt; the config of a training run as .toml, for megatron as .args"
    flags.add_out(parser, formats, meaning)
    flags.add_json(parser)
    plan_profile.add_arguments(parser)
    plan_cluster.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Hand over to the half that the subject is for."""
    if args.list:
        return _list(args)
    if args.subject is None:
        fix = "`drumline plan --list` lists the models"
        raise UsageError("SUBJECT is missing", expected="a profile, or a model's name", fix=fix)
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
            raise UsageError(f"{action.option_strings[-1]} is for {subject}", fix="leave it out")


def _list(args: argparse.Namespace) -> int:
    """List the models and the hardware that have names."""
    from drumline.plan.cluster.hardware import MACHINES
    from drumline.plan.cluster.models import MODELS
    from drumline.report.table import table
    from drumline.report.units import size_text

    models = {
        name: {"layers": one.num_layers, "hidden": one.hidden, "sequence": one.sequence} for name, one in MODELS.items()
    }
    devices = {name: one.device for name, one in MACHINES.items()}

    def make(form: str, paper: Paper) -> str:
        rows = [[name, *map(str, one.values())] for name, one in models.items()]
        kinds = [
            [name, one.name, size_text(one.memory_bytes), f"{one.flops_per_second / 1e12:.0f}"]
            for name, one in devices.items()
        ]
        known = table(["model", "layers", "hidden size", "sequence"], rows, width=paper.width)
        header = ["hardware", "device", "memory", "TFLOP/s"]
        return f"{known}\n\n{table(header, kinds, width=paper.width, left=2, keep=('memory',))}"

    hardware = {name: {"device": one.name, "memory_bytes": one.memory_bytes} for name, one in devices.items()}
    args.formats = TEXTS
    deliver(args, make, lambda: {"models": models, "hardware": hardware}, instead=True)
    return 0
