"""What if: plan again with one setting changed, more of something, or fewer or more devices.

- `changes`: the chosen layout with one setting changed; `against_fsdp`: the opposite, sharded weights and no pipeline.
- `margins`: the gain from a GPU, a node, a larger cluster, a GiB, more memory; `pareto`: speed by memory.
- `scaling`: the same question on fewer and on more devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from drumline.core.errors import PlanError
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.stages import layer_counts
from drumline.plan.device.advice import Remedy
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.frameworks import ZERO
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import ClusterPlan, fastest
from drumline.plan.layouts.slice_survey import in_slices, numbers_beside, runs_slices
from drumline.plan.layouts.space import layouts, schedules_of
from drumline.plan.layouts.why import Alternative, settings, why_not

_GIB = 2**30
_STEPS = (1.125, 1.25, 1.5, 2.0)  # multiples of the nodes to try, until one is faster
_LIMITS = 12  # memory limits in the plot of throughput against memory
_NOTHING = 5e-4  # share of the throughput; a smaller gain counts as none
_ROOMIEST = 1.5  # multiple of the limit at which that plot ends


def margins(plan: ClusterPlan) -> list[Remedy]:
    """Return what one more device, one more node, a larger cluster, and more memory would gain."""
    remedies = [_devices(plan, 1, "one more GPU")]
    per_node, devices = plan.cluster.devices_per_node, plan.cluster.num_devices
    if devices % per_node == 0 and per_node > 1:
        remedies.append(_devices(plan, per_node, "one more node"))
    for times in _STEPS:
        nodes = max(round(devices / per_node * times), 1)
        more = nodes * per_node - devices
        if more <= per_node:
            continue
        remedy = _devices(plan, more, f"{more} more GPUs")
        if remedy.gain >= _NOTHING:
            remedies.append(remedy)
            break
    roomier = plan.limit_bytes + _GIB
    remedies.append(_margin(plan, "one more GiB per device", devices, roomier, fastest(plan.survey, roomier)))
    return remedies + _next_memory(plan)


def _devices(plan: ClusterPlan, more: int, what: str) -> Remedy:
    """Plan on more devices; devices that no layout uses stay idle."""
    devices = plan.cluster.num_devices + more
    return _margin(plan, what, devices, plan.limit_bytes, planned(plan, devices, plan.batch))


def _margin(plan: ClusterPlan, what: str, devices: int, limit: float, best: Choice | None) -> Remedy:
    """Return the gain of the best plan with additional resources, if a plan uses them."""
    fields = {"devices": devices, "limit_bytes": limit}
    if best is None:
        return Remedy(what, f"{what}: no gain, no layout uses them all", settings=fields)
    gain = max(plan.chosen.seconds / best.seconds - 1, 0.0)
    bought = f"{gain:.1%} more tokens per second, with {settings(best, plan.chosen)}"
    said = bought if gain >= _NOTHING else "no gain, no layout is faster"
    return Alternative(what, f"{what}: {said}", gain, fields, choice=best)


def planned(plan: ClusterPlan, devices: int, batch: int) -> Choice | None:
    """Return the best layout that uses all of another number of devices; degrees are free, settings stay pinned."""
    known, asked = plan.survey.elsewhere, (devices, batch, plan.limit_bytes)
    if asked not in known:
        known[asked] = _planned(plan, devices, batch)
    return known[asked]


def _planned(plan: ClusterPlan, devices: int, batch: int) -> Choice | None:
    per_node = min(plan.cluster.devices_per_node, devices)
    if devices % per_node:
        return None
    cluster = replace(plan.cluster, num_devices=devices, devices_per_node=per_node)
    pins = replace(plan.pins, data=None, pipeline=None)
    try:
        survey = replace(plan.survey, cluster=cluster, batch=batch, pins=pins)
    except PlanError:  # no mesh exists
        return None
    return fastest(survey, plan.limit_bytes)


def _next_memory(plan: ClusterPlan) -> list[Remedy]:
    """Return the smallest amount of memory that gains at least half a percent, if there is one."""
    for point in pareto(plan):
        gain = plan.chosen.seconds / point.seconds - 1
        if point.bytes > plan.limit_bytes and gain > 5e-3:
            more = point.bytes - plan.limit_bytes
            what = f"{more / _GIB:.1f} GiB more per device"
            remedy = _margin(plan, what, plan.cluster.num_devices, point.bytes, point)
            return [remedy] if more > _GIB else []
    return []


def pareto(plan: ClusterPlan) -> list[Choice]:
    """Return the fastest layout for each amount of memory, smallest first: no other is both smaller and faster.

    The plan's own stands for those within its limit that are faster by less than a forecast can tell.
    """
    smallest = plan.survey.smallest()
    assert smallest is not None, "a plan has a layout"
    low, high = smallest.bytes, _ROOMIEST * plan.limit_bytes
    limits = [low + (high - low) * at / (_LIMITS - 1) for at in range(_LIMITS)]
    every = filter(None, (fastest(plan.survey, limit) for limit in limits))
    others = (item for item in every if item.bytes > plan.limit_bytes or item.seconds > plan.chosen.seconds)
    choices = [plan.chosen, *others]
    front: list[Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.bytes, choice.seconds)):
        if not front or choice.seconds < front[-1].seconds:
            front.append(choice)
    return front


def changes(plan: ClusterPlan) -> list[Alternative]:
    """Return the chosen layout with every single setting changed, whether it fits or not, the fastest first."""
    limit = plan.limit_bytes
    cost = in_slices(plan.survey).cost
    why_nots = [why_not(plan.chosen, cost(layout, limit), limit, what) for what, layout in _every_change(plan)]
    return sorted(why_nots, key=lambda alternative: (alternative.choice.bytes > limit, alternative.choice.seconds))


def _every_change(plan: ClusterPlan) -> Iterator[tuple[str, Layout]]:
    """Yield the chosen layout with one setting changed, and what that is; of slices, those that run."""
    layout = plan.chosen.layout
    if layout.slices == 1:
        yield from _changed(plan)
        return
    yield "whole sequences", replace(layout, slices=1)
    for changed in numbers_beside(plan.transformer, layout):
        yield f"{changed.slices} slices", changed
    yield from ((what, changed) for what, changed in _changed(plan) if runs_slices(changed))


def _changed(plan: ClusterPlan) -> Iterator[tuple[str, Layout]]:
    layout, mesh = plan.chosen.layout, plan.chosen.mesh
    for recompute in Pins().recomputations(plan.transformer):
        if recompute != layout.recompute:
            changed = replace(layout, recompute=recompute)
            yield changed.recomputation, changed
    for zero in ZERO if mesh.data * mesh.context > 1 else ():
        if zero != layout.zero:
            yield f"ZeRO {zero}", replace(layout, zero=zero)
    for name, stages in schedules_of(plan.transformer, mesh, layout.num_microbatches, Pins()):
        if (name, stages) != (layout.schedule, layout.stages_per_rank):
            words = f"{name}, {stages} stages per rank" if stages > 1 else name
            counts = layer_counts(plan.transformer, mesh.pipeline, name, stages)
            yield words, replace(layout, schedule=name, stages_per_rank=stages, counts=counts)
    for size in Pins().microbatch_sizes(plan.batch, mesh):
        admitted = schedules_of(plan.transformer, mesh, plan.batch // (mesh.data * size), Pins())
        if size != layout.microbatch and (layout.schedule, layout.stages_per_rank) in admitted:
            yield f"microbatches of {size}", replace(layout, microbatch=size)
    if layout.sequence_parallel:
        yield "no sequence parallelism", replace(layout, sequence_parallel=False)


def against_fsdp(plan: ClusterPlan) -> list[tuple[str, Choice]]:
    """Return the choice and the fastest layout that shards everything without a pipeline, whether it fits or not.

    If the choice itself has no pipeline, the fastest layout with a pipeline is included too.
    """
    rows = [("chosen", plan.chosen)]
    if plan.chosen.layout.pipeline == 1:
        rows += [("with a pipeline", choice) for choice in plan.best if choice.layout.pipeline > 1][:1]
    pins = Pins(pipeline=1, zero=3, overlaps=plan.pins.overlaps, precision=plan.pins.precision)
    try:
        every = list(layouts(plan.transformer, plan.cluster, plan.batch, pins))
    except PlanError:  # fewer sequences than devices, even with a whole node per sequence
        return rows
    sharded = [plan.survey.exact(layout) for layout in every]
    fitting = [choice for choice in sharded if choice.bytes <= plan.limit_bytes] or sharded
    return [*rows, ("FSDP, no pipeline", min(fitting, key=lambda choice: choice.rank))]


TIMES = (Fraction(1, 4), Fraction(1, 2), Fraction(1), Fraction(2), Fraction(4))


@dataclass(frozen=True, slots=True)
class ScalePoint:
    """The best plan on this many devices; None if nothing fits.

    `efficiency` is its throughput per device, relative to the smallest plan that fits.
    """

    devices: int
    batch: int
    best: Choice | None
    efficiency: float | None


def scaling(plan: ClusterPlan) -> dict[str, list[ScalePoint]]:
    """Return plans on other numbers of devices: `strong` with the same batch, `weak` with one that grows with them."""
    return {"strong": _scaled(plan, growing=0), "weak": _scaled(plan, growing=1)}


def _scaled(plan: ClusterPlan, growing: int) -> list[ScalePoint]:
    """Return plans for multiples of the devices, with the batch times that multiple to the power of `growing`."""
    points, first = [], 0.0
    for times in TIMES:
        devices, batch = plan.cluster.num_devices * times, plan.batch * times**growing
        if not devices.denominator == batch.denominator == 1:
            continue
        best = plan.chosen if times == 1 else planned(plan, int(devices), int(batch))
        share = None
        if best is not None:
            rate = int(batch) / best.seconds / int(devices)
            first = first or rate
            share = rate / first
        points.append(ScalePoint(int(devices), int(batch), best, share))
    return points
