"""How to start a plan: the torchrun command, and the settings for torchtitan and Megatron-LM.

Drumline's own file holds the whole plan as TOML; this is version 1, and `drumline train` reads it. It trains models
that its own GPT can express or that come from a Hugging Face folder. Where it cannot run a plan, `missing` says why,
and the command shows the schedule; see `own`.

    format = "drumline-train"        [batch]     sequences, microbatch (both in sequences), sequence (tokens)
    version = 1                      [mesh]      tensor, pipeline, data, context, expert
    [model]  name and its numbers    [pipeline]  schedule, stages_per_rank, layers (of every stage, in order)
    [precision]  as planned          [memory]    zero, recompute, sequence_parallel

The other files hold what the framework can express. `missing` lists the rest, one sentence each.

The order of ranks on the cluster follows one rule: **tensor innermost, then context, then data, and the pipeline
outermost**. Tensor parallelism communicates in every layer and stays inside a node. A pipeline communicates least, once
per stage and microbatch, and spans the longest distance. Rank ((p x DP + d) x CP + c) x TP + t has stage p, replica d,
context piece c and tensor piece t.

    16 devices in nodes of 8, TP4 PP2 DP2:   node 0   d0: t0 t1 t2 t3   d1: t0 t1 t2 t3    p0
                                             node 1   d0: t0 t1 t2 t3   d1: t0 t1 t2 t3    p1

Megatron-LM calls this order tp-cp-ep-dp-pp, and torchtitan's mesh is pp, dp, cp, tp, so both place ranks the same way.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, NamedTuple

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.frozen_base import FrozenBase
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.practice import PRACTICE
from drumline.plan.cluster.transformer import PLAIN, Transformer
from drumline.plan.launch.megatron import connections, megatron
from drumline.plan.launch.own import differs, drops_less, not_run, said_of_model, zero_of
from drumline.plan.launch.releases import Release, arguments, flattened, release
from drumline.plan.launch.titan import titan
from drumline.plan.launch.toml import document

FORMAT = "drumline-train"
VERSION = 1
AXES = ("tensor", "context", "data", "pipeline")


@dataclass(frozen=True, slots=True)
class Config:
    """The config for one framework: the command, a file with its settings, and what it cannot express.

    If the framework cannot start the plan (`starts`), the command shows the plan as far as possible; it may be empty.
    """

    framework: str
    command: str
    file: str
    text: str
    missing: tuple[str, ...] = ()
    starts: bool = True


@dataclass(frozen=True, slots=True)
class Launch:
    """A plan's configs, one per framework."""

    configs: tuple[Config, ...]

    def of(self, framework: str) -> Config:
        """Return the config for a framework."""
        configs = {config.framework: config for config in self.configs}
        if framework not in configs:
            raise PlanError(f"unknown framework {framework!r}", fix=nearest(framework, configs))
        return configs[framework]

    def written_to(self, framework: str, file: str) -> Launch:
        """Return the same with the config of a framework in a file of another name.

        >>> Launch((Config("drumline", "drumline train plan.toml", "plan.toml", ""),)).written_to("drumline", "a.toml")
        Launch(configs=(Config(framework='drumline', command='drumline train a.toml', file='a.toml', ...),))
        """
        own_config = self.of(framework)
        named = replace(own_config, command=own_config.command.replace(own_config.file, shlex.quote(file)), file=file)
        return Launch(tuple(named if config is own_config else config for config in self.configs))

    def to_json(self) -> dict[str, Any]:
        """Return the configs by name."""
        names = ("command", "starts", "file", "text")
        return {
            config.framework: {**{name: getattr(config, name) for name in names}, "missing": list(config.missing)}
            for config in self.configs
        }


