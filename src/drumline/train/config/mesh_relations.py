"""What must fit together where lines of a mesh or slices divide something: with each other, the model and the data."""

from __future__ import annotations

from collections.abc import Iterator

from drumline.train.config.problems import Problem
from drumline.train.config.relations import PlacedSettings, relation


@relation("mesh.expert", "mesh.data")
def experts_are_shared_out(judged: PlacedSettings) -> Iterator[Problem]:
    """Yield whether experts cannot be shared out evenly."""
    mesh = judged.settings.mesh
    if mesh.data % mesh.expert:
        yield judged.problem(
            "mesh.expert",
            f"is {mesh.expert}",
            f"a divisor of mesh.data, {mesh.data}, whose ranks share out the experts",
        )


@relation("mesh.expert", "model.kind")
def _model_has_experts(judged: PlacedSettings) -> Iterator[Problem]:
    size, kind = judged.settings.mesh.expert, judged.settings.model.kind
    if size > 1 and kind in ("gpt", "mlp"):
        yield judged.problem(
            "mesh.expert", f"is {size}, and the built-in {kind.upper()} has no experts", "1",
            'train a model with experts: kind = "hf" and path = its folder, or a function with dl.MoE',
        )  # fmt: skip


@relation("memory.zero")
def _state_is_divided(judged: PlacedSettings) -> Iterator[Problem]:
    if judged.settings.memory.zero == 2:
        yield judged.problem("memory.zero", "is 2", "0, 1 or 3", "use 1, or 3 to divide parameters too")


@relation(
    "mesh.tensor", "model.dropout", "model.attention_dropout", "model.num_heads", "model.num_key_value_heads",
    "model.kind",
)  # fmt: skip
def _heads_are_divided(judged: PlacedSettings) -> Iterator[Problem]:
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


@relation("mesh.context", "batch.sequence", "lengths.how", "evaluation.sample_every")
def _sequences_divide(judged: PlacedSettings) -> Iterator[Problem]:
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


@relation("pipeline.slices", "pipeline.plan", "batch.sequence", "lengths.how", "model.kind")
def slices_divide(judged: PlacedSettings) -> Iterator[Problem]:
    """Yield what slices cannot divide."""
    settings, slices = judged.settings, judged.slices
    if slices == 1:
        return
    if settings.model.kind == "mlp":
        yield judged.problem("pipeline.slices", f"is {_listed(slices)}, and points have no sequence", "1")
        return
    length, is_planned = settings.batch.sequence, settings.pipeline.slices != slices
    if isinstance(slices, tuple) and sum(slices) != length:
        yield judged.problem(
            "pipeline.plan" if is_planned else "pipeline.slices",
            f"has slices of {sum(slices)} tokens in all" if is_planned else f"has {sum(slices)} tokens in all",
            f"{length}, as batch.sequence says",
            "plan again for this length" if is_planned else "give a number of slices for equal ones",
        )  # fmt: skip
    elif isinstance(slices, int) and (length % slices or length < 2 * slices):
        yield judged.problem(
            "batch.sequence", f"is {length}", f"a multiple of pipeline.slices, {slices}, with 2 tokens in each",
            "choose another number of slices, or list the tokens of each",
        )  # fmt: skip
    if settings.lengths.how != "blocks":
        yield judged.problem(
            "lengths.how", f'is "{settings.lengths.how}", and pipeline.slices is {_listed(slices)}', '"blocks"',
            "masks of documents and padding are made for whole sequences: set pipeline.slices = 1 for them",
        )  # fmt: skip


def _listed(slices: int | tuple[int, ...]) -> str:
    return str(slices if isinstance(slices, int) else list(slices))


@relation("failures.min_ranks", "failures.elastic", "mesh.pipeline", "mesh.data", "mesh.context", "mesh.tensor")
def _fewest_are_fewer(judged: PlacedSettings) -> Iterator[Problem]:
    failures, ranks, mesh = judged.settings.failures, judged.settings.num_ranks, judged.settings.mesh
    if failures.elastic and failures.min_ranks > ranks:
        what = "mesh.pipeline" if mesh.num_lines == 1 else "the ranks of the mesh"
        yield judged.problem("failures.min_ranks", f"is {failures.min_ranks}", f"at most {what}, {ranks}")
