"""The figures of one timeline, and the violations of a program, as the objects that `--json` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from drumline.core.errors import DrumlineError, counted
from drumline.core.measured.endless import num_begun
from drumline.core.program import Program
from drumline.core.prove.violation import Violation
from drumline.core.timeline.causes import Causes
from drumline.core.timeline.idle import Cause
from drumline.core.timeline.timeline import Timeline

_NOISE = 1e-12  # of the makespan: what is left of a difference between equal times


def counts(program: Program) -> str:
    """Return the size of a program in words.

    >>> counts(Program.parse("0F0,0B0"))
    '1 rank, 1 stage, 1 microbatch'
    """
    numbers = ((program.num_ranks, "rank"), (program.num_stages, "stage"), (num_begun(program), "microbatch"))
    slices = f" in {program.num_slices} slices" if program.num_slices > 1 else ""
    return ", ".join(counted(count, word) for count, word in numbers) + slices


def figures(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a timeline's times and memory, without causes; times are in the unit of the costs.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> figures(simulate(Program.parse("0F0,0B0", name="tiny")))["peak_activations"]
    [1]
    """
    program = timeline.program
    return {
        "schedule": program.name,
        "ranks": timeline.num_ranks,
        "microbatches": num_begun(program),
        "slices": program.num_slices,
        "stages": program.num_stages,
        "placement": program.placement.name,
        "actions": program.num_actions,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "bubble": timeline.bubble,
        "span_bubble": timeline.span_bubble,
        "busy": list(timeline.busy),
        "idle": list(timeline.idle),
        "peak_activations": list(timeline.peak_activations),
    }


def summarize(timeline: Timeline) -> dict[str, Any]:
    r"""Return the figures that every command reports for a timeline, including idle time by cause.

    >>> from drumline.core.program import Program
    >>> from drumline.core.simulate.simulate import simulate
    >>> summary = summarize(simulate(Program.parse("0F0,0B0\n1F0,1B0", name="tiny")))
    >>> summary["makespan"], summary["idle"], summary["idle_by_cause"]["fill"]
    (6.0, [3.0, 3.0], [0.0, 1.0])
    """
    program = timeline.program
    summary = {**figures(timeline), "idle_by_cause": idle_by_cause(timeline)}
    if timeline.peak_bytes is not None:
        summary["peak_bytes"] = list(timeline.peak_bytes)
        summary["static_bytes"] = [holding.static_bytes for holding in timeline.memory]
        summary["peak_stash_bytes"] = [holding.peak_stash_bytes for holding in timeline.memory]
        summary["peak_receive_bytes"] = list(timeline.peak_receive_bytes)
    if program.num_updates:
        summary["updates"] = program.num_updates
        summary["weight_versions"] = [holding.peak_versions for holding in timeline.memory]
    return summary


def rank_rows(timeline: Timeline, written: Callable[[float], str]) -> tuple[list[str], list[list[str]]]:
    """Return the header and rows of a table of ranks: their stages, busy and idle time, and idle time by cause."""
    by_cause, placement = idle_by_cause(timeline), timeline.program.placement
    rows = []
    for rank in range(timeline.num_ranks):
        seconds_here = (timeline.busy[rank], timeline.idle[rank], *(seconds[rank] for seconds in by_cause.values()))
        times = (0.0 if abs(value) < _NOISE * timeline.makespan else value for value in seconds_here)
        rows.append([str(rank), " ".join(map(str, placement.stages_of(rank))), *map(written, times)])
    return ["rank", "stages", "busy", "idle", *by_cause], rows


def peak_queues(timeline: Timeline) -> dict[str, int]:
    """Return how many messages waited at once on each edge."""
    return {f"{source}->{target}": depth for (source, target), depth in timeline.peak_queues.items()}


def listed(violations: Iterable[Violation]) -> list[dict[str, Any]]:
    """Return violations as objects."""
    return [
        {"rank": v.rank, "index": v.index, "action": str(v.action) if v.action else None, "reason": v.reason}
        for v in violations
    ]


def refused(error: DrumlineError) -> dict[str, str]:
    """Return an error as an object.

    >>> refused(DrumlineError("M is 0", expected="a count of 1 or more"))
    {'error': 'M is 0', 'expected': 'a count of 1 or more', 'fix': ''}
    """
    return {"error": error.error, "expected": error.expected, "fix": error.fix}


def idle_by_cause(timeline: Timeline) -> dict[str, list[float]]:
    """Return the idle seconds of every rank, by cause."""
    if isinstance(timeline.causes, Causes):
        seconds = timeline.causes.seconds(timeline.num_ranks)
        return {cause.value: seconds[cause] for cause in Cause if cause in seconds}
    present = {idle.cause for idle in timeline.causes}
    total = {cause.value: [0.0] * timeline.num_ranks for cause in Cause if cause in present}
    for idle in timeline.causes:
        total[idle.cause.value][idle.rank] += idle.seconds
    return total


def idle_shares(timeline: Timeline, prefix: str = "") -> dict[str, float]:
    r"""Return the bubble and its causes as shares of all ranks' time, by flat names for logs; causes sum to the bubble.

    >>> from drumline.core.simulate.simulate import simulate
    >>> shares = idle_shares(simulate(Program.parse("0F0,0B0\n1F0,1B0")), "pipeline_")
    >>> {name: round(share, 3) for name, share in shares.items()}
    {'pipeline_bubble': 0.5, 'pipeline_idle_fill': 0.083, 'pipeline_idle_drain': 0.167, 'pipeline_idle_wait': 0.25}
    """
    whole = timeline.num_ranks * timeline.makespan or 1.0
    shares = {f"idle_{cause}": sum(seconds) / whole for cause, seconds in idle_by_cause(timeline).items()}
    return {f"{prefix}{name}": share for name, share in {"bubble": timeline.bubble, **shares}.items()}
