"""`drumline plan MODEL`: the layout of a transformer on a cluster, with its reasons."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import progress, report, save, terminal_width
from drumline.core.errors import UsageError
from drumline.core.files import is_regular

if TYPE_CHECKING:
    from drumline.plan.cluster.hardware import Cluster
    from drumline.plan.cluster.transformer import Transformer
    from drumline.plan.layouts.explain import Explanation
    from drumline.plan.layouts.planner import ClusterPlan
    from drumline.plan.layouts.space import Pins

_GIB = 2**30
_DEGREES = ("tensor", "pipeline", "data", "context", "expert", "microbatch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what planning for a cluster takes; the subject is the dispatcher's."""
    group = parser.add_argument_group("a model on a cluster")
    whole = flags.whole_number
    group.add_argument("--hardware", metavar="NAME", help="of a device, like h100, or a JSON file of its numbers")
    group.add_argument("--gpus", type=whole, metavar="N", help="devices of the cluster")
    group.add_argument("--nodes", type=whole, metavar="N", help="nodes of the cluster, instead of --gpus")
    group.add_argument("--gpus-per-node", type=whole, metavar="N", help="devices of a node (default: the hardware's)")
    group.add_argument("--sequence", type=whole, metavar="N", help="tokens of a sequence (default: the model's)")
    group.add_argument("--top", type=whole, metavar="N", default=10, help="how many meshes to explain (default 10)")
    group.add_argument("--brief", action="store_true", help="the plan alone, without the plans that explain it")
    group.add_argument(
        "--launch",
        choices=("drumline", "torchtitan", "megatron"),
        default="drumline",
        help="whose command to print, and whose config --out FILE.toml writes (default drumline)",
    )
    pins = parser.add_argument_group("what is decided already")
    for name in _DEGREES:
        pins.add_argument(f"--{name}", type=whole, metavar="N", help=_PINS[name])
    pins.add_argument("--zero", type=whole, metavar="N", help="ZeRO stage: 0, 1, 2 or 3")
    pins.add_argument("--recompute", metavar="HOW", help="none, selective or full")
    pins.add_argument("--no-sequence-parallel", action="store_true", help="keep it out of tensor parallelism")


_PINS = {
    "tensor": "tensor parallelism",
    "pipeline": "pipeline ranks",
    "data": "data parallelism",
    "context": "context parallelism",
    "expert": "expert parallelism",
    "microbatch": "sequences of a microbatch",
}


def run(args: argparse.Namespace) -> int:
    """Plan, explain, print and write."""
    from drumline.plan.layouts.explain import brief, explain
    from drumline.report.plan.text import plan_text

    _check(args)
    planned = _planned(args)
    if args.brief:
        told = brief(planned)
    else:
        progress("planning what more would buy")
        told = explain(planned)
        progress("")
    if args.out is not None:
        save(args.out, _WRITERS[args.out.suffix](args, told))
    text = "" if args.json else plan_text(told, width=terminal_width(), framework=args.launch)
    report(args, text, told.to_json() if args.json else {}, gap="\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    needed = ("hardware", "batch") if args.nodes is not None else ("hardware", "batch", "gpus")
    flags.require(args, *needed, example=f"plan {args.subject} --hardware h100 --gpus 64 --batch 256")
    flags.check_counts(args, "gpus", "nodes", "gpus_per_node", "batch", "sequence", "top", *_DEGREES)
    if args.out is not None and args.out.suffix not in _WRITERS:
        raise UsageError(f"--out is {args.out}", expected=f"a name that ends in {', '.join(_WRITERS)}")
    if args.out is not None and args.brief and args.out.suffix in (".html", ".svg"):
        raise UsageError(f"--out is {args.out}, with --brief", fix="a page shows the reasons: leave --brief out")


def _planned(args: argparse.Namespace) -> ClusterPlan:
    from drumline.plan.layouts.planner import HEADROOM, plan

    headroom = HEADROOM if args.headroom is None else args.headroom
    return plan(_model(args), _cluster(args), batch=args.batch, pins=_pins(args), headroom=headroom, top=args.top)


def _model(args: argparse.Namespace) -> Transformer:
    from drumline.plan.cluster.hugging_face import read_config
    from drumline.plan.cluster.models import model

    subject = str(args.subject)
    path = Path(subject)
    if os.path.isdir(path) and is_regular(path / "config.json"):
        path = path / "config.json"
    found = read_config(path) if path.suffix == ".json" else model(subject)
    return found if args.sequence is None else replace(found, sequence=args.sequence)


def _cluster(args: argparse.Namespace) -> Cluster:
    from drumline.plan.cluster.hardware import cluster

    per_node = args.gpus_per_node or cluster(args.hardware, 1).devices_per_node
    gpus = args.gpus if args.gpus is not None else args.nodes * per_node
    if args.nodes is not None and args.gpus_per_node is None and gpus % args.nodes == 0:
        per_node = gpus // args.nodes
    if args.nodes is not None and args.nodes * per_node != gpus:
        raise UsageError(
            f"--nodes {args.nodes} x --gpus-per-node {per_node} are {args.nodes * per_node} devices, --gpus is {gpus}",
            fix="leave one of them out",
        )
    found = replace(cluster(args.hardware, gpus), devices_per_node=per_node)
    if args.memory is None:
        return found
    return replace(found, device=replace(found.device, memory_bytes=args.memory))


def _pins(args: argparse.Namespace) -> Pins:
    from drumline.plan.layouts.space import Pins

    return Pins(
        **{name: getattr(args, name) for name in _DEGREES},
        stages_per_rank=args.stages_per_rank,
        zero=args.zero,
        recompute=args.recompute,
        sequence_parallel=False if args.no_sequence_parallel else None,
        schedules=tuple(args.schedules or ()),
    )


def _html(args: argparse.Namespace, told: Explanation) -> str:
    from drumline.report.plan.page import plan_page

    assert told.reasons is not None, "a page with --brief is refused"
    return plan_page(told, told.reasons)


def _svg(args: argparse.Namespace, told: Explanation) -> str:
    from drumline.report.plan.page import best_svg

    return best_svg(told.plan).rstrip("\n")


def _json(args: argparse.Namespace, told: Explanation) -> str:
    import json

    return json.dumps(told.to_json(), indent=2, allow_nan=False)


def _config(args: argparse.Namespace, told: Explanation) -> str:
    config = told.launch.of(args.launch)
    if Path(config.file).suffix != args.out.suffix:
        raise UsageError(
            f"--out is {args.out}, and {args.launch} takes {config.file}",
            fix=f"give --out {args.out.with_suffix(Path(config.file).suffix)}",
        )
    return config.text


_WRITERS: dict[str, Callable[[argparse.Namespace, Explanation], str]] = {
    ".html": _html,
    ".svg": _svg,
    ".json": _json,
    ".toml": _config,
    ".args": _config,
}
