"""Steps with CUDA graphs: which step runs plainly, which is captured, and which are replayed.

    step      plainly ──► captured while it runs ──► replayed ──► replayed ...     while nothing changes on any rank
                ▲                                       │
                └── other shapes, other parameters, another mode, or a failure

The inputs of a step are copied to where the graphs read them. Either all ranks replay or none: if the batch has other
shapes, so have messages, and only the rank with the first stage sees that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import ModelError
from drumline.engine.ranks.crew import Drive
from drumline.features.capture.captured_row import CapturedRow, Recorder
from drumline.model.precision import casts_kept
from drumline.model.randomness import Randomness
from drumline.model.values import mapped, pack
from drumline.runtime.batch import cut
from drumline.runtime.draft import Draft
from drumline.runtime.execute.executor import Executor
from drumline.runtime.step import Step


class Capture:
    """The captured rows of this process's ranks.

    `agree` tells all ranks a number and returns the numbers of all ranks.
    """

    def __init__(
        self,
        executors: Sequence[Executor],
        randomness: Randomness,
        recorder: Recorder,
        agree: Callable[[int], Sequence[int]],
    ) -> None:
        self.rows = [CapturedRow(executor, recorder) for executor in executors]
        self.randomness = randomness
        self.recorder = recorder
        self.agree = agree
        self._own_view: Any = None  # this process's view of a step, and how often it changed
        self._changes = 0
        self._now: Sequence[int] = ()  # changes of all ranks, now and at the last good step
        self._known: Sequence[int] | None = None
        self._is_captured = False
        self._static = Step(-1)
        self._shares: Sequence[Tensor] = ()  # the microbatches' shares in the last step, and its factor
        self._factor = 1.0

    def fits(self, step: Step) -> bool:
        """Whether a step can be replayed, the same on every rank; asks the others, so call it once per step."""
        device = self.recorder.device_type
        autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        own_view = (_signature(step), autocast, [row.state() for row in self.rows])
        if own_view != self._own_view:
            self._own_view = own_view
            self._changes += 1
        self._now = tuple(self.agree(self._changes))
        return self._is_captured and self._now == self._known

    def run(self, step: Step, drafts: Sequence[Draft], drive: Drive) -> None:
        """Run a step after `fits` was called for it."""
        again, self._known = self._now == self._known, None  # after a failure everything starts again
        if not again:
            self._is_captured = False
            self._forget()
            self._buffers_changed()  # compare from here on
            self._refuse(self._run_as_ever(step, drafts, drive))
        elif self._is_captured and _left_out(step) != _left_out(self._static):
            self._run_as_ever(step, drafts, drive)  # other microbatches have weight 0; messages stay the same
        else:
            self._run_by_graphs(step, drafts, drive)
            self._is_captured = True
        self._known = self._now

    def _run_as_ever(self, step: Step, drafts: Sequence[Draft], drive: Drive) -> Sequence[str]:
        """Run a step action by action, and return the blocks that drew random numbers."""
        rows = zip(self.rows, drafts, strict=True)
        runs = [row.executor.run(step, draft, row.executor.jobs) for row, draft in rows]
        with (
            self.randomness.kept_aside(),
            torch.autograd.set_multithreading_enabled(False),
            casts_kept(),
            self.recorder.aside(),
            self.randomness.listening() as drawing,
        ):
            drive(runs)
        return drawing

    def _run_by_graphs(self, step: Step, drafts: Sequence[Draft], drive: Drive) -> None:
        if not self._is_captured:
            self._prepare(step)
        static = self._static
        static.number = step.number
        for place, value in zip(_tensors(static), _tensors(step), strict=True):
            place.copy_(value, non_blocking=True)
        step.shares = step.shares or self._shares  # a step that was not split has the shares of the last one
        if step.shares is not self._shares or step.factor != self._factor:
            # Gradients begin with the shares, so these apply the factor, which may differ in every step.
            torch._foreach_copy_(list(static.shares), [share * step.factor for share in step.shares])
            self._shares, self._factor = step.shares, step.factor
        for row in self.rows:
            row.attach()
        # The graphs cast weights themselves, or they would reuse old casts.
        with self.randomness.silenced(), torch.autograd.set_multithreading_enabled(False), casts_kept():
            drive([row.executor.run(static, draft, row.jobs) for row, draft in zip(self.rows, drafts, strict=True)])
        step.losses = dict(static.losses)

    def _forget(self) -> None:
        self._static, self._shares = Step(-1), ()
        for row in self.rows:
            row.forget()

    def _prepare(self, step: Step) -> None:
        """Allocate the memory that the graphs read and write."""
        batch, target = mapped(step.batch, Tensor.clone), mapped(step.target, Tensor.clone)
        targets = cut(target, len(step.targets)) if step.targets else []
        self._static = Step(
            step.number,
            batch,
            target,
            inputs=(step.cuts or partial(cut, num_microbatches=len(step.inputs)))(batch) if step.inputs else (),
            targets=[
                value if pack(given_target)[0] else given_target
                for value, given_target in zip(targets, step.targets, strict=True)
            ],
            shares=[share.clone() for share in step.shares],
        )
        for row in self.rows:
            row.prepare()

    def _refuse(self, drawing: Sequence[str]) -> None:
        """Refuse what a graph cannot repeat, as far as the last step showed it."""
        if drawing:
            raise ModelError(
                f"block {drawing[0]} draws random numbers, which Drumline cannot seed in a captured step",
                expected="blocks without dropout",
                fix="use capture=False",
            )
        if self._buffers_changed():
            raise ModelError(
                "a block changes its buffers", expected="blocks without running statistics", fix="use capture=False"
            )
        parameters = [p for row in self.rows for stage in row.executor.stages.values() for p in stage.parameters]
        if any(param.grad is not None and param.grad.layout is not torch.strided for param in parameters):
            raise ModelError("a gradient is sparse", expected="dense gradients", fix="use capture=False")

    def _buffers_changed(self) -> bool:
        """Whether buffers have changed since the last call."""
        stages = (stage for row in self.rows for stage in row.executor.stages.values())
        changed = [segment.buffers.changed_lately() for stage in stages for segment in stage.segments]
        return any(changed)


def _left_out(step: Step) -> list[int]:
    """Return the microbatches with weight 0, whose target is therefore not read."""
    return [index for index, target in enumerate(step.targets) if not pack(target)[0]]


def _tensors(step: Step) -> list[Tensor]:
    return [tensor for value in (step.batch, step.target) for tensor in pack(value)[0]]


def _signature(step: Step) -> Any:
    packed = (pack(step.batch), pack(step.target))
    return [(form, [(tensor.shape, tensor.dtype) for tensor in tensors]) for tensors, form in packed]
