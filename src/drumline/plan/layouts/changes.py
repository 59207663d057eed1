"""The chosen layout with one setting changed, and the traffic of its opposite: all weights gathered, no pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from drumline.core.errors import PlanError
from drumline.plan.cluster.layout import RECOMPUTE, Layout
from drumline.plan.layouts.cut import layer_counts
from drumline.plan.layouts.pins import ZERO, Pins
from drumline.plan.layouts.planner import ClusterPlan
from drumline.plan.layouts.space import layouts, microbatch_sizes, schedules_of
from drumline.plan.layouts.survey import Candidate
from drumline.plan.layouts.why import why


@dataclass(frozen=True, slots=True)
class Change:
    """One setting changed, what that gives, and why it is not the choice."""

    what: str
    candidate: Candidate
    why: str


def changes(plan: ClusterPlan) -> list[Change]:
    """Return the chosen layout with every single setting changed, whether it fits or not, the fastest first."""
    found = []
    for what, layout in _changed(plan):
        one = plan.survey.cut(layout, plan.limit_bytes)
        found.append(Change(what, one, why(plan.chosen, one, plan.limit_bytes)))
    return sorted(found, key=lambda one: (one.candidate.bytes > plan.limit_bytes, one.candidate.seconds))


def _changed(plan: ClusterPlan) -> Iterator[tuple[str, Layout]]:
    layout, mesh = plan.chosen.layout, plan.chosen.mesh
    for recompute in RECOMPUTE:
        if recompute != layout.recompute:
            words = "no recomputation" if recompute == "none" else f"{recompute} recomputation"
            yield words, replace(layout, recompute=recompute)
    for zero in ZERO if mesh.data * mesh.context > 1 else ():
        if zero != layout.zero:
            yield f"ZeRO {zero}", replace(layout, zero=zero)
    for name, stages in schedules_of(plan.transformer, mesh, layout.num_microbatches, Pins()):
        if (name, stages) != (layout.schedule, layout.stages_per_rank):
            words = f"{name}, {stages} stages per rank" if stages > 1 else name
            counts = layer_counts(plan.transformer, mesh.pipeline, name, stages)
            yield words, replace(layout, schedule=name, stages_per_rank=stages, counts=counts)
    for size in microbatch_sizes(plan.batch, mesh, Pins()):
        admitted = schedules_of(plan.transformer, mesh, plan.batch // (mesh.data * size), Pins())
        if size != layout.microbatch and (layout.schedule, layout.stages_per_rank) in admitted:
            yield f"microbatches of {size}", replace(layout, microbatch=size)
    if layout.sequence_parallel:
        yield "no sequence parallelism", replace(layout, sequence_parallel=False)


def against_fsdp(plan: ClusterPlan) -> list[tuple[str, Candidate]]:
    """Return the choice beside the fastest layout that shards everything and has no pipeline, fitting or not.

    Where the choice itself has no pipeline, the fastest of those that have one stands beside it, too.
    """
    rows = [("chosen", plan.chosen)]
    if plan.chosen.layout.pipeline == 1:
        rows += [("with a pipeline", one) for one in plan.best if one.layout.pipeline > 1][:1]
    try:
        every = list(layouts(plan.transformer, plan.cluster, plan.batch, Pins(pipeline=1, zero=3)))
    except PlanError:  # fewer sequences than devices, even with all of a node on one of them
        return rows
    sharded = [plan.survey.exact(layout) for layout in every]
    fitting = [one for one in sharded if one.bytes <= plan.limit_bytes] or sharded
    return [*rows, ("FSDP, no pipeline", min(fitting, key=lambda one: one.rank))]
