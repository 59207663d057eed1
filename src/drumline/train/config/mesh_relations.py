"""What must fit together on a mesh: axes with each other, with the model, and with what is divided or left out."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.core.errors import DrumlineError
from drumline.train.config.problems import Problem
from drumline.train.config.relations import Judged, program_of, relation


@relation("mesh.expert", "mesh.data")
def _experts_are_shared_out(judged: Judged) -> Iterator[Problem]:
    mesh = judged.settings.mesh
    if mesh.data % mesh.expert:
        yield judged.problem(
            "mesh.expert",
            f"is {mesh.expert}",
            f"a divisor of mesh.data, {mesh.data}, whose ranks share out the experts",
        )


@relation("mesh.expert", "model.kind")
def _model_has_experts(judged: Judged) -> Iterator[Problem]:
    size, kind = judged.settings.mesh.expert, judged.settings.model.kind
    if size > 1 and kind in ("gpt", "mlp"):
        yield judged.problem(
            "mesh.expert", f"is {size}, and the built-in {kind.upper()} has no experts", "1",
            'train a model with experts: kind = "hf" and path = its folder, or a function with dl.MoE',
        )  # fmt: skip


@relation("memory.zero", "mesh.data", "mesh.expert", "mesh.pipeline", "pipeline.schedule", "pipeline.plan")
def _state_is_divided(judged: Judged) -> Iterator[Problem]:
    zero, mesh = judged.settings.memory.zero, judged.settings.mesh
    if zero == 2:
        yield judged.problem("memory.zero", "is 2", "0, 1 or 3", "use 1, or 3 to divide parameters too")
    elif zero and mesh.data == 1:
        yield judged.problem("memory.zero", f"is {zero}, and mesh.data is 1", "0", "raise mesh.data, or set it to 0")
    elif zero and mesh.data == mesh.expert:
        yield judged.problem(
            "memory.zero", f"is {zero}, and all {mesh.data} data-parallel ranks hold different experts",
            "0, or a mesh.data above mesh.expert", "raise mesh.data, or set it to 0",
        )  # fmt: skip
    elif zero == 3 and _holds_copies(judged):
        yield judged.problem(
            "memory.zero", f"is 3, and {judged.settings.pipeline.schedule} holds each stage on two ranks",
            "0 or 1, or a schedule with one copy of each stage",
        )  # fmt: skip


def _holds_copies(judged: Judged) -> bool:
    """Whether each stage is on two ranks of a pipeline; another relation tells if there is no program."""
    try:
        return bool(program_of(judged.settings, judged.plan).placement.mirrored)
    except DrumlineError:
        return False


@relation(
    "mesh.tensor", "model.dropout", "model.attention_dropout", "model.num_heads", "model.num_key_value_heads",
    "model.kind",
)  # fmt: skip
def _heads_are_divided(judged: Judged) -> Iterator[Problem]:
    model, tensor = judged.settings.model, judged.settings.mesh.tensor
    if tensor == 1 or model.kind != "gpt":
        return
    for name in ("num_heads", "num_key_value_heads"):
        if getattr(model, name) % tensor:
            yield judged.problem(f"model.{name}", f"is {getattr(model, name)}", f"a multiple of mesh.tensor, {tensor}")
    if drops := model.dropout if model.attention_dropout is None else model.attention_dropout:
        key = "model.dropout" if model.attention_dropout is None else "model.attention_dropout"
        yield judged.problem(
            key, f"is {drops:g}, and mesh.tensor is {tensor}",
            "no dropout in attention: each rank would draw for its own heads", "set model.attention_dropout = 0",
        )  # fmt: skip


@relation("memory.sequence_parallel", "mesh.tensor")
def _tokens_are_divided(judged: Judged) -> Iterator[Problem]:
    if judged.settings.memory.sequence_parallel and judged.settings.mesh.tensor == 1:
        yield judged.problem(
            "memory.sequence_parallel", "is true, and mesh.tensor is 1", "false", "raise mesh.tensor, or leave it out"
        )


@relation("mesh.context", "batch.sequence", "lengths.how", "evaluation.sample_every")
def _sequences_divide(judged: Judged) -> Iterator[Problem]:
    settings, context = judged.settings, judged.settings.mesh.context
    if context == 1:
        return
    if settings.batch.sequence % context:
        yield judged.problem(
            "batch.sequence", f"is {settings.batch.sequence}", f"a multiple of mesh.context, {context}"
        )
    if settings.lengths.how != "blocks":
        yield judged.problem(
            "lengths.how", f'is "{settings.lengths.how}", and mesh.context is {context}', '"blocks"',
            "masks of documents and padding are made for whole sequences: set mesh.context = 1 for them",
        )  # fmt: skip
    if settings.evaluation.sample_every:
        yield judged.problem(
            "evaluation.sample_every", f"is {settings.evaluation.sample_every}, and mesh.context is {context}", "0"
        )


@relation("failures.elastic", "mesh.data", "mesh.context", "mesh.tensor", "mesh.expert")
def _elastic_leaves_lines_out(judged: Judged) -> Iterator[Problem]:
    mesh = judged.settings.mesh
    if judged.settings.failures.elastic and mesh.num_lines > 1 and mesh.axes["dp"] == 1:
        yield judged.problem(
            "failures.elastic", f"is true, and no data-parallel pipeline of {mesh.num_lines} can be left out",
            "the pipeline axis alone, or a mesh.data above mesh.expert", "leave it out, and use failures.restarts",
        )  # fmt: skip


@relation("failures.min_ranks", "failures.elastic", "mesh.pipeline", "mesh.data", "mesh.context", "mesh.tensor")
def _fewest_are_fewer(judged: Judged) -> Iterator[Problem]:
    failures, ranks, mesh = judged.settings.failures, judged.settings.num_ranks, judged.settings.mesh
    if failures.elastic and failures.min_ranks > ranks:
        what = "mesh.pipeline" if mesh.num_lines == 1 else "the ranks of the mesh"
        yield judged.problem("failures.min_ranks", f"is {failures.min_ranks}", f"at most {what}, {ranks}")
