"""One rank's row with graphs: capture its stretches while a step runs, and launch them in all following steps.

    capture   message ──► its own memory     [stretch, recorded] ──► launched     output ──► a copy is sent
    replay    message ──► the same memory                          launched     output ──► a copy is sent

A stretch is what a rank computes between two messages, so that it can be launched at once:

    row          0RECV_B0  0F0  0SEND_F0   0I0  0RECV_B1  0W0  0F1            0SEND_F1
    stretches    0RECV_B0 [0F0] 0SEND_F0  [0I0            0W0  0F1] 0RECV_B1  0SEND_F1

It begins where a message must have arrived, and ends where one is sent or gradients are exchanged. Posting a receive
neither waits nor computes, so a receive inside a stretch is posted right after it. The channel sees the same calls in
the same order, and no message is waited for earlier than the row says.

All stretches share one memory pool, in which tensors live just as long as in a plain step. The row's order is fixed, so
one stretch may use what another leaves free. That is why outputs are copied before they are sent: the channel may hold
a message for long, and the next stretch may write to its memory. Gradients are added to permanent tensors.
"""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from drumline.channel.channel import Delivery
from drumline.core.action import RECV_OPS, SEND_OPS, Action
from drumline.core.errors import DrumlineError, ModelError
from drumline.model.blocks.pieces import Piece
from drumline.model.precision import gradient_dtype
from drumline.model.watch.fingerprint import PLAIN
from drumline.runtime.execute.executor import Executor
from drumline.runtime.execute.jobs import Job
from drumline.runtime.step import Step


@dataclass(slots=True)
class Stretch(Job):
    """Consecutive computations without a message in between; it needs what the first of them needs."""

    jobs: list[Job] = field(default_factory=list)
    replay: Callable[[], None] | None = None  # launches it, after it is captured
    inputs: list[Delivery] = field(default_factory=list)  # where it reads its messages

    def __str__(self) -> str:
        return f"[{' '.join(str(job.action) for job in self.jobs)}]"


def stretches(row: Sequence[Job], run: Callable[[Any, Step], None]) -> list[Job]:
    """Return the row with its computations joined into stretches, each run by `run`.

    >>> from drumline.core.action import Action
    >>> row = [Job(Action.parse(a), print, timed=a[1] in "FBIW") for a in "0F0 0SEND_F0 0F1 0RECV_B0 0F2".split()]
    >>> print(*(stretch if isinstance(stretch, Stretch) else stretch.action for stretch in stretches(row, print)))
    [0F0] 0SEND_F0 [0F1 0F2] 0RECV_B0
    """
    jobs: list[Job] = []
    stretch: Stretch | None = None
    for job in row:
        if not job.timed:
            jobs.append(job)
            if job.action.op not in RECV_OPS:
                stretch = None
            continue
        if stretch is None or job.needs:
            stretch = Stretch(job.action, run, needs=job.needs)
            jobs.append(stretch)
        stretch.jobs.append(job)
    return jobs


