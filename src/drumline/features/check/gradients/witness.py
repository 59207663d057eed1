"""A witness sees what one microbatch of a step did on one rank: its part of each gradient, and the loss's input.

    forward                               gradients so far are set aside; what a block adds by itself is copied, added
    backward of the first microbatch      gradients appear: each is sketched where it is
    backward of a later one               gradients so far are set aside; what appears is sketched, added and freed

So no gradient is kept twice, and all sums have the bits that they have without a witness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.action import Op
from drumline.features.check.gradients.sketch import distances, sketch
from drumline.features.check.units.trail import BlockTrail, modules_of
from drumline.features.check.units.units import Units
from drumline.model.hooks import hooks_behind, with_holders
from drumline.model.patches import put_in
from drumline.model.values import mapped
from drumline.runtime.execute.executor import Executor
from drumline.runtime.execute.jobs import Job, nothing
from drumline.runtime.stage import Stage

Added = dict[nn.Parameter, Tensor]


class Witness:
    """Watches a rank's stages at the units of one microbatch; the step runs as usual.

    A gradient whose sketch is as `expected`, within its limit, is noted as `near`. Others are copied in full; if `only`
    is given, those in it. What several units add is known when the last has, so sketches of it are added up.
    """

    def __init__(
        self, units: Units, only: Collection[nn.Parameter] | None = None, trail: BlockTrail | None = None
    ) -> None:
        self.units = units
        self.only = only
        self.trail = trail  # of the blocks' outputs, if they are noted
        self.sketched: dict[nn.Parameter, Tensor] = {}  # sums of what several units added
        self.expected: dict[nn.Parameter, tuple[Tensor, float]] = {}  # sketches, and how far others may be from them
        self.near: set[nn.Parameter] = set()
        self.gradients: dict[nn.Parameter, Tensor] = {}
        self.unclear: set[nn.Parameter] = set()  # a hook has added to these once they were noted
        self.outputs: dict[int, Any] = {}  # by unit

    def adding(self, stage: Stage, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run a function that adds to a stage's gradients, and record what it added."""
        with _putting_aside(stage, self._note, self.unclear) as added:
            result = run(*arguments)
            self._note(added())
        return result

    def weighing(self, stage: Stage, microbatch: int) -> None:
        """Run W of a microbatch, and record what it adds."""
        pairs = stage.weight_gradients(microbatch)
        added: Added = {}
        for param, gradient in pairs:
            added[param] = _dense(added[param]) + _dense(gradient) if param in added else gradient.detach()
        self._note(added)
        stage.add(pairs)

    def _note(self, added: Mapping[nn.Parameter, Tensor]) -> None:
        if self.units.are_several:
            self._add_sketches(added)
            return
        # What a forward has added is a part of the sum.
        known = [param for param in added if param in self.expected and param not in self.gradients]
        distances_now = distances(
            [sketch(added[param]) for param in known], [self.expected[param][0] for param in known]
        )
        self.near.update(
            param for param, far in zip(known, distances_now, strict=True) if far <= self.expected[param][1]
        )
        self._copy({param: gradient for param, gradient in added.items() if param not in self.near})

    def _add_sketches(self, added: Mapping[nn.Parameter, Tensor]) -> None:
        for param, gradient in added.items():
            if self.only is None or param in self.only:
                more = sketch(gradient)
                self.sketched[param] = self.sketched[param] + more if param in self.sketched else more

    def _copy(self, added: Mapping[nn.Parameter, Tensor]) -> None:
        if self.units.are_several:
            self._add_sketches(added)
            return
        for param, gradient in added.items():
            if self.only is None or param in self.only:
                copy = _dense(gradient).to("cpu", copy=True)  # the host has room for it until the step ends
                self.gradients[param] = self.gradients[param] + copy if param in self.gradients else copy

    def listening(self, stage: Stage, unit: int, run: Callable[..., Any], *arguments: Any) -> Any:
        """Run a stage's forward, and record the input of its loss, and gradients that blocks make in it."""
        noting = nullcontext() if self.trail is None else self.trail.following(modules_of(stage.blocks), unit)
        with _without_gradients(stage, self._copy), noting:
            return self._listening(stage, unit, run, *arguments)

    def _listening(self, stage: Stage, unit: int, run: Callable[..., Any], *arguments: Any) -> Any:
        loss = stage.loss
        if loss is None:
            return run(*arguments)

        def noted(output: Any, target: Any) -> Tensor | None:
            self.outputs[unit] = mapped(output, lambda tensor: tensor.detach().to("cpu", copy=True))
            return loss(output, target)

        with put_in([(vars(stage), "loss", noted)]):
            return run(*arguments)


class WatchedRank:
    """A rank of this process: its parameters by name, and the witnesses of a step, one for each microbatch."""

    def __init__(self, executor: Executor, named: Mapping[str, nn.Parameter]) -> None:
        self.executor, self.named = executor, named
        self.witnesses: Sequence[Witness] = ()

    def watch(self, witnesses: Sequence[Witness]) -> None:
        """Have the rank's jobs watched from now on."""
        self.witnesses = witnesses
        self.executor.watched = partial(_watched, witnesses)
        self.executor.replace_jobs()

    def leave(self) -> None:
        """Let the rank run its jobs unseen."""
        self.executor.watched = None
        self.executor.replace_jobs()


