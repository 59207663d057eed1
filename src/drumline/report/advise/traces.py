"""What would shorten a recorded step most, said in a sentence or two.

recorded    ├──────────────────────────────────────────┤
ideal       ├───────────────────────────┤                 the same order and times: transfer and overhead are gone
level       ├─────────────────────┤                       and all stages are equal
other       ├──────────────────────┤                      or: the same times in another schedule's order
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from drumline.core.action import Op
from drumline.core.errors import ScheduleError
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.idle import Cause
from drumline.report.advise.stages import costs_of
from drumline.report.kineto.analysis import Analysis
from drumline.report.units import ms
from drumline.schedules import schedules

# Less than this of the makespan is not worth a change.
_WORTH = 0.03


class _Gain(NamedTuple):
    seconds: float
    said: str


def advise_on(analysis: Analysis) -> str:
    """Return the change that would save most, with what it would save."""
    if analysis.ideal is None:
        return "The rows in the traces cannot run as they are: check that the traces are of one run, and complete."
    makespan = analysis.timeline.makespan
    best = max(_gains(analysis, analysis.ideal), key=lambda gain: gain.seconds, default=None)
    if best is None or best.seconds < _WORTH * makespan:
        return "Nothing stands out: no single change that the traces show would save 3% of the pipeline's time."
    return best.said


def _gains(analysis: Analysis, ideal: Simulation) -> Iterator[_Gain]:
    yield from _equal_stages(analysis, ideal)
    yield from _other_schedule(analysis, ideal)
    timeline = analysis.timeline
    lost = timeline.makespan - ideal.makespan
    by_cause = dict.fromkeys((Cause.TRANSFER, Cause.OVERHEAD, Cause.UNEXPLAINED), 0.0)
    for idle in timeline.causes:
        if idle.cause in by_cause:
            by_cause[idle.cause] += idle.seconds / timeline.num_ranks
    total = sum(by_cause.values())
    shares = {cause: lost * seconds / total if total else 0.0 for cause, seconds in by_cause.items()}
    yield _Gain(shares[Cause.TRANSFER], _of_transfer(analysis, shares[Cause.TRANSFER]))
    yield _Gain(shares[Cause.OVERHEAD], _of_overhead(analysis, shares[Cause.OVERHEAD]))
    yield _Gain(
        shares[Cause.UNEXPLAINED],
        f"Look at what the traces do not name: it costs about {ms(shares[Cause.UNEXPLAINED])} of the "
        f"{ms(timeline.makespan)}. Record with with_stack=True, or label the rest of the step with record_function.",
    )


def _equal_stages(analysis: Analysis, ideal: Simulation) -> Iterator[_Gain]:
    level = ideal.balanced
    if level is None or len(analysis.stages) < 2:
        return
    slow = analysis.slowest
    mean = sum(one.total for one in analysis.stages) / len(analysis.stages)
    saved = ideal.makespan - level.makespan
    yield _Gain(
        saved,
        f"Move layers off stage {slow.stage}: a microbatch takes {ms(slow.total)} there and {ms(mean)} on average. "
        f"With equal stages the same order would take {ms(level.makespan)} at best in place of {ms(ideal.makespan)}.",
    )


def _other_schedule(analysis: Analysis, ideal: Simulation) -> Iterator[_Gain]:
    program = ideal.program
    costs = costs_of(analysis.stages)
    now = simulate(program, costs)
    found = {other.name: other for other in _alternatives(program, max(now.peak_activations))}
    if not found:
        return
    spans = {name: simulate(other, costs).makespan for name, other in found.items()}
    name = min(spans, key=spans.__getitem__)
    never_split = all(one.backward_weight is None for one in analysis.stages)
    guessed = never_split and Op.BACKWARD_WEIGHT in found[name].columns.ops
    guess = " if the halves of the backward take equally long" if guessed else ""
    yield _Gain(
        now.makespan - spans[name],
        f"Run {name}: with the median times of these stages it takes {ms(spans[name])} at best and {program.name} "
        f"{ms(now.makespan)}, with no more activations held{guess and ','}{guess}.",
    )


def _alternatives(program: Program, peak: int) -> Iterator[Program]:
    """Yield the programs of other schedules for the same stages that hold no more pairs on any rank."""
    per_rank, rest = divmod(program.num_stages, program.num_ranks)
    if rest or not program.has_backward:
        return
    for name, schedule in schedules().items():
        if name == program.name or schedule.refusal(program.num_ranks, program.num_microbatches, per_rank) is not None:
            continue
        try:
            made = schedule.build(program.num_ranks, program.num_microbatches, per_rank)
        except ScheduleError:
            continue
        exact = made.has_backward and not made.num_updates and not made.placement.mirrored
        if exact and max(simulate(made).peak_activations) <= peak:
            yield made


def _of_transfer(analysis: Analysis, seconds: float) -> str:
    timeline = analysis.timeline
    sizes = [one.num_bytes for one in timeline.transfers if one.num_bytes]
    each = f", {max(sizes) / 2**20:.3g} MiB each" if sizes else ""
    return (
        f"Messages are the brake: waiting for what is made and on its way costs about {ms(seconds)} of the "
        f"{ms(timeline.makespan)} ({len(timeline.transfers)} messages{each}). "
        f"A faster link, a narrower type or fewer stages per rank would help."
    )


def _of_overhead(analysis: Analysis, seconds: float) -> str:
    kind = next(iter(analysis.overhead), "")
    ways = {
        "posting messages": "larger microbatches post fewer of them",
        "launching kernels": "larger microbatches, torch.compile or CUDA graphs launch fewer of them",
        "made and not yet sent": "sends are posted late, or queue behind other messages",
    }
    hint = f": {ways[kind]}" if kind in ways else ""
    return (
        f"The ranks' own overhead is the brake: it costs about {ms(seconds)} of the "
        f"{ms(analysis.timeline.makespan)}, most of it {kind}{hint}."
    )