def launch(
    transformer: Transformer,
    cluster: Cluster,
    layout: Layout,
    *,
    source: str = "",
    program_file: str = "",
    releases: Mapping[str, str] | None = None,
) -> Launch:
    """Return the configs for every framework; `source` is the folder or config.json of the model.

    `program_file` holds a searched program, which only `drumline train` runs, as it alone trains adapters. `releases`
    says for which release of a framework to write; by default it is the newest of those whose facts are known.
    """
    own_config = _own_config(transformer, cluster, layout, source, program_file)
    if program_file or transformer.frozen_base is not None:
        return Launch((own_config,))
    chosen = releases or {}
    titans, megatrons = (release(name, chosen.get(name, "")) for name in ("torchtitan", "megatron"))
    by_titan, by_megatron = (
        _titan(transformer, cluster, layout, titans),
        _megatron(transformer, cluster, layout, megatrons),
    )
    return Launch((own_config, by_titan, by_megatron))


def _titan(transformer: Transformer, cluster: Cluster, layout: Layout, facts: Release) -> Config:
    tables, missing = titan(transformer, layout)
    missing += other_states(layout, facts.name)
    refused = facts.refusals({**flattened(tables), "$WORLD_SIZE": cluster.num_devices})
    command = f"{torchrun(cluster)} -m torchtitan.train --job.config_file plan.toml"
    reasons = _refused(facts, refused) + _no_slices(facts, layout)
    text = document(tables, comment="\n".join(_head(facts, reasons, missing)))
    return Config("torchtitan", command, "plan.toml", text, (*reasons, *missing), starts=not reasons)


def _megatron(transformer: Transformer, cluster: Cluster, layout: Layout, facts: Release) -> Config:
    lines, missing = megatron(transformer, layout, facts)
    missing += other_states(layout, facts.name)
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": connections(layout)}
    known = {"WORLD_SIZE": cluster.num_devices, **environment}
    refused = facts.refusals({**arguments("\n".join(lines)), **{f"${name}": value for name, value in known.items()}})
    variables = " ".join(f"{name}={value}" for name, value in environment.items())
    command = f"grep -v '^#' plan.args | {variables} xargs {torchrun(cluster)} pretrain_gpt.py"
    reasons = _refused(facts, refused) + _no_slices(facts, layout)
    text = "\n".join([*(f"# {line}" for line in _head(facts, reasons, missing)), *lines])
    return Config("megatron", command, "plan.args", text, (*reasons, *missing), starts=not reasons)


def _refused(facts: Release, refused: Sequence[str]) -> list[str]:
    return [f"{facts.name} {facts.release} refuses {what}" for what in refused]


def _no_slices(facts: Release, layout: Layout) -> list[str]:
    if layout.slices == 1:
        return []
    return [f"{facts.name} runs no slices of sequences, and the plan has {layout.slices} (--slices 1 plans without)"]


def _head(facts: Release, reasons: Sequence[str], missing: Sequence[str]) -> list[str]:
    """Return what a file says of itself."""
    head = [f"Written by `drumline plan` for {facts.name} {facts.release} ({facts.tag})."]
    if reasons:
        head += ["It does not run:", *(f"- {reason}" for reason in reasons)]
    return [*head, "Not expressed:", *(f"- {name}" for name in missing)]


def _own_config(transformer: Transformer, cluster: Cluster, layout: Layout, source: str, program_file: str) -> Config:
    """Return what Drumline itself is told."""
    reasons = tuple(not_run(transformer, cluster, layout, source=source))
    others = (*differs(transformer, layout, source=source), *other_states(layout, "drumline"))
    said = [f"Not run by `drumline train`: {name}" for name in reasons] or [f"Not expressed: {name}" for name in others]
    text = train_config(transformer, layout, source=source, said=said, program_file=program_file)
    if reasons:
        shown = f"drumline show {program_file}" if program_file else show_command(layout)
        return Config("drumline", shown, "plan.toml", text, reasons, starts=False)
    return Config("drumline", train_command(cluster), "plan.toml", text, others)