class Recorder(ABC):
    """Records computations, to launch them again at once.

    Recordings in one pool share its memory: later recordings use what a tensor leaves free. So they must be launched
    in the order in which they were recorded, one round after the other.
    """

    device_type: str

    @abstractmethod
    def aside(self) -> AbstractContextManager[None]:
        """Run plainly where recordings are made, so that everything set up on first use exists for them."""

    @abstractmethod
    def new_pool(self) -> Any:
        """Return an empty pool for recordings that belong together."""

    @abstractmethod
    def capture(self, pool: Any, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` computes, without computing it, and return a function that computes it."""

    @abstractmethod
    def borrowed(self, tensor: Tensor) -> Tensor:
        """Return a tensor with the same memory that neither keeps it from being reused nor shares its version."""


_FIX = "use capture=False"


class CapturedRow:
    """The jobs that replace a rank's own after a step is captured; stretches not captured yet are captured by them."""

    def __init__(self, executor: Executor, recorder: Recorder) -> None:
        self.executor = executor
        self.recorder = recorder
        self._modules = [
            module for stage in executor.stages.values() for part in stage.segments for module in part.modules
        ]
        self._spaces = [space for module in self._modules for space in (module._parameters, module._buffers) if space]
        self.forget()

    def forget(self) -> None:
        """Free the graphs and their memory."""
        self.jobs = [
            replace(job, run=self._send) if job.action.op in SEND_OPS else job
            for job in stretches(self.executor.jobs, self._run)
        ]
        self._pool: Any = None
        self._sent: dict[Action, tuple[Action, Sequence[Tensor], Any]] = {}
        self._parameters: list[nn.Parameter] = []
        self._gradients: list[Tensor] = []

    def state(self) -> Any:
        """Return what graphs rely on: addresses of tensors, what is frozen, modes and attributes."""
        tensors = [tensor for space in self._spaces for tensor in space.values() if tensor is not None]
        return (
            list(map(id, tensors)),
            list(map(Tensor.data_ptr, tensors)),
            [tensor.requires_grad for tensor in tensors],
            [module.training for module in self._modules],
            [{key: value for key, value in vars(module).items() if type(value) in PLAIN} for module in self._modules],
            [module.script.epoch for module in self._modules if isinstance(module, Piece)],
        )

    def prepare(self) -> None:
        """Prepare for new graphs."""
        self._pool = self.recorder.new_pool()
        stages = self.executor.stages.values()
        self._parameters = list(dict.fromkeys(param for stage in stages for param in stage.parameters))
        self._gradients = [torch.zeros_like(param, dtype=gradient_dtype(param)) for param in self._parameters]

    def attach(self) -> None:
        """Point every parameter's gradient to the tensor that the graphs add to."""
        fresh = []
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                fresh.append(gradient)
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient
        if fresh:
            torch._foreach_zero_(fresh)

    def _run(self, stretch: Stretch, step: Step) -> None:
        arrived = self.executor.arrived
        deliveries = [arrived.pop(receive) for receive, _ in stretch.needs]
        if stretch.replay is None:
            self._capture(stretch, deliveries, step)
        for (receive, _), place, delivery in zip(stretch.needs, stretch.inputs, deliveries, strict=True):
            _fill(receive, place, delivery)
        assert stretch.replay is not None
        stretch.replay()

    def _capture(self, stretch: Stretch, deliveries: Sequence[Delivery], step: Step) -> None:
        statics: list[Delivery] = []

        def through() -> None:
            for (receive, _), delivery in zip(stretch.needs, deliveries, strict=True):
                statics.append(replace(delivery, tensors=tuple([torch.empty_like(t) for t in delivery.tensors])))
                self.executor.arrived[receive] = statics[-1]
            for part in (piece for job in stretch.jobs for piece in job.parts or (job,)):
                part.put(part, step, part.call(part.microbatch, *part.take(part, step)))

        try:
            replay = self.recorder.capture(self._pool, through)
        except DrumlineError:
            raise
        except RuntimeError as error:
            raise ModelError(
                f"{stretch} cannot be captured: {str(error).strip().splitlines()[0]}",
                expected="blocks and a loss that never make the host wait for the device, as .item() would",
                fix=_FIX,
            ) from error
        if any(param.grad is not gradient for param, gradient in zip(self._parameters, self._gradients, strict=True)):
            raise ModelError(
                f"{stretch} replaces a gradient by another tensor",
                expected="gradients that accumulate in place, and no hooks that replace them",
                fix=_FIX,
            )
        stretch.inputs = [replace(s, tensors=tuple(map(self.recorder.borrowed, s.tensors))) for s in statics]
        stretch.replay = replay

    def _send(self, job: Job, step: Step) -> None:
        start = self.executor.clock.now()
        if job.action not in self._sent:
            receive, new_tensors, form = self.executor.message(job)
            for tensor in new_tensors:
                if tensor.device.type != self.recorder.device_type:
                    raise ModelError(
                        f"{job.action} sends a tensor on {tensor.device.type}",
                        expected=f"only tensors on {self.recorder.device_type} between captured stages",
                        fix=_FIX,
                    )
            self._sent[job.action] = receive, tuple(map(self.recorder.borrowed, new_tensors)), form
        receive, tensors, form = self._sent[job.action]
        self.executor.hand_over(start, job.other, receive, tuple([tensor.clone() for tensor in tensors]), form)


def _fill(receive: Action, place: Delivery, delivery: Delivery) -> None:
    """Copy a message to where its stretch reads it."""
    if not _alike(place, delivery):
        raise ModelError(
            f"{receive} brings {_described(delivery)} but brought {_described(place)} when the step was captured",
            expected="the same messages in all steps whose batches have the same shapes",
            fix=_FIX,
        )
    for static, tensor in zip(place.tensors, delivery.tensors, strict=True):
        static.copy_(tensor)


def _alike(place: Delivery, delivery: Delivery) -> bool:
    # Compare forms by their bytes: 1, 1.0 and True are equal but not the same.
    same_form = place.form is delivery.form or pickle.dumps(place.form) == pickle.dumps(delivery.form)
    return same_form and _metas(place) == _metas(delivery)


def _metas(delivery: Delivery) -> list[Any]:
    return [(tensor.dtype, tensor.shape) for tensor in delivery.tensors]


def _described(delivery: Delivery) -> str:
    shapes = [f"{tuple(tensor.shape)} of {tensor.dtype}" for tensor in delivery.tensors]
    return f"{', '.join(shapes) or 'no tensor'}, in the structure {delivery.form!s:.60},"
