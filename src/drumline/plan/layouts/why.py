"""Why one layout loses against another, and why nothing fits and what would; found by trying, not by rules of thumb."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace

from drumline.core.errors import PlanError, counted
from drumline.core.units import duration
from drumline.plan.cluster.hardware import Cluster
from drumline.plan.device.advice import Remedy, less_activations, lost_and_saved
from drumline.plan.layouts.choice import Choice
from drumline.plan.layouts.pins import Pins, tried_schedules
from drumline.plan.layouts.preference import drawback
from drumline.plan.layouts.survey import Survey
from drumline.schedules.registry import MAX_PAIRS

_GIB = 2**30
_LARGEST = 64  # the largest multiple of the requested devices to try
_EVEN = 5e-4  # share of a step; a smaller difference counts as none
_MORE_AND_LESS = {
    "compute": ("its busiest rank computes {} longer", "{} less compute"),
    "recompute": ("it recomputes {} longer", "{} less recomputation"),
    "tensor": ("TP exposes {} more", "{} less for TP"),
    "context": ("CP exposes {} more", "{} less for CP"),
    "expert": ("EP exposes {} more", "{} less for EP"),
    "pipeline": ("PP exposes {} more", "{} less for PP"),
    "data_exposed": ("DP exposes {} more", "{} less for DP"),
    "bubble": ("it waits {} longer", "{} less waiting"),
    "optimizer": ("its optimizer takes {} longer", "{} less for the optimizer"),
}


@dataclass(frozen=True, slots=True)
class Alternative(Remedy):
    """Another layout: what it is, what it gains or why it loses, and what it costs."""

    choice: Choice = field(kw_only=True)


def why_not(chosen: Choice, other: Choice, limit_bytes: float, what: str = "") -> Alternative:
    """Return the arguments against `other`; there are none against the choice itself."""
    said = "" if other is chosen else why(chosen, other, limit_bytes)
    return Alternative(what or str(other.mesh), said, chosen.seconds / other.seconds - 1, choice=other)


def why(chosen: Choice, other: Choice, limit_bytes: float) -> str:
    """Say what is wrong with `other`: it does not fit, or which seconds it loses and which it saves."""
    if other.bytes > limit_bytes:
        over = (other.bytes - limit_bytes) / _GIB
        gain = 1 - other.seconds / chosen.seconds
        note = f"; it would be {gain:.1%} faster" if gain > _EVEN else ""
        return f"does not fit: {over:.1f} GiB too much{note}"
    slower = other.seconds / chosen.seconds - 1
    lost, saved = lost_and_saved(chosen.estimate.seconds, other.estimate.seconds, _EVEN * chosen.seconds)
    if abs(slower) <= _EVEN:
        return _as_fast(chosen, other)
    if slower < 0:
        return f"{-slower:.1%} faster, less than a forecast can tell, but {drawback(chosen, other, limit_bytes)}"
    reasons = [_MORE_AND_LESS[item][0].format(_seconds(by)) for item, by in lost[:2]]
    if saved and saved[0][1] > 0.1 * lost[0][1]:
        item, by = saved[0]
        reasons.append("despite " + _MORE_AND_LESS[item][1].format(_seconds(by)))
    return f"{slower:.1%} slower: {', '.join(reasons)}"


def settings(choice: Choice, than: Choice) -> str:
    """Describe a layout, with only those settings that differ from another's."""
    known, parts = than.settings, choice.settings
    if choice.layout.pipeline == 1:
        del parts["schedule"]
    return ", ".join([str(choice.mesh), *(words for name, words in parts.items() if words != known.get(name))])


def _as_fast(chosen: Choice, other: Choice) -> str:
    more = (other.bytes - chosen.bytes) / _GIB
    if more >= 0.05:
        return f"just as fast, but holds {more:.1f} GiB more"
    if more <= -0.05:
        return f"{max(other.seconds / chosen.seconds - 1, 0):.2%} slower, but holds {-more:.1f} GiB less"
    return "just as fast, with the same memory"


