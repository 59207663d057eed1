"""Somebody else's run, as the same timeline: traces of PyTorch's profiler, one per rank, put together.

Nothing of ours runs while they are recorded. What a trace cannot tell is not guessed: time that nothing in it explains
is called unexplained. `kineto_load` reads the files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median_low

from drumline.core import rules
from drumline.core.action import Action
from drumline.core.costs import Costs
from drumline.core.errors import TraceError, counted
from drumline.core.program import Program
from drumline.core.simulate.memory import Holding, holdings
from drumline.core.timeline.idle import Idle
from drumline.core.timeline.timeline import Timeline, Track, Transfer
from drumline.report.kineto.clocks import Alignment
from drumline.report.kineto.flushes import num_flushes
from drumline.report.kineto.idle import causes
from drumline.report.kineto.rank import Half, RankStep

NANO = 1e-9


@dataclass(frozen=True, eq=False, repr=False)
class Traced(Timeline):
    """The timeline of one recorded step, in seconds from its first action.

    `program` is the compute that ran, `ran` the same with all that was labelled: messages, parameters, gradients.
    """

    ran: Program
    step: int
    ranks: tuple[RankStep, ...]

    @cached_property
    def zero(self) -> int:
        """The nanosecond, by the common clock, at which the first action started."""
        return min(one.ran[0].start for one in self.ranks)

    def seconds(self, moment: int) -> float:
        """Return a moment of the common clock in seconds of this timeline."""
        return (moment - self.zero) * NANO

    @cached_property
    def tracks(self) -> Sequence[Track]:
        """Every rank's actions."""
        return [
            Track(
                tuple(one.action for one in rank.ran),
                [self.seconds(one.start) for one in rank.ran],
                [self.seconds(one.end) for one in rank.ran],
            )
            for rank in self.ranks
        ]

    @cached_property
    def memory(self) -> Sequence[Holding]:
        """Per rank, the pairs it holds after each start and end, as the rows say; a trace knows no bytes."""
        return holdings(self.program, Costs())

    @cached_property
    def num_flushes(self) -> int:
        """How often the pipeline runs empty in the step: more than once where gradients are accumulated."""
        return num_flushes(self.program)

    @property
    def step_seconds(self) -> float:
        """From the first rank's begin of the step to the last one's end: the optimizer and all else included."""
        return (max(one.end for one in self.ranks) - min(one.start for one in self.ranks)) * NANO

    @property
    def kernel_seconds(self) -> tuple[float, ...] | None:
        """Per rank, how long kernels ran within its actions; None without a device."""
        if not all(one.has_device for one in self.ranks):
            return None
        return tuple(sum(one.kernel_ns for one in rank.ran) * NANO for rank in self.ranks)

    @cached_property
    def causes(self) -> tuple[Idle, ...]:
        """Every idle interval with its cause; they sum to `idle`."""
        return tuple(causes(self))

    @cached_property
    def messages(self) -> Mapping[Action, tuple[int, int, Half, Half]]:
        """By their sends: source and target rank of every message, and its two ends."""
        receives = {action: (rank, half) for rank, one in enumerate(self.ranks) for action, half in one.halves.items()}
        found = {}
        for source, one in enumerate(self.ranks):
            for send, half in one.halves.items():
                message = rules.message_of(send)
                if message.send == send and message.recv in receives:
                    target, other = receives[message.recv]
                    found[send] = (source, target, half, other)
        return found

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """The messages between ranks: on their way once both ends could move them."""
        found = []
        for send, (source, target, sent, received) in self.messages.items():
            made, taken = self._made(send), self._taken(send)
            if made is None or taken is None:
                continue
            end = taken if received.done is None else min(max(self.seconds(received.done), made), max(taken, made))
            start = min(max(made, self.seconds(max(sent.begun, received.begun))), end)
            size = sent.num_bytes if sent.num_bytes is not None else received.num_bytes
            found.append(Transfer(send, source, target, made, start, end, max(taken, end), size or 0.0))
        return sorted(found, key=lambda one: (one.source, one.start))

    def _made(self, send: Action) -> float | None:
        """Return when what `send` carries was made."""
        places = (self.located.get(one[:3]) for one in rules.producers(send))
        return next((self.tracks[rank].ends[at] for rank, at in filter(None, places)), None)

    def _taken(self, send: Action) -> float | None:
        """Return when what `send` carries was taken up."""
        places = (self.located.get(one[:3]) for one in rules.consumers(rules.message_of(send).recv))
        return next((self.tracks[rank].starts[at] for rank, at in filter(None, places)), None)


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
