"""The analysis of a recorded run: figures of one step, the ideal for its own action times, and what to change."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.measured.costs import replay
from drumline.core.measured.measured import stage_costs
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import Violation
from drumline.core.simulate.simulate import Simulation
from drumline.core.timeline.idle import Cause, Idle
from drumline.core.timeline.timeline import Timeline
from drumline.plan.device.advice import Advice
from drumline.report.advise.adviser import advise
from drumline.report.advise.evidence import Evidence
from drumline.report.kineto.load import Traces, described, load
from drumline.report.kineto.timeline import NANO, TracedStep
from drumline.report.summary import figures, summarize

_POSTED = re.compile(r"\d+(?:SEND|RECV)_[FB]\d+|posting a .*")
_STATE = re.compile(r"(kernels of )?\d+(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_REDUCE_GRAD)")
_WAITED = re.compile(r"(kernels of )?\d+(WAIT_SEND_[FB])\d+")


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """The median seconds per microbatch in a stage, by op; None for ops that never ran alone."""

    stage: int
    forward: float | None
    backward: float | None
    backward_input: float | None
    backward_weight: float | None

    @property
    def total(self) -> float:
        """Seconds of a microbatch, forward and backward."""
        halves = (self.backward_input or 0.0) + (self.backward_weight or 0.0)
        return (self.forward or 0.0) + (halves or self.backward or 0.0)


@dataclass(frozen=True, repr=False)
class Analysis:
    """One recorded step, and what else its traces show."""

    traces: Traces
    timeline: TracedStep

    def __repr__(self) -> str:
        return f"Analysis(step={self.timeline.step}, {self.timeline!r})"

    @cached_property
    def violations(self) -> tuple[Violation, ...]:
        """The pipeline rules that the rows in the traces break; empty if there are none."""
        return tuple(validate(self.timeline.ran))

    @cached_property
    def ideal(self) -> Simulation | None:
        """The same order and action times without transfer and overhead; None if the rows cannot run."""
        return None if validate(self.timeline.program) else replay(self.timeline, transfers=False)

    @cached_property
    def stages(self) -> tuple[StageSeconds, ...]:
        """The seconds of a microbatch in each stage."""
        ops, count = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT), self.timeline.program.num_stages
        return tuple(StageSeconds(stage, *(self._medians.get((stage, op)) for op in ops)) for stage in range(count))

    @cached_property
    def _medians(self) -> dict[tuple[int, Op], float]:
        return {key: median(values) for key, values in self.timeline.action_seconds(halves=True).items()}

    @property
    def costs(self) -> Costs:
        """The stages' seconds as costs; a backward that was never split counts as its first half."""
        fields = stage_costs(self._medians, len(self.stages))
        whole = [s.total - (s.forward or 0.0) if s.backward is None else s.backward for s in self.stages]
        return Costs(**fields, backward=whole)

    @property
    def slowest(self) -> StageSeconds:
        """The slowest stage."""
        return max(self.stages, key=lambda seconds: seconds.total)

    @cached_property
    def overhead(self) -> dict[str, list[float]]:
        """The seconds of every rank's overhead, by its source; the largest first."""
        seconds: dict[str, list[float]] = {}
        for idle in self.timeline.causes:
            if idle.cause is Cause.OVERHEAD:
                ranks = seconds.setdefault(_kind(idle), [0.0] * self.timeline.num_ranks)
                ranks[idle.rank] += idle.seconds
        return dict(sorted(seconds.items(), key=lambda item: -sum(item[1])))

    @cached_property
    def advice(self) -> Advice:
        """The changes that would save the most."""
        if self.ideal is None:
            wrong = "The rows in the traces cannot run: check that the traces are complete and from one run."
            return Advice((), nothing=wrong)
        return advise(Evidence(self.timeline, self.ideal, self.costs, self.timeline.step, kinds=self.overhead))

    def summary(self) -> dict[str, Any]:
        """Return everything as one object; times are in seconds."""
        timeline, traces = self.timeline, self.traces
        alignment = traces.alignment
        return {
            **summarize(timeline),
            "step": timeline.step,
            "step_seconds": timeline.step_seconds,
            "steps": [
                {"step": number, "step_seconds": step.step_seconds, "makespan": step.makespan, "bubble": step.bubble}
                for number, step in traces.steps.items()
            ],
            "incomplete_steps": list(traces.incomplete),
            "steps_by_flushes": traces.by_flushes,
            "flushes": timeline.num_flushes,
            "found_by": traces.found_by,
            "traces": [str(member.path) for member in traces.members],
            "global_ranks": [member.rank for member in traces.members],
            "other_pipelines": traces.num_others,
            "kernel_seconds": None if timeline.kernel_seconds is None else list(timeline.kernel_seconds),
            "overhead_by_kind": self.overhead,
            "stage_seconds": [{**asdict(stage), "total": stage.total} for stage in self.stages],
            "slowest_stage": self.slowest.stage,
            "ideal": None if self.ideal is None else {**figures(self.ideal), "spans": _spans(self.ideal)},
            "clocks": {
                "hosts": [member.host for member in traces.members],
                "shift_seconds": [shift * NANO for shift in alignment.shifts],
                "error_seconds": [error * NANO if math.isfinite(error) else None for error in alignment.errors],
                "contradiction_seconds": alignment.contradiction * NANO,
                "in_words": described(traces),
            },
            "violations": [str(violation) for violation in self.violations],
            "spans": _spans(timeline),
            "intervals": [
                {"rank": idle.rank, "start": idle.start, "end": idle.end, "cause": idle.cause.value, "why": idle.why}
                for idle in timeline.causes
            ],
            "transfers": [
                {"send": str(move.action), "source": move.source, "target": move.target, "made": move.made}
                | {"start": move.start, "end": move.end, "consumed": move.consumed, "bytes": move.num_bytes}
                for move in timeline.transfers
            ],
        }


def analyze(
    paths: Sequence[str | Path], *, step: int | None = None, progress: Callable[[str], None] | None = None
) -> Analysis:
    """Analyse one step of a pipeline from PyTorch profiler traces, one per rank or a folder of them.

    The default `step` is the one with the median makespan.

    >>> analyze(["no-such-folder/rank0.json"])
    Traceback (most recent call last):
    drumline.core.errors.TraceError: cannot read no-such-folder/rank0.json: No such file or directory; ...
    """
    traces = load(paths, progress=progress)
    return Analysis(traces, traces.step(step))


def _spans(timeline: Timeline) -> list[dict[str, Any]]:
    return [{"rank": s.rank, "action": str(s.action), "start": s.start, "end": s.end} for s in timeline.spans()]


def _kind(idle: Idle) -> str:
    """Return what kept a rank busy, with the same words for all microbatches."""
    if idle.waits_for is not None:
        return "made and not yet sent"
    name = idle.kind
    if _POSTED.fullmatch(name):
        return "posting messages"
    if name.startswith("launching "):
        return "launching kernels"
    state = _STATE.fullmatch(name) or _WAITED.fullmatch(name)
    return f"{state[1] or ''}{state[2]}" if state else name
