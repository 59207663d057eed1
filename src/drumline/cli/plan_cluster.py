"""`drumline plan MODEL`: choose the layout of a transformer on a cluster, with reasons."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from drumline.cli import flags
from drumline.cli.output import PICTURES, TEXTS, Paper, deliver, files_of, progress, seldom_collected
from drumline.core.errors import PlanError, UsageError
from drumline.core.files import FileKind, is_regular, read_object

if TYPE_CHECKING:
    from drumline.plan.cluster.hardware import Cluster
    from drumline.plan.cluster.transformer import Transformer
    from drumline.plan.layouts.explain import Explanation
    from drumline.plan.layouts.pins import Pins
    from drumline.plan.layouts.planner import ClusterPlan

FORMATS = TEXTS | PICTURES | {".toml": "config", ".args": "config", ".csv": "program"}
_SUBJECT = "a JSON file that `drumline profile --out FILE.json` wrote, or a Hugging Face model's folder or config.json"
_ENDINGS = {"drumline": ".toml", "torchtitan": ".toml", "megatron": ".args"}
_RELEASES = {"torchtitan": ("0.2",), "megatron": ("0.14", "0.13")}  # as in `plan.launch.releases`
STATES = ("adamw", "adamw-bf16", "adamw-8bit", "muon")  # as in `plan.cluster.practice`
BASES = ("bf16", "int8", "float8", "int4", "nf4")
_DEGREES = {
    "tensor": "degree of tensor parallelism",
    "pipeline": "number of pipeline ranks",
    "data": "degree of data parallelism",
    "context": "degree of context parallelism",
    "expert": "degree of expert parallelism",
    "microbatch": "sequences per microbatch",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of planning for a cluster, except the subject."""
    add, whole = flags.adder(parser, "a model on a cluster"), flags.whole_number
    add("--hardware NAME", "name of the hardware, like h100, or a JSON file with its numbers (required)")
    add("--gpus N", "number of devices in the cluster (required, or --nodes)", whole)
    add("--nodes N", "number of nodes, instead of --gpus", whole)
    add("--gpus-per-node N", "devices per node (default: the hardware's)", whole)
    add("--sequence N", "tokens per sequence (default: the model's)", whole)
    add("--top N", "number of meshes to show and explain", whole, 10)
    add("--brief", "print only the plan, without what-ifs, scaling and traffic")
    whose = "plan only what this framework runs (default: anything, and the command and config of drumline)"
    add("--launch", whose, (*_ENDINGS, *(name for framework in _RELEASES for name in _releases(framework))))
    what = "software to assume by framework and release, like megatron@0.14, nemo@25.09 or torchtitan@0.2"
    add("--software NAME", f"{what} (default: --launch's, or megatron@0.14)")
    also = "messages that your software also hides behind compute: forward (tensor-parallel ones), experts, context"
    add("--overlap WHAT,...", also, flags.names)
    add(
        "--search S", "seconds to search programs for the best layouts, in addition to the schedules", flags.number, 0.0
    )
    numbers = "precision of products with weights: bf16, or fp8 on devices that have it"
    add("--precision", numbers, ("bf16", "fp8"), "bf16")
    states = "what the optimizer holds: AdamW in 32 bits, its averages in 16 or 8 bits, or Muon"
    add("--optimizer-states", states, STATES, "adamw")
    add = flags.adder(parser, "adapters on a frozen model")
    add("--adapter", "train only an adapter of this kind", ("lora",))
    add("--adapter-rank N", "rank of the adapter's matrices (default 8)", whole)
    add(
        "--adapter-targets NAME,...",
        "layers that get an adapter, like q_proj,v_proj (default: all linear ones)",
        flags.names,
    )
    add("--base", "precision of the frozen model (default bf16)", BASES)
    add = flags.adder(parser, "decisions to fix (default: the planner makes all of them)")
    for name, meaning in _DEGREES.items():
        add(f"--{name} N", meaning, whole)
    add("--zero N", "ZeRO stage: 0, 1, 2 or 3", whole)
    add("--recompute HOW", "activations to recompute: none, selective, ops, full, full:N or operations")
    add("--slices N", "number of slices of every sequence; 1 plans without slices", whole)
    add("--no-sequence-parallel", "plan tensor parallelism without sequence parallelism")


