"""Why nothing fits, and what would: found by trying, not by rule of thumb."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from drumline.core.errors import PlanError, counted
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.layouts.pins import SCHEDULES, Pins
from drumline.plan.layouts.survey import Candidate, Survey
from drumline.schedules.registry import MAX_PAIRS

_GIB = 2**30
_LARGEST = 64  # times the devices asked for


def nothing_fits(survey: Survey, limit: float, headroom: float) -> PlanError:
    """Return the error: how far the smallest layout is from fitting, and what would make it fit."""
    smallest = survey.smallest()
    if smallest is None:
        return _not_admitted(survey)
    name, devices = survey.transformer.name, survey.cluster.num_devices
    error = PlanError(
        f"{name} does not fit on {devices} x {survey.cluster.device.name}: the smallest layout, {described(smallest)}, "
        f"holds {smallest.bytes / _GIB:.1f} GiB on a device",
        expected=f"at most {limit / _GIB:.1f} GiB with {headroom:.0%} headroom: {_short_of(smallest, limit)}",
        fix="; ".join([*_mends(survey, limit), *_larger(survey, limit), _roomier(smallest, headroom)]),
    )
    error.smallest_bytes = int(smallest.bytes)
    return error


def _not_admitted(survey: Survey) -> PlanError:
    """Return which pins leave no layout at all, however much memory there is."""
    pins = survey.pins
    if pins.microbatch is not None and survey.batch % pins.microbatch:
        return PlanError(
            f"a batch of {survey.batch} sequences in microbatches of {pins.microbatch}",
            expected="microbatches that divide the batch",
        )
    named = {"schedule": " or ".join(pins.schedules), "stages per rank": pins.stages_per_rank, "PP": pins.pipeline}
    given = ", ".join(f"{name} {value}" for name, value in named.items() if value)
    return PlanError(
        f"no layout on {counted(survey.cluster.num_devices, 'device')} admits {given or f'a batch of {survey.batch}'}",
        expected="stages per rank that the schedule has, as many layers as stages, and a step of at most "
        f"{MAX_PAIRS} (stage, microbatch) pairs",
        fix="stages per rank are "
        + ", ".join(f"{' or '.join(map(str, stages))} of {name}" for name, stages in SCHEDULES.items()),
    )


def described(one: Candidate) -> str:
    """Return a layout in a few words."""
    layout = one.layout
    again = {"none": "no recomputation", "selective": "selective recomputation", "full": "full recomputation"}
    return f"{one.mesh} with ZeRO {layout.zero} and {again[layout.recompute]}"


def _short_of(smallest: Candidate, limit: float) -> str:
    over, held = smallest.bytes - limit, smallest.estimate.bytes
    if over < held.activations:
        return f"needs {over / held.activations:.0%} less activation memory"
    state = (held.weights + held.gradients + held.optimizer) / _GIB
    return f"weights, gradients and optimizer alone take {state:.1f} GiB"


def _mends(survey: Survey, limit: float) -> Iterator[str]:
    found = list(_unpinned(survey, limit))
    if found:
        yield f"{', '.join(found[:-1]) + ' or ' if found[:-1] else ''}{found[-1]} would fit"


def _unpinned(survey: Survey, limit: float) -> Iterator[str]:
    """Yield what each single pin would have to become."""
    written = {
        "recompute": "{recompute} recomputation",
        "pipeline": "PP {pipeline}",
        "tensor": "TP {tensor}",
        "data": "DP {data}",
        "zero": "ZeRO {zero}",
        "context": "CP {context}",
        "expert": "EP {expert}",
        "microbatch": "microbatches of {microbatch}",
        "stages_per_rank": "{stages_per_rank} stages per rank",
        "sequence_parallel": "sequence parallelism",
        "schedules": "the schedule {schedule}",
    }
    default = Pins()
    for pin, words in written.items():
        if getattr(survey.pins, pin) == getattr(default, pin):
            continue
        pins = replace(survey.pins, **{pin: getattr(default, pin)})
        found = fits(survey, survey.cluster, pins, limit)
        if found is not None:
            layout = found.layout
            values = {name: getattr(layout, name) for name in layout.__slots__}
            yield words.format(**values)


def _larger(survey: Survey, limit: float) -> Iterator[str]:
    """Yield the smallest cluster that holds it, doubling the devices."""
    pins = replace(survey.pins, data=None)
    times = 2
    while times <= _LARGEST:
        cluster = replace(survey.cluster, num_devices=survey.cluster.num_devices * times)
        found = fits(survey, cluster, pins, limit)
        if found is not None:
            yield f"the smallest that fits: {found.mesh} on {cluster.num_devices} devices"
            return
        times *= 2


def fits(survey: Survey, cluster: Cluster, pins: Pins, limit: float) -> Candidate | None:
    """Return the smallest layout of another question if it fits."""
    try:
        other = survey.asked(cluster, batch=survey.batch, pins=pins)
    except PlanError:  # pins that this cluster cannot meet
        return None
    found = other.smallest()
    return found if found is not None and found.bytes <= limit else None


def _roomier(smallest: Candidate, headroom: float) -> str:
    return f"or {smallest.bytes / (1 - headroom) / _GIB:.0f} GiB a device"
