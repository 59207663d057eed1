"""What more would buy, found by planning again: a GPU, a node, a larger cluster, a GiB, as much memory as pays."""

from __future__ import annotations

from dataclasses import dataclass, replace

from drumline.core.errors import PlanError
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import ClusterPlan, chosen_of
from drumline.plan.layouts.survey import Candidate
from drumline.plan.layouts.why import settings

_GIB = 2**30
_STEPS = (1.125, 1.25, 1.5, 2.0)  # times the nodes, until one is faster
_LIMITS = 12  # of the picture of throughput against memory
_NOTHING = 5e-4  # of the throughput: less is no gain
_ROOMIEST = 1.5  # times the limit, where that picture ends


@dataclass(frozen=True, slots=True)
class Margin:
    """Something more, and the best plan with it; None where there is none that uses it."""

    what: str
    devices: int
    limit_bytes: float
    best: Candidate | None
    gain: float
    how: str = ""

    def __str__(self) -> str:
        if self.best is None:
            return f"{self.what}: nothing, no layout uses them all"
        if self.gain < _NOTHING:
            return f"{self.what}: nothing, no layout is faster then"
        return f"{self.what}: {self.gain:.1%} more tokens a second, as {self.how}"


def margins(plan: ClusterPlan) -> list[Margin]:
    """Return what one more device, one more node, a larger cluster, and more memory would buy."""
    found = [_devices(plan, 1, "one more GPU")]
    per_node, devices = plan.cluster.devices_per_node, plan.cluster.num_devices
    if devices % per_node == 0 and per_node > 1:
        found.append(_devices(plan, per_node, "one more node"))
    for times in _STEPS:
        nodes = max(round(devices / per_node * times), 1)
        more = nodes * per_node - devices
        if more <= per_node:
            continue
        one = _devices(plan, more, f"{more} more GPUs")
        if one.gain >= _NOTHING:
            found.append(one)
            break
    found.append(_memory(plan, _GIB, "one more GiB a device"))
    return found + _next_memory(plan)


def _devices(plan: ClusterPlan, more: int, what: str) -> Margin:
    """Plan on more devices; those that no layout uses stay idle."""
    devices = plan.cluster.num_devices + more
    return _margin(plan, what, devices, plan.limit_bytes, planned(plan, devices, plan.batch))


def _margin(plan: ClusterPlan, what: str, devices: int, limit: float, best: Candidate | None) -> Margin:
    if best is None:
        return Margin(what, devices, limit, None, 0.0)
    gain = max(plan.chosen.seconds / best.seconds - 1, 0.0)
    return Margin(what, devices, limit, best, gain, settings(best, plan.chosen))


def planned(plan: ClusterPlan, devices: int, batch: int) -> Candidate | None:
    """Return the best layout on another number of devices, all of them used; degrees stay free, settings pinned."""
    per_node = min(plan.cluster.devices_per_node, devices)
    if devices % per_node:
        return None
    cluster = replace(plan.cluster, num_devices=devices, devices_per_node=per_node)
    pins = replace(plan.pins, data=None, pipeline=None)
    return _best(plan, cluster, pins, batch, plan.limit_bytes)


def _best(plan: ClusterPlan, cluster: Cluster, pins: Pins, batch: int, limit: float) -> Candidate | None:
    try:
        survey = plan.survey.asked(cluster, batch=batch, pins=pins)
    except PlanError:  # no mesh at all
        return None
    return next(iter(chosen_of(survey, limit)), None)


def _memory(plan: ClusterPlan, more: float, what: str) -> Margin:
    limit = plan.limit_bytes + more
    best = next(iter(chosen_of(plan.survey, limit)), None)
    return _margin(plan, what, plan.cluster.num_devices, limit, best)


def _next_memory(plan: ClusterPlan) -> list[Margin]:
    """Return the least memory that buys half a percent at least, where there is such a thing."""
    for point in pareto(plan):
        gain = plan.chosen.seconds / point.seconds - 1
        if point.bytes > plan.limit_bytes and gain > 5e-3:
            more = point.bytes - plan.limit_bytes
            what = f"{more / _GIB:.1f} GiB more a device"
            found = _margin(plan, what, plan.cluster.num_devices, point.bytes, point)
            return [found] if more > _GIB else []
    return []


def pareto(plan: ClusterPlan) -> list[Candidate]:
    """Return the fastest layout of each memory, smallest first: none has another that is both smaller and faster."""
    smallest = plan.survey.smallest()
    assert smallest is not None, "a plan has a layout"
    low, high = smallest.bytes, _ROOMIEST * plan.limit_bytes
    limits = [low + (high - low) * at / (_LIMITS - 1) for at in range(_LIMITS)]
    found: list[Candidate] = [plan.chosen]
    for limit in limits:
        found += chosen_of(plan.survey, limit)
    front: list[Candidate] = []
    for one in sorted(found, key=lambda one: (one.bytes, one.seconds)):
        if not front or one.seconds < front[-1].seconds:
            front.append(one)
    return front
