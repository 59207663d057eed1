"""Update parameters: with any optimizer, or, for scaled gradients and master weights, only with `Pipeline.optimizer`.

`Pipeline.optimizer` returns the requested torch optimizer. If its steps may be skipped, or update copies, this instance
gets its own `step` and `zero_grad`, which wrap torch's.

A guard stops optimizers from stepping on gradients that are not finite on some rank. torch runs one global hook before
any optimizer's step. The hook checks whether the optimizer holds a pipeline's parameters. If so, that pipeline first
settles its last step, which raises NonFiniteError on every rank if any of them saw a NaN. The hook stays registered
next to others; without a pipeline it does nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from drumline.core.errors import ModelError, RunError, UsageError
from drumline.pipeline.observer import Observer
from drumline.pipeline.record.recording import Recording
from drumline.pipeline.record.tally import Handler
from drumline.pipeline.state.kept import KeptOptimizer
from drumline.pipeline.state.optimizer_state import NamedTensors, StateByName
from drumline.pipeline.state.scaler import LossScaler, multiplied
from drumline.pipeline.state.tensors import Holdings
from drumline.pipeline.state.validated import Validation, refusal
from drumline.pipeline.state.whole_matrices import WholeMatrices
from drumline.pipeline.verify.model_check import ModelCheck
from drumline.runtime.axes.sharding import StateShards, by_element
from drumline.runtime.executor import Step
from drumline.runtime.precision import LOW, Precision


class Updates(Observer):
    """Everything between this process's gradients and its optimizers."""

    def __init__(
        self,
        precision: Precision,
        holdings: Holdings,
        recording: Recording,
        check: ModelCheck,
        validation: Validation,
        *,
        master_weights: bool,
    ) -> None:
        self.precision = precision
        self.holdings = holdings
        self._recording, self._check = recording, check
        self.scaler = LossScaler() if precision.scales else None
        self.masters = Masters() if master_weights else None
        self.validation: Validation = validation
        self.divided: StateShards | None = None  # if the lines of a mesh divide optimizer state
        self.wholes = WholeMatrices(holdings.crew.axes, precise=master_weights)
        self._own: WeakSet[Optimizer] = WeakSet()
        self._made: list[ref[Optimizer]] = []  # in the order in which they were asked for

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the parameters of all stages here, and guard them against optimizers."""
        self._guard = Guard(self.holdings.parameters(), self.before, self.after)
        listed = list(parameters)
        if self.masters is not None:
            self.masters.follow(listed)
        elif self.scaler is not None:
            low = {str(one.dtype) for one in listed if one.dtype in LOW and one.requires_grad}
            if low:
                raise ModelError(
                    f'precision is "fp16" and the model has parameters in {", ".join(sorted(low))}',
                    expected="float32 parameters, whose gradients can be unscaled exactly",
                    fix="use model.float(), or master_weights=True",
                )

    def begin(self, step: Step) -> None:
        """Before a step, set its scale and apply it to earlier gradients, so that new ones can be added."""
        if self.scaler is not None:
            step.scale = self.scaler.scale
            self._multiply(self.scaler.scale)

    def end(self, step: Step) -> None:
        """After a step, unscale the gradients."""
        if self.scaler is not None:
            self._multiply(1.0 / step.scale)
            self.scaler.ran(step.number)

    def _multiply(self, factor: float) -> None:
        multiplied([one.grad for one in self.holdings.parameters() if one.grad is not None], factor)

    def before(self, optimizer: Optimizer) -> None:
        """Stop an optimizer from stepping on a failed step."""
        self.check(optimizer)
        self._check.refuse()
        if not self.validation.is_on:
            self._recording.settle()
        self._recording.between.enter("update")

    def after(self, optimizer: Optimizer) -> None:
        """Measure the update up to here."""
        self._recording.between.leave()

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that would bypass the scaler or the master weights."""
        if optimizer in self._own or (self.scaler is None and self.masters is None and not self.validation.is_on):
            return
        what = f'precision="{self.precision.name}"' if self.scaler is not None else "master_weights=True"
        only_copies = self.scaler is None and not self.validation.is_on
        if self.validation.is_on:
            what = 'validated="after" on another optimizer'
        kind = type(optimizer).__name__
        raise RunError(
            f"{kind} was created directly over the pipeline's parameters, with {what}",
            expected="one from pipe.optimizer, "
            + ("for the float32 copies" if only_copies else "so that all ranks skip the same steps"),
            fix=f"use pipe.optimizer(torch.optim.{kind}, ...)",
        )

    def forget(self) -> None:
        """Record that all gradients were set to zero."""
        self.validation.forget()
        if self.scaler is not None:
            self.scaler.forget()

    @property
    def handler(self) -> Handler:
        """What decides about steps that are not finite."""
        return self.validation if self.scaler is None else self.scaler

    def validate(self, after: bool, max_norm: float | None, *, captures: bool) -> None:
        """Have optimizers step before or after all ranks agree; all of them alike."""
        if bool(self._made) and after != self.validation.is_on and self.optimizers():
            raise UsageError(
                f'validated is "{"after" if after else "before"}", and not so on another optimizer of this pipeline',
                expected="the same on all optimizers",
            )
        if not after:
            self.validation.turn_off()
            return
        axes = self.holdings.crew.axes
        if self.scaler is not None:
            raise refusal('precision is "fp16"', "bf16 or fp32: the next step's loss scale follows from the verdict")
        if captures:
            raise refusal("capture is True", "capture=False: a graph cannot be left after its opening")
        if self.divided is not None or self.holdings.shards is not None:
            raise refusal("zero divides state", "zero=0: lines exchange parameters inside of the optimizer's step")
        if axes.size("tp", "ep", "cp") > 1:
            raise refusal(f"the mesh is {axes.described()}", "axes pp and dp alone: others were not tried")
        self.validation.turn_on(max_norm)

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that were made here and are still in use."""
        return [one for made in self._made if (one := made()) is not None]

    def optimizer(
        self,
        kind: type[Optimizer],
        parameters: Sequence[nn.Parameter],
        settings: dict[str, Any],
        named: NamedTensors = tuple,
    ) -> Optimizer:
        """Return an optimizer of the requested class, whose state uses the names of the tensors it updates."""
        if not isinstance(kind, type):
            raise RunError(
                f"pipe.optimizer got {kind!r:.60}",
                expected="an optimizer class, as in pipe.optimizer(torch.optim.AdamW)",
            )
        if self.holdings.shards is not None and not by_element(kind):
            raise RunError(
                f"{kind.__name__} may look at whole matrices, and with zero=3 each line holds a piece of every one",
                expected="an optimizer that treats every element alike, such as AdamW",
                fix="use zero=1, where each matrix belongs to one line",
            )
        if not by_element(kind):
            self.wholes.cover(parameters)
        if self.divided is not None:
            self.divided.divide([one for one in parameters if self.wholes.of(one) is None], kind)
        updated = [self.updated(one) for one in parameters]
        made = kind([{"params": updated}], **settings)
        copied = any(one is not other for one, other in zip(updated, parameters, strict=True))
        StateByName(named).attach(made)
        self._made.append(ref(made))
        if self.validation.is_on:
            made.register_state_dict_pre_hook(lambda _: self._recording.settle())
            made.register_load_state_dict_pre_hook(lambda *_: self._recording.settle())
        if self.scaler is not None or self.masters is not None or self.validation.is_on or copied or not parameters:
            # No guard finds an optimizer without parameters here, and it must not step where others are held back.
            self._own.add(made)
            # Use bound methods, because learning-rate schedulers wrap the function of what they find here.
            kept = self.validation.keeping(made) if self.validation.is_on else None
            step = self._step(parameters, kept)
            setattr(made, "step", MethodType(step, made))  # noqa: B010 - a method of this one instance
            setattr(made, "zero_grad", MethodType(self._zero_grad(parameters), made))  # noqa: B010
        return made

    def piece(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what an optimizer updates of a parameter, before precision: a whole copy, this line's part, or it."""
        whole = self.wholes.of(parameter)
        if whole is not None:
            return whole
        return parameter if self.divided is None else self.divided.of(parameter)

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that optimizers update for a parameter here."""
        piece = self.piece(parameter)
        return piece if self.masters is None or self.wholes.of(parameter) is not None else self.masters.of(piece)

    def named(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that optimizers update, by name."""
        if self.masters is not None:
            self.masters.catch_up()
        return ((name, self.updated(one)) for name, one in parameters)

    def _step(self, parameters: Sequence[nn.Parameter], kept: KeptOptimizer | None) -> Callable[..., Any]:
        def step(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> None:
            """Step, unless a gradient on any rank is not finite."""
            if closure is not None:
                raise RunError("optimizer.step got a closure", fix="call pipe.step first, then optimizer.step()")
            apply, follow = partial(self._apply, optimizer, parameters), partial(self._follow, parameters)
            if kept is not None:
                self._check.refuse()
                self.validation.step(kept, parameters, apply, follow)
                return
            self._recording.settle()
            if self.scaler is None or self.scaler.decide():
                apply()

        return step

    def _apply(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Step, with the gradients that the parameters have now."""
        if self.divided is not None:
            self.divided.take(parameters)
        if self.masters is not None:
            self.masters.take([self.piece(one) for one in parameters])
        self.wholes.take(parameters)
        type(optimizer).step(optimizer)
        self._follow(parameters)

    def _follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give parameters the values of what the optimizer updates in their place."""
        if self.masters is not None:
            self.masters.give([self.piece(one) for one in parameters])
        self.wholes.give(parameters)
        if self.divided is not None:
            self.divided.give(parameters)

    def _zero_grad(self, parameters: Sequence[nn.Parameter]) -> Callable[..., None]:
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            """Clear the gradients, also of parameters that only follow their copies; never in place."""
            held = [] if set_to_none else [(one, one.grad) for one in parameters if one.grad is not None]
            type(optimizer).zero_grad(optimizer)
            for one in parameters:
                one.grad = None
            for one, gradient in held:
                one.grad = torch.zeros_like(gradient)
            self.forget()

        return zero_grad


class Masters:
    """The float32 copies of this process's low-precision parameters, which the optimizer updates in their place.

    A bfloat16 weight cannot take an update much smaller than itself: 1 + 0.001 is 1. So gradients accumulate over
    microbatches and steps in float32, the optimizer updates float32 copies, and the parameters follow, rounded.

    >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> masters = Masters(); masters.follow([weight])
    >>> optimizer = torch.optim.SGD([masters.of(weight)], lr=1e-3)
    >>> (weight * 1.0).sum().backward()
    >>> masters.take([weight]); optimizer.step(); masters.give([weight])
    >>> masters.of(weight), weight
    (Parameter containing:
    tensor([0.9990, 0.9990], requires_grad=True), Parameter containing:
    tensor([1., 1.], dtype=torch.bfloat16, requires_grad=True))
    """

    def __init__(self) -> None:
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._seen: dict[nn.Parameter, tuple[int, int]] = {}  # a parameter's address and version

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Accumulate the gradients of these parameters in float32."""
        for one in parameters:
            if one.dtype in LOW and one.requires_grad:
                one.grad_dtype = torch.float32

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer updates for a parameter: its copy, or itself if it is precise enough."""
        if parameter.dtype not in LOW:
            return parameter
        if parameter not in self._copies:
            self._copies[parameter] = nn.Parameter(parameter.detach().float())
            self._seen[parameter] = _mark(parameter)
        return self._copies[parameter]

    def named(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the updated tensor of each of these parameters, by name."""
        self.catch_up()
        return ((name, self.of(one)) for name, one in parameters)

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before an optimizer steps, give the copies of its parameters the gradients and any outside changes."""
        self.catch_up()
        for parameter in parameters:
            if parameter in self._copies:
                self._copies[parameter].grad = parameter.grad

    @torch.no_grad()
    def give(self, parameters: Iterable[nn.Parameter]) -> None:
        """After the optimizer steps, copy the results to its parameters."""
        stepped = {one: self._copies[one] for one in parameters if one in self._copies}
        if stepped:
            torch._foreach_copy_(list(stepped), list(stepped.values()))
        for parameter, copy in stepped.items():
            copy.grad = None
            self._seen[parameter] = _mark(parameter)

    @torch.no_grad()
    def catch_up(self) -> None:
        """Adopt parameters that other code has changed, such as a loaded state or an initialisation."""
        for parameter, copy in self._copies.items():
            if _mark(parameter) != self._seen[parameter]:
                copy.copy_(parameter)
                self._seen[parameter] = _mark(parameter)


def _mark(parameter: Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version


_guards: WeakSet[Guard] = WeakSet()
_found: WeakKeyDictionary[Optimizer, tuple[int, list[ref[Guard]]]] = WeakKeyDictionary()  # by number of parameters
_hooks: list[Any] = []


class Guard:
    """Calls `before` and `after` around each step of any optimizer that holds one of `parameters`."""

    def __init__(
        self, parameters: Sequence[Tensor], before: Callable[[Optimizer], None], after: Callable[[Optimizer], None]
    ) -> None:
        self.before = before
        self.after = after
        self._parameters = [ref(one) for one in parameters]  # not ids: those of freed objects are reused
        _guards.add(self)
        _found.clear()
        if not _hooks:
            _hooks.append(register_optimizer_step_pre_hook(_before_step))
            _hooks.append(register_optimizer_step_post_hook(_after_step))

    def guards(self, held: Collection[int]) -> bool:
        """Whether any of its living parameters is among the living ones with these ids."""
        return any(id(one) in held for seen in self._parameters if (one := seen()) is not None)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    size = sum(len(group["params"]) for group in optimizer.param_groups)
    if optimizer not in _found or _found[optimizer][0] != size:
        held = {id(one) for group in optimizer.param_groups for one in group["params"]}
        _found[optimizer] = size, [ref(guard) for guard in _guards if guard.guards(held)]
    for guard in _found_for(optimizer):
        guard.before(optimizer)


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for guard in _found_for(optimizer):
        guard.after(optimizer)


def _found_for(optimizer: Optimizer) -> list[Guard]:
    _, guards = _found.get(optimizer, (0, ()))
    return [guard for seen in guards if (guard := seen()) is not None]
