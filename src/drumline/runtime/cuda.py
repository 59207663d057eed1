"""What only CUDA has: times taken on the device, and steps captured as graphs. The one file that names torch.cuda."""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.runtime.batch import cut
from drumline.runtime.clock import Clock
from drumline.runtime.executor import Executor, Step
from drumline.runtime.precision import casts_kept, gradient_dtype
from drumline.runtime.randomness import Randomness
from drumline.runtime.record import Record
from drumline.runtime.values import pack, unpack


class EventClock(Clock):
    """Marks moments on the device's stream; they become times when the device has passed them."""

    def __init__(self) -> None:
        self._events: list[torch.cuda.Event] = []
        self._used = 0
        self._zero: tuple[torch.cuda.Event, int] | None = None

    def begin(self) -> None:
        """Start a step: events are used again, and the first fixes where the device's clock stands on the host's."""
        self._used = 0
        self._zero = None
        self._stream = torch.cuda.current_stream()

    def start(self, directly: bool) -> int:
        """Mark the start of an action, by the end of the one before where it follows directly."""
        return self._used - 1 if directly and self._used else self.mark()

    def mark(self) -> int:
        """Mark the moment that the device's work so far is done; returns the mark's number."""
        if self._used == len(self._events):
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        event = self._events[self._used]
        event.record(self._stream)
        if self._zero is None:
            self._zero = (event, time.perf_counter_ns())
        self._used += 1
        return self._used - 1

    def settle(self, record: Record) -> Record:
        """Turn marks into moments; waits for the device."""
        if self._zero is None:
            return record
        torch.cuda.synchronize()
        event, zero = self._zero

        def moment(mark: int) -> int:
            return zero + int(event.elapsed_time(self._events[mark]) * 1e6)

        record.starts = array("q", map(moment, record.starts))
        record.ends = array("q", map(moment, record.ends))
        record.end_ns = max(record.end_ns, *record.ends) if record.ends else record.end_ns
        self._zero = None
        return record


class CapturedStep:
    """One rank's whole step as one CUDA graph, captured anew when shapes change.

    Inputs and targets are copied to where the graph reads them; gradients are added where the graph writes them.
    """

    def __init__(self, executor: Executor, randomness: Randomness, parameters: Sequence[nn.Parameter]) -> None:
        self.executor = executor
        self.randomness = randomness
        self.parameters = [one for one in parameters if one.requires_grad]
        self._graph: torch.cuda.CUDAGraph | None = None
        self._signature: Any = None
        self._static = Step(-1)
        self._shares: Sequence[Tensor] = ()
        self._gradients: list[Tensor] = []

    def fits(self, step: Step) -> bool:
        """Whether the step has the shapes that were captured."""
        return bool(_signature(step) == self._signature)

    def run(self, step: Step) -> None:
        """Run a step by the graph, which is captured first if it does not fit."""
        if not self.fits(step):
            with self.randomness.kept_aside():
                self._capture(step)
            self._signature = _signature(step)
        for static, value in zip(_tensors(self._static), _tensors(step), strict=True):
            static.copy_(value, non_blocking=True)
        if step.shares is not self._shares:
            torch._foreach_copy_(list(self._static.shares), list(step.shares))
            self._shares = step.shares
        self._attach()
        assert self._graph is not None
        self._graph.replay()
        step.losses = dict(self._static.losses)

    def _attach(self) -> None:
        """Let every parameter's gradient be the one that the graph adds to."""
        fresh = []
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            if parameter.grad is None:
                fresh.append(gradient)
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
        if fresh:
            torch._foreach_zero_(fresh)

    def _capture(self, step: Step) -> None:
        before = [one.grad for one in self.parameters]
        self._graph = None
        self._gradients = [torch.zeros_like(one, dtype=gradient_dtype(one)) for one in self.parameters]
        batch, target = _copied(step.batch), _copied(step.target)
        self._static = Step(
            -1,
            batch,
            target,
            inputs=cut(batch, len(step.inputs)),
            targets=cut(target, len(step.targets)),
            shares=[share.clone() for share in step.shares],
        )
        self._settle_in()
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient
        graph = torch.cuda.CUDAGraph()
        with self.randomness.silenced(), torch.cuda.graph(graph):
            self._through()
        self._graph = graph
        for parameter, earlier in zip(self.parameters, before, strict=True):
            parameter.grad = earlier

    def _settle_in(self) -> None:
        """Run twice on the side, as capture asks for; refuse what a graph could not repeat."""
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
                    parameter.grad = gradient
                self._through()
        torch.cuda.current_stream().wait_stream(stream)
        segments = [segment for stage in self.executor.stages.values() for segment in stage.segments]
        loud = [name for segment in segments if not segment.quiet for name, _ in segment.blocks]
        if loud:
            raise ModelError(
                f"one of the blocks {', '.join(loud)} draws random numbers, which a captured step would repeat",
                expected="blocks without dropout",
                fix="use capture=False",
            )
        if any(segment.changes_buffers for segment in segments):
            raise ModelError(
                "a block changes its buffers, which capturing would do more than once a step", fix="use capture=False"
            )

    def _through(self) -> None:
        clock, self.executor.clock = self.executor.clock, Clock()  # a graph would replay marks as well
        try:
            with casts_kept():  # made by the graph itself, or it would go on with old weights
                for wait in self.executor.run(self._static, Record(self.executor.rank)):
                    raise AssertionError(f"a captured step cannot wait: {wait}")
        finally:
            self.executor.clock = clock


def _tensors(step: Step) -> list[Tensor]:
    return [tensor for value in (step.batch, step.target) for tensor in pack(value)[0]]


def _copied(value: Any) -> Any:
    tensors, form = pack(value)
    return unpack([tensor.clone() for tensor in tensors], form)


def _signature(step: Step) -> Any:
    packed = (pack(step.batch), pack(step.target))
    return [(form, [(one.shape, one.dtype) for one in tensors]) for tensors, form in packed]


def clock_for(device: torch.device) -> Clock:
    """Return the clock that tells a device's times."""
    return EventClock() if device.type == "cuda" else Clock()