def _seconds(value: float) -> str:
    """Format seconds for a sentence.

    >>> _seconds(2.13), _seconds(0.0412)
    ('2.1 s', '41 ms')
    """
    return duration(value, 3 if value >= 10 else 2)


def nothing_fits(survey: Survey, limit: float, headroom: float) -> PlanError:
    """Return the error: how far the smallest layout is from fitting, and what would make it fit."""
    smallest = survey.smallest()
    if smallest is None:
        return _not_admitted(survey)
    name, devices = survey.transformer.name, survey.cluster.num_devices
    roomier = smallest.bytes / (1 - headroom) / _GIB
    error = PlanError(
        f"{name} does not fit on {devices} x {survey.cluster.device.name}: the smallest layout, {described(smallest)}, "
        f"holds {smallest.bytes / _GIB:.1f} GiB per device",
        expected=f"at most {limit / _GIB:.1f} GiB with {headroom:.0%} headroom: {_short_of(smallest, limit)}",
        fix="; ".join([*_mends(survey, limit), *_larger(survey, limit), f"or use devices with {roomier:.0f} GiB"]),
    )
    error.smallest_bytes = int(smallest.bytes)
    return error


def _not_admitted(survey: Survey) -> PlanError:
    """Return which pins leave no layout at all, even with unlimited memory."""
    pins = survey.pins
    if pins.microbatch is not None and survey.batch % pins.microbatch:
        return PlanError(
            f"microbatches of {pins.microbatch} do not divide a batch of {survey.batch} sequences",
            expected="microbatches that divide the batch",
        )
    named = {"schedule": " or ".join(pins.schedules), "stages per rank": pins.stages_per_rank, "PP": pins.pipeline}
    wanted = ", ".join(f"{name} {value}" for name, value in named.items() if value)
    return PlanError(
        f"no layout on {counted(survey.cluster.num_devices, 'device')} allows {wanted or f'a batch of {survey.batch}'}",
        expected="stages per rank that the schedule supports, at least one layer per stage, and a step of at most "
        f"{MAX_PAIRS} (stage, microbatch) pairs",
        fix="use these stages per rank: "
        + ", ".join(f"{' or '.join(map(str, stages))} for {name}" for name, stages in tried_schedules().items()),
    )


def described(choice: Choice) -> str:
    """Describe a layout in a few words."""
    return f"{choice.mesh} with ZeRO {choice.layout.zero} and {choice.layout.recomputation}"


def _short_of(smallest: Choice, limit: float) -> str:
    over, held_memory = smallest.bytes - limit, smallest.estimate.bytes
    if (less := less_activations(over, held_memory.activations)) is not None:
        return f"it needs {less}"
    state = (held_memory.weights + held_memory.gradients + held_memory.optimizer) / _GIB
    return f"weights, gradients and optimizer alone take {state:.1f} GiB"


def _mends(survey: Survey, limit: float) -> Iterator[str]:
    mends = list(_unpinned(survey, limit))
    if mends:
        yield f"{', '.join(mends[:-1]) + ' or ' if mends[:-1] else ''}{mends[-1]} would fit"


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
        choice = fits(survey, survey.cluster, pins, limit)
        if choice is not None:
            yield words.format(**asdict(choice.layout))


def _larger(survey: Survey, limit: float) -> Iterator[str]:
    """Yield the smallest cluster on which it fits, doubling the devices."""
    pins, times = replace(survey.pins, data=None), 2
    while times <= _LARGEST:
        cluster = replace(survey.cluster, num_devices=survey.cluster.num_devices * times)
        choice = fits(survey, cluster, pins, limit)
        if choice is not None:
            yield f"the smallest that fits: {choice.mesh} on {cluster.num_devices} devices"
            return
        times *= 2


def fits(survey: Survey, cluster: Cluster, pins: Pins, limit: float) -> Choice | None:
    """Return the smallest layout of another question, if it fits."""
    try:
        other = replace(survey, cluster=cluster, pins=pins)
    except PlanError:  # this cluster cannot satisfy the pins
        return None
    choice = other.smallest()
    return choice if choice is not None and choice.bytes <= limit else None