def other_states(layout: Layout, framework: str) -> list[str]:
    """Return what to say if a plan counts on another optimizer than AdamW with state in 32 bits.

    >>> other_states(Layout(batch=8), "torchtitan")
    []
    """
    if (name := layout.practice.optimizer) == PRACTICE.optimizer:
        return []
    size = layout.practice.states.state_bytes
    return [f"optimizer states {name}, {size:g} bytes a parameter: choose the optimizer of {framework} that holds them"]


def train_command(cluster: Cluster) -> str:
    """Return the line that trains by a plan: one command on one node, torchrun on several.

    >>> from drumline.plan.cluster.hardware import cluster
    >>> train_command(cluster("h100", 4))
    'drumline train plan.toml'
    """
    flag = cluster.num_devices <= cluster.devices_per_node
    train = "drumline train plan.toml"
    return train if flag else f"{torchrun(cluster, backend='drumline')} -m {train}"


def torchrun(cluster: Cluster, *, backend: str = "c10d") -> str:
    """Return the command that starts the processes on every node.

    `backend` is the rendezvous: torchrun's own, or "drumline", which comes with Drumline and listens on one address.

    >>> from drumline.plan.cluster.hardware import cluster
    >>> torchrun(cluster("h100", 4))
    'torchrun --standalone --nproc-per-node 4'
    """
    local = min(cluster.devices_per_node, cluster.num_devices)
    nodes = cluster.num_devices // local
    if nodes == 1:
        return f"torchrun --standalone --nproc-per-node {local}"
    return torchrun_between_hosts(str(nodes), str(local), backend=backend)


def torchrun_between_hosts(nodes: str, per_node: str, *, backend: str, interface: str = "") -> str:
    """Return the command that starts the processes of one of several nodes.

    >>> torchrun_between_hosts("2", "8", backend="drumline")
    'torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend drumline --rdzv-endpoint $HEAD_NODE:29500'
    """
    words = ["torchrun", "--nnodes", nodes, "--nproc-per-node", per_node, "--rdzv-backend", backend]
    words += ["--rdzv-endpoint", "$HEAD_NODE:29500", *(["--rdzv-conf", f"interface={interface}"] if interface else [])]
    return " ".join(word if word.startswith("$") else shlex.quote(word) for word in words)


def show_command(layout: Layout) -> str:
    """Return the command that shows a layout's schedule; empty without a pipeline.

    >>> show_command(Layout(batch=8, pipeline=2, data=2, schedule="zb-v", stages_per_rank=2, counts=(1, 1, 1, 1)))
    'drumline show zb-v --ranks 2 --microbatches 4 --stages-per-rank 2'
    """
    if layout.pipeline == 1:
        return ""
    more = f" --stages-per-rank {layout.stages_per_rank}" if layout.stages_per_rank > 1 else ""
    more += f" --slices {layout.slices}" if layout.slices > 1 else ""
    return f"drumline show {layout.schedule} --ranks {layout.pipeline} --microbatches {layout.num_microbatches}{more}"