def _releases(framework: str) -> list[str]:
    """Return the names of a framework's releases on the command line."""
    return [f"{framework}@{release}" for release in _RELEASES[framework]]


def run(args: argparse.Namespace, model: Transformer) -> int:
    """Plan, explain, print and write."""
    _check(args)
    with seldom_collected():
        return _run(args, _adapted(args, model if args.sequence is None else replace(model, sequence=args.sequence)))


def _adapted(args: argparse.Namespace, model: Transformer) -> Transformer:
    """Return the model with nothing but an adapter to train, where one is asked for."""
    from drumline.plan.cluster.adapters import ALL_LINEAR, with_adapters

    if args.adapter is None:
        for flag in ("adapter_rank", "adapter_targets", "base"):
            if getattr(args, flag) is not None:
                name = f"--{flag.replace('_', '-')}"
                raise UsageError(f"{name} is given, but no adapter", expected="--adapter lora", fix=f"omit {name}")
        return model
    if args.framework not in ("", "drumline"):
        raise UsageError(
            f"--launch {args.framework} with --adapter", expected="--launch drumline, which trains adapters"
        )
    if args.framework == "drumline":  # which divides no layer that has adapters
        for axis in ("tensor", "expert"):
            if (size := getattr(args, axis)) not in (None, 1):
                raise UsageError(f"--{axis} is {size}, with --adapter", expected=f"--{axis} 1: layers stay whole")
            setattr(args, axis, 1)
    rank = 8 if args.adapter_rank is None else args.adapter_rank
    return with_adapters(model, rank, targets=args.adapter_targets or ALL_LINEAR, base=args.base or "bf16")


def _run(args: argparse.Namespace, model: Transformer) -> int:
    from drumline.plan.layouts.explain import brief, explain
    from drumline.report.plan.text import plan_text

    planned = _planned(args, model)
    file = next((path for path, form in files_of(args) if form == "config"), None)
    program = _program_file(args, planned, file)
    if args.brief:
        explanation = brief(planned, source=_source(args), program_file=program)
    else:
        progress("planning what more hardware would gain")
        explanation = explain(planned, source=_source(args), program_file=program)
    if file is not None:
        explanation = replace(explanation, launch=explanation.launch.written_to(args.launch, str(file)))

    def make(form: str, paper: Paper) -> str:
        if form == "text":
            return plan_text(explanation, width=paper.width, framework=args.launch)
        if form == "program":
            assert planned.chosen.program is not None, "others are refused"
            return planned.chosen.program.format()
        return explanation.launch.of(args.launch).text if form == "config" else _picture(form, explanation)

    deliver(args, make, explanation.to_json, gap="\n")
    return 0


def _program_file(args: argparse.Namespace, planned: ClusterPlan, config: Path | None) -> str:
    """Return the file of a searched program: that of --out, or beside the config, where it is then written too."""
    named = next((path for path, form in files_of(args) if form == "program"), None)
    if named is not None and planned.chosen.program is None:
        raise UsageError(
            f"--out is {named}, but the plan runs the schedule {planned.chosen.schedule}",
            expected="a searched program that is more than 2% faster than every schedule",
            fix="omit it; `drumline show` writes the programs of schedules",
        )
    if named is None and config is not None and planned.chosen.program is not None:
        named = config.with_suffix(".csv")
        args.out.append(named)
    return str(named or "plan.csv")


def _check(args: argparse.Namespace) -> None:
    args.formats = FORMATS
    args.framework, _, args.release = (args.launch or "").partition("@")
    args.launch = args.framework or "drumline"
    needed = ("hardware", "batch") if args.nodes is not None else ("hardware", "batch", "gpus")
    flags.require(args, *needed, example=f"plan {args.subject} --hardware h100 --gpus 64 --batch 256")
    flags.check_counts(args, "gpus", "nodes", "gpus_per_node", "batch", "sequence", "top", "slices", *_DEGREES)
    for path, form in files_of(args):
        if args.brief and form in PICTURES.values():
            raise UsageError(f"--out is {path}, with --brief", fix="omit --brief: a page shows the reasons")
        if form == "config" and path.suffix.lower() != _ENDINGS[args.launch]:
            fix = f"use --out {path.with_suffix(_ENDINGS[args.launch])}"
            raise UsageError(f"--out is {path}, but {args.launch} takes plan{_ENDINGS[args.launch]}", fix=fix)


