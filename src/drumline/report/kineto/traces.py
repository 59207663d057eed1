"""The traces of one pipeline: its steps on one clock, and what is known of the ranks' clocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low

from drumline.core.errors import TraceError, counted
from drumline.report.kineto.clocks import Alignment
from drumline.report.kineto.timeline import Traced


@dataclass(frozen=True, repr=False)
class Traces:
    """The traces of one pipeline: its complete steps, on one clock."""

    paths: tuple[Path, ...]
    global_ranks: tuple[int, ...]
    num_others: int  # pipelines beside this one
    found_by: str
    hosts: tuple[str | None, ...]
    alignment: Alignment
    steps: Mapping[int, Traced]
    incomplete: tuple[int, ...]
    by_flushes: bool = False  # whether steps are told apart by the empty pipeline, nothing else being there to tell

    def __repr__(self) -> str:
        return f"Traces(steps={list(self.steps)}, found_by={self.found_by!r})"

    def typical(self) -> int:
        """Return the number of the step with the median makespan; of two the faster one."""
        spans = {number: timeline.makespan for number, timeline in self.steps.items()}
        middle = median_low(spans.values())
        return next(number for number, makespan in spans.items() if makespan == middle)

    def step(self, number: int | None = None) -> Traced:
        """Return the timeline of a step: the one asked for, or the typical one."""
        chosen = self.typical() if number is None else number
        if chosen not in self.steps:
            there = ", ".join(map(str, self.steps))
            cut = " is not complete in the traces" if chosen in self.incomplete else " is not in the traces"
            raise TraceError(f"step {chosen}{cut}", expected=f"one of the steps {there}")
        return self.steps[chosen]


def described(traces: Traces) -> str:
    """Return what is known of the ranks' clocks, in words."""
    alignment, hosts = traces.alignment, set(traces.hosts)
    if len(traces.hosts) == 1:
        return "one rank, one clock"
    if alignment.contradiction:
        return f"messages arrive up to {alignment.contradiction / 1e6:.3g} ms before they are sent: the clocks drift"
    if len(hosts) == 1 and None not in hosts:
        return "one host, one clock"
    worst, shift = max(alignment.errors), max(map(abs, alignment.shifts))
    right = f"right to {worst / 1e6:.3g} ms" if math.isfinite(worst) else "how far off they still are cannot be known"
    where = "hosts unknown" if None in hosts else counted(len(hosts), "host")
    if shift:
        return f"{where}; moved by up to {shift / 1e6:.3g} ms, so that nothing arrives before it is sent; {right}"
    return f"{where}; no message contradicts them; {right}"