def train_config(
    transformer: Transformer, layout: Layout, *, source: str = "", said: Sequence[str] = (), program_file: str = ""
) -> str:
    """Return the whole plan as Drumline's own config, with what is `said` of it on top.

    `source` is the folder or config.json of the model, `program_file` the program to run instead of the schedule.
    """
    nested = ("experts", "latent", "details", "sequence", "frozen_base")
    model: dict[str, Any] = {"kind": "hf", "path": source} if source else {}
    model |= {field.name: getattr(transformer, field.name) for field in fields(transformer) if field.name not in nested}
    details = transformer.details
    for name, part in (("experts", transformer.experts), ("latent", transformer.latent)):
        if part is not None:
            model |= {f"{name}_{text}": value for text, value in asdict(part).items()}
    own_names = (field.name for field in fields(details))
    model |= {name: getattr(details, name) for name in own_names if getattr(details, name) != getattr(PLAIN, name)}
    for name in ("norm", "norm_epsilon", "activation"):
        if name not in said_of_model(transformer):
            model.pop(name, None)
    if drops_less(transformer, layout, source=source):
        model["attention_dropout"] = 0.0
    inner = "expert, context" if layout.expert > 1 and layout.context > 1 else "context"
    first = f"Written by `drumline plan`. Ranks count tensor first, then {inner}, data, and the pipeline last."
    return document(
        {
            "format": FORMAT,
            "version": VERSION,
            "model": model,
            **_adapter(transformer.frozen_base),
            "batch": {"sequences": layout.batch, "microbatch": layout.microbatch, "sequence": transformer.sequence},
            "mesh": {name: getattr(layout, name) for name in ("tensor", "pipeline", "data", "context", "expert")},
            "pipeline": {
                "schedule": program_file or layout.schedule,
                **({} if program_file else {"stages_per_rank": layout.stages_per_rank}),
                **({"slices": layout.slices} if layout.slices > 1 else {}),
                "layers": list(layout.counts),
            },
            "memory": {
                "zero": zero_of(layout),
                "recompute": layout.recompute,
                "sequence_parallel": layout.sequence_parallel and layout.tensor > 1,
            },
            # What plans count with: 2 bytes for a weight, 4 for its gradient, 12 for copy and state.
            "precision": {
                "compute": "fp8" if layout.practice.fp8 else "bf16",
                "weights": "bf16",
                "master_weights": True,
            },
        },
        comment="\n".join([first, *said]),
    )


def _adapter(base: FrozenBase | None) -> dict[str, Any]:
    """Return the table of an adapter, if nothing else is trained."""
    if base is None or not base.rank:
        return {}
    targets = {"targets": list(base.targets)} if base.targets else {}
    return {"adapter": {"method": "lora", "rank": base.rank, "base": base.kind, **targets}}


class RankPlace(NamedTuple):
    """Where a rank is, and which part of the work it has."""

    node: int
    tensor: int
    context: int
    data: int
    pipeline: int


def place(layout: Layout, cluster: Cluster, rank: int) -> RankPlace:
    """Return the place of a rank.

    >>> from drumline.plan.cluster.hardware import cluster
    >>> place(Layout(batch=4, tensor=4, pipeline=2, data=2), cluster("h100", 16), 13)
    RankPlace(node=1, tensor=1, context=0, data=1, pipeline=1)
    """
    if not 0 <= rank < layout.num_devices:
        raise PlanError(f"there is no rank {rank}", expected=f"a rank from 0 to {layout.num_devices - 1}")
    rest, tensor = divmod(rank, layout.tensor)
    rest, context = divmod(rest, layout.context)
    pipeline, data = divmod(rest, layout.data)
    return RankPlace(rank // cluster.devices_per_node, tensor, context, data, pipeline)


def first_places(layout: Layout, cluster: Cluster) -> dict[int, RankPlace]:
    """Return the places of the ranks in the first nodes of the first two stages, enough to show the order."""
    per_node, stride = cluster.devices_per_node, layout.tensor * layout.context * layout.data
    nodes = sorted({start // per_node + more for start in (0, stride) for more in (0, 1)})
    ranks = (rank for node in nodes for rank in range(node * per_node, (node + 1) * per_node))
    return {rank: place(layout, cluster, rank) for rank in ranks if rank < layout.num_devices}


def links(layout: Layout, cluster: Cluster) -> dict[str, str]:
    """Return, for every axis with more than one rank, whether its groups stay inside a node.

    >>> from drumline.plan.cluster.hardware import cluster
    >>> links(Layout(batch=4, tensor=4, pipeline=2, data=2), cluster("h100", 16))
    {'tensor': 'inside a node', 'data': 'inside a node', 'pipeline': 'between nodes'}
    """
    inside, names = 1, {}
    for axis in AXES:
        size = getattr(layout, axis)
        inside *= size
        if size > 1:
            # A group that does not divide a node evenly crosses into the next one somewhere.
            stays = inside <= cluster.devices_per_node and cluster.devices_per_node % inside == 0
            names[axis] = "inside a node" if stays else "between nodes"
    return names