def _planned(args: argparse.Namespace, model: Transformer) -> ClusterPlan:
    from drumline.plan.layouts.planner import HEADROOM, plan

    headroom = HEADROOM if args.headroom is None else args.headroom
    return plan(
        model,
        _cluster(args),
        batch=args.batch,
        pins=_pins(args),
        headroom=headroom,
        top=args.top,
        search_seconds=args.search,
        say=progress,
    )


def _source(args: argparse.Namespace) -> str:
    """Return the folder or file that the model is read from; nothing for one that has a name."""
    subject = str(args.subject)
    is_folder = os.path.isdir(subject) and is_regular(Path(subject, "config.json"))
    return subject if is_folder or is_regular(subject) else ""


def model_of(args: argparse.Namespace) -> Transformer:
    """Return the model that SUBJECT names or describes; the error for one that does neither says what to pass."""
    from drumline.plan.cluster.hugging_face import read_config
    from drumline.plan.cluster.models import MODELS, model

    subject = str(args.subject)
    if subject.lower() in MODELS:
        return model(subject)
    source = _source(args)
    if not source and (os.sep in subject or subject.endswith(".json") or os.path.exists(subject)):
        if os.path.isdir(subject):
            raise UsageError(f"{subject} is a folder without config.json", expected=_SUBJECT)
        there = os.path.exists(subject)
        raise UsageError(f"{subject} is no regular file" if there else f"no such file: {subject}", expected=_SUBJECT)
    if not source:
        return model(subject)
    if os.path.isdir(source):
        return read_config(Path(source, "config.json"))
    content = read_object(
        source, FileKind("plan", PlanError, _SUBJECT)
    )  # a damaged profile does not say that it is one
    try:
        return read_config(source)
    except PlanError as error:
        if "model_type" in content:
            raise
        raise PlanError(error.error, expected=_SUBJECT, fix=error.fix) from None


def _cluster(args: argparse.Namespace) -> Cluster:
    from drumline.plan.cluster.hardware import cluster

    per_node = args.gpus_per_node or cluster(args.hardware, 1).devices_per_node
    gpus = args.gpus if args.gpus is not None else args.nodes * per_node
    if args.nodes is not None and args.gpus_per_node is None and gpus % args.nodes == 0:
        per_node = gpus // args.nodes
    if args.nodes is not None and args.nodes * per_node != gpus:
        raise UsageError(
            f"--nodes {args.nodes} x --gpus-per-node {per_node} is {args.nodes * per_node} devices, not --gpus {gpus}",
            fix="omit one of them",
        )
    found_cluster = replace(cluster(args.hardware, gpus), devices_per_node=per_node)
    if args.memory is None:
        return found_cluster
    return replace(found_cluster, device=replace(found_cluster.device, memory_bytes=args.memory))


def _pins(args: argparse.Namespace) -> Pins:
    from drumline.plan.layouts.pins import Pins

    return Pins(
        **{name: getattr(args, name) for name in _DEGREES},
        stages_per_rank=args.stages_per_rank,
        zero=args.zero,
        recompute=args.recompute,
        sequence_parallel=False if args.no_sequence_parallel else None,
        schedules=tuple(args.schedules or ()),
        framework=args.framework,
        release=args.release,
        overlaps=tuple(args.overlap or ()),
        precision=args.precision,
        software=args.software or "",
        optimizer=args.optimizer_states,
        slices=args.slices,
    )


def _picture(form: str, explanation: Explanation) -> str:
    from drumline.report.plan.page import best_svg, plan_page

    if form == "svg":
        return best_svg(explanation.plan).rstrip("\n")
    assert explanation.reasons is not None, "a page with --brief is refused"
    return plan_page(explanation, explanation.reasons)
