"""`drumline plan SUBJECT`: decide how to run a model, from its profile on this device or for a cluster by its sizes."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from drumline.cli import flags, plan_calibrated, plan_cluster, plan_profile
from drumline.cli.output import TEXTS, Paper, deliver
from drumline.core.errors import UsageError
from drumline.plan.device.model_profile import is_profile

EXAMPLE = "drumline plan gpt-1.7b --hardware a100-40 --gpus 8 --batch 16 --brief"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments: those that both kinds of subject share, then those of each."""
    add, whole = flags.adder(parser), flags.whole_number
    profile = "a JSON file from `drumline profile` (- reads stdin)"
    add("SUBJECT", f"{profile}; for a cluster, the name of a model or its config.json", flags.file, nargs="?")
    add("--list", "list the named models and hardware")
    add("--batch B", "rows (sequences) per step (required)", whole)
    memory = "memory of a rank, like 8e9 or 8GiB (default: no limit for a profile, the hardware's for a cluster)"
    add("--memory BYTES", memory, flags.size)
    add("--headroom SHARE", "share of the memory to keep free (default 0.1)", flags.number)
    add("--schedules NAME,...", "schedules to choose from (default: all)", flags.names)
    add("--stages-per-rank V", "number of stages on each rank (default: any)", whole)
    formats = plan_profile.FORMATS | plan_cluster.FORMATS
    meaning = "write FILE.json, .html, .svg or .txt; the config of a training run as .toml, for megatron as .args"
    flags.add_out(parser, formats, meaning)
    flags.add_json(parser)
    plan_profile.add_arguments(parser)
    plan_cluster.add_arguments(parser)
    plan_calibrated.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Call the planner for this kind of subject."""
    if args.list:
        return _list(args)
    if args.subject is None:
        fix = "run `drumline plan --list` to list the models"
        raise UsageError("SUBJECT is missing", expected="a profile, or the name of a model", fix=fix)
    if not is_profile(args.subject) and plan_calibrated.is_for(args):
        return plan_calibrated.run(args, plan_cluster.model_of(args))
    _refuse(args, plan_calibrated.add_arguments, "a device that `drumline calibrate` measured")
    if is_profile(args.subject):
        _refuse(args, plan_cluster.add_arguments, "a model on a cluster, but this is a profile")
        return plan_profile.run(args)
    model = plan_cluster.model_of(args)  # before any flag: what is missing or too much depends on the subject
    _refuse(args, plan_profile.add_arguments, f"a profile, but {args.subject} is a model on a cluster")
    return plan_cluster.run(args, model)


def _refuse(args: argparse.Namespace, others: Callable[[argparse.ArgumentParser], None], subject: str) -> None:
    """Raise an error for flags of the other kind of subject."""
    parser = argparse.ArgumentParser(add_help=False)
    others(parser)
    for action in parser._actions:
        if getattr(args, action.dest) != action.default:
            raise UsageError(f"{action.option_strings[-1]} is for {subject}", fix="omit it")


def _list(args: argparse.Namespace) -> int:
    """List the named models and hardware."""
    from drumline.core.units import size_text
    from drumline.plan.cluster.hardware import MACHINES
    from drumline.plan.cluster.models import MODELS
    from drumline.report.draw.table import table

    models = {name: {"layers": t.num_layers, "hidden": t.hidden, "sequence": t.sequence} for name, t in MODELS.items()}
    devices = {name: machine.device for name, machine in MACHINES.items()}

    def make(form: str, paper: Paper) -> str:
        rows = [[name, *map(str, model.values())] for name, model in models.items()]
        kinds = [
            [name, device.name, size_text(device.memory_bytes), f"{device.flops_per_second / 1e12:.0f}"]
            for name, device in devices.items()
        ]
        known = table(["model", "layers", "hidden size", "sequence"], rows, width=paper.width)
        header = ["hardware", "device", "memory", "TFLOP/s"]
        return f"{known}\n\n{table(header, kinds, width=paper.width, left=2, keep=('memory',))}"

    hardware = {name: {"device": device.name, "memory_bytes": device.memory_bytes} for name, device in devices.items()}
    args.formats = TEXTS
    deliver(args, make, lambda: {"models": models, "hardware": hardware}, instead=True)
    return 0
