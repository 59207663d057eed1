"""Whether a layout can be: every contradiction is refused with the value, what was expected, and the mend."""

from __future__ import annotations

from drumline.core.errors import PlanError, nearest
from drumline.plan.cluster.layout import RECOMPUTE, Layout
from drumline.plan.cluster.machine.hardware import Cluster
from drumline.plan.cluster.model.transformer import Transformer
from drumline.schedules import find

_COUNTS = ("batch", "microbatch", "tensor", "pipeline", "data", "context", "expert", "stages_per_rank")


def check(transformer: Transformer, cluster: Cluster, layout: Layout) -> None:
    """Raise PlanError where the layout contradicts itself, the model or the cluster."""
    _check_values(layout)
    _check_devices(cluster, layout)
    _check_model(transformer, layout)
    _check_batch(layout)
    schedule = find(layout.schedule)
    if (refused := schedule.refusal(layout.pipeline, layout.num_microbatches, layout.stages_per_rank)) is not None:
        raise PlanError(refused.error, expected=refused.expected, fix=refused.fix)


def _check_values(layout: Layout) -> None:
    for name in _COUNTS:
        value = getattr(layout, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PlanError(f"{name} is {value!r}", expected="a whole number of 1 or more")
    if layout.zero not in (0, 1, 2, 3):
        raise PlanError(f"zero is {layout.zero!r}", expected="0, 1, 2 or 3")
    if layout.recompute not in RECOMPUTE:
        raise PlanError(f"recompute is {layout.recompute!r}", fix=nearest(str(layout.recompute), RECOMPUTE))


def _check_devices(cluster: Cluster, layout: Layout) -> None:
    if layout.num_devices != cluster.num_devices:
        raise PlanError(
            f"tensor {layout.tensor} x pipeline {layout.pipeline} x data {layout.data} x context {layout.context}"
            f" are {layout.num_devices} devices",
            expected=f"{cluster.num_devices}, as the cluster has",
            fix=_other_data(cluster, layout),
        )
    if (layout.data * layout.context) % layout.expert:
        raise PlanError(
            f"{layout.expert} expert-parallel ranks among data {layout.data} x context {layout.context}",
            expected="a divisor of their product: experts are spread over those ranks",
        )


def _other_data(cluster: Cluster, layout: Layout) -> str:
    """Return the data parallelism that would make the mesh fit, or which of the others cannot be."""
    one = layout.tensor * layout.pipeline * layout.context
    if cluster.num_devices % one == 0:
        return f"data {cluster.num_devices // one} would do"
    return f"no data parallelism does: {one} does not divide {cluster.num_devices}"


def _check_model(transformer: Transformer, layout: Layout) -> None:
    widths = [("heads", transformer.num_heads), ("feed-forward width", transformer.feedforward)]
    if transformer.experts is not None:
        widths.append(("width of experts", transformer.experts.feedforward))
    for name, count in widths:
        if count % layout.tensor:
            raise PlanError(
                f"{count} {name} of {transformer.name} on {layout.tensor} tensor-parallel ranks",
                expected=f"a tensor parallelism that divides {count}",
            )
    parts = layout.tensor * layout.context if layout.sequence_parallel else layout.context
    if transformer.sequence % parts:
        raise PlanError(
            f"sequences of {transformer.sequence} tokens on {parts} ranks",
            expected="a number of ranks that divides them",
        )
    if layout.expert > 1 and (transformer.experts is None or transformer.experts.num_experts % layout.expert):
        num_experts = transformer.experts.num_experts if transformer.experts else 0
        raise PlanError(
            f"{num_experts} experts of {transformer.name} on {layout.expert} expert-parallel ranks",
            expected="a divisor of the number of experts" if num_experts else "expert=1 for a model without experts",
        )
    if transformer.num_layers < layout.num_stages and not layout.counts:
        raise PlanError(
            f"{transformer.num_layers} layers of {transformer.name} in {layout.num_stages} stages",
            expected="at least one layer per stage",
            fix="use fewer pipeline ranks or fewer stages per rank",
        )
    if layout.counts and (
        len(layout.counts) != layout.num_stages
        or sum(layout.counts) != transformer.num_layers
        or min(layout.counts) < 0
    ):
        raise PlanError(
            f"counts {layout.counts} are {sum(layout.counts)} layers in {len(layout.counts)} stages",
            expected=f"{transformer.num_layers} layers in {layout.num_stages} stages",
        )


def _check_batch(layout: Layout) -> None:
    each = layout.data * layout.microbatch
    if layout.batch % each:
        raise PlanError(
            f"a batch of {layout.batch} on data {layout.data} x microbatch {layout.microbatch}",
            expected=f"a multiple of {each}",
            fix=f"{layout.batch - layout.batch % each or each} would do",
        )