def _watched(witnesses: Sequence[Witness], job: Job) -> Job:
    """Return a job of a watched step: a witness sees what concerns its microbatch."""
    if job.parts:
        return replace(job, parts=tuple(_watched(witnesses, part) for part in job.parts))
    stage, op = job.stage, job.action.op
    running = job.together or (job.microbatch,)
    watching = [witness for witness in witnesses if any(unit in witness.units.numbers for unit in running)]
    if stage is None or not watching:
        return job
    if job.together:
        return replace(job, call=partial(_alone_and_merged, watching, stage, job.together))
    if op is Op.BACKWARD_WEIGHT and job.call is not nothing:
        return replace(job, call=partial(watching[0].weighing, stage))
    if op is Op.BACKWARD or (op is Op.BACKWARD_INPUT and any(segment.runs_whole for segment in stage.segments)):
        return replace(job, call=partial(watching[0].adding, stage, job.call))
    if op is not Op.FORWARD:
        return job
    return replace(job, call=partial(watching[0].listening, stage, job.microbatch, job.call))


def _alone_and_merged(watching: Sequence[Witness], stage: Stage, together: Sequence[int], _: int) -> None:
    watched = {unit: witness for witness in watching for unit in witness.units.numbers}
    for unit in together:
        if unit in watched:
            watched[unit].weighing(stage, unit)
    if rest := [number for number in together if number not in watched]:
        stage.backward_weight_merged(rest)


@contextmanager
def _without_gradients(stage: Stage, note: Callable[[Added], None]) -> Iterator[None]:
    """Put gradients so far aside; note what is there at the end, and add it to them."""
    named = dict.fromkeys(param for segment in stage.segments for param in (*segment.parameters, *segment.lent))
    before = {param: param.grad for param in named if not getattr(param, "_post_accumulate_grad_hooks", None)}
    for param in before:
        param.grad = None
    try:
        yield
    finally:
        for param, earlier in before.items():
            gradient, param.grad = param.grad, earlier
            if gradient is not None:
                note({param: gradient.detach()})
                param.grad = gradient if earlier is None else _sum(earlier, gradient)


def _sum(earlier: Tensor, gradient: Tensor) -> Tensor:
    """Return two gradients' sum, in the memory of the first if it can be."""
    return (
        earlier.add_(gradient)
        if gradient.layout is earlier.layout is torch.strided
        else _dense(earlier) + _dense(gradient)
    )


@contextmanager
def _putting_aside(
    stage: Stage, note: Callable[[Added], None], unclear: set[nn.Parameter]
) -> Iterator[Callable[[], Added]]:
    """Note each gradient that grows inside as soon as it is there, then add it to the one so far, and free it.

    Yield a function that returns what was not noted.

    Gradients that grow more than once in a backward, or that hooks look at, stay where they are: a copy is subtracted.
    Those that something else has changed afterwards, or may change, are `unclear`.
    """
    grows = Counter(param for segment in stage.segments for param in (*segment.parameters, *segment.lent))
    unclear.update(param for param in with_holders(grows) if hooks_behind(param))
    aside: dict[nn.Parameter, Tensor] = {}
    copies: dict[nn.Parameter, Tensor | None] = {}
    noted: dict[nn.Parameter, tuple[Tensor, int]] = {}
    for param in grows:
        earlier = param.grad
        hooks = getattr(param, "_post_accumulate_grad_hooks", None)
        if earlier is not None and (hooks or grows[param] > 1 or earlier.layout is not torch.strided):
            copies[param] = earlier.detach().clone()
        elif earlier is not None:
            aside[param] = earlier
            param.grad = None
        else:
            copies[param] = None

    def add(tensor: Tensor) -> None:
        assert isinstance(tensor, nn.Parameter)
        earlier, new = aside.pop(tensor, None), tensor.grad
        if earlier is not None and new is not None:
            note({tensor: new.detach()})
            tensor.grad = earlier.add_(new) if new.layout is torch.strided else earlier + new
            noted[tensor] = tensor.grad, tensor.grad._version

    handles = [param.register_post_accumulate_grad_hook(add) for param in aside]  # type: ignore[no-untyped-call]

    def added() -> Added:
        gradients: Added = {}
        for param, earlier in copies.items():
            if param.grad is not None:
                gradients[param] = (
                    param.grad.detach() if earlier is None else _dense(param.grad.detach()) - _dense(earlier)
                )
        return gradients

    try:
        yield added
    finally:
        for handle in handles:
            handle.remove()
        for param, earlier in aside.items():  # autograd has added nothing to these
            if (gradient := param.grad) is not None:
                note({param: gradient.detach()})
            param.grad = earlier if gradient is None else _sum(earlier, gradient)
        unclear.update(
            param for param, (last, version) in noted.items() if param.grad is not last or last._version != version
        )


def _dense(gradient: Tensor) -> Tensor:
    """Return a gradient that can be added to any other."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
