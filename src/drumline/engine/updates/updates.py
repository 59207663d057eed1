"""Update parameters: with any optimizer, or, for scaled gradients and master weights, only with `Pipeline.optimizer`.

`Pipeline.optimizer` returns the requested torch optimizer. If its steps may be skipped, or update copies, this instance
gets its own `step` and `zero_grad`, which wrap torch's.

When layers move between ranks, the optimizer objects stay: each drops what has left, with its state, and takes over
what has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.core.errors import ModelError, RunError, UsageError
from drumline.engine.ranks.journal import Journal
from drumline.engine.ranks.tally import Handler
from drumline.engine.state.tensors import Holdings
from drumline.engine.updates.attached import Divides, ParameterCopies, Refuses, Scales
from drumline.engine.updates.guard import Guard, guarded_by
from drumline.engine.updates.optimizer_state import NamedTensors, StateByName
from drumline.engine.updates.validation_time import Validates
from drumline.engine.updates.whole_matrices import WholeMatrices, by_element
from drumline.model.precision import Precision, settle_products
from drumline.runtime.backward.hooked import is_in_backward, updated_inside


class OptimizerEntry(NamedTuple):
    """What one optimizer keeps of a parameter: the number of its group, and its state."""

    group: int
    state: dict[str, Any]


class ParameterState(NamedTuple):
    """What optimizers keep of a parameter: its float32 copy if it has one, and what each of them keeps, if anything.

    Lines of a mesh may divide the parameter, and have a `whole` copy for optimizers that need it; or divide its state,
    in a way that `division` says.
    """

    master: Tensor | None
    entries: list[OptimizerEntry | None]
    whole: Tensor | None = None
    division: Any = None


class Updates:
    """Everything between this process's gradients and its optimizers."""

    def __init__(
        self,
        precision: Precision,
        holdings: Holdings,
        recording: Journal,
        check: Refuses,
    ) -> None:
        self.precision = precision
        self.holdings = holdings
        self._recording, self._check = recording, check
        self.scaler = Scales()
        self.masters = ParameterCopies()
        self.validation = Validates()
        self.divided = Divides()
        self.wholes = WholeMatrices(holdings.crew.axes)
        self._own_optimizers: WeakSet[Optimizer] = WeakSet()
        self._optimizers: list[ref[Optimizer]] = []  # in the order in which they were asked for
        self._left: list[ref[nn.Parameter]] = []  # parameters whose layers have moved to other ranks
        self._parameters: WeakKeyDictionary[Optimizer, list[nn.Parameter]] = WeakKeyDictionary()
        self.streams = False  # whether optimizers step inside of a step, because the schedule has no flush
        self._kept_optimizers: list[Optimizer] = []  # then, because nobody else may hold them
        self._is_inside = False

    def update_copies(self, masters: ParameterCopies) -> None:
        """Have optimizers update copies of parameters; called before the first of them is made."""
        self.masters, self.wholes.precise = masters, True

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Record the parameters of all stages here, and guard them against optimizers."""
        left = [param for reference in self._left if (param := reference()) is not None]
        self._guard = Guard([*self.holdings.parameters(), *left], self.before, self.after)
        listed = list(parameters)
        if self.precision.scales and not self.scaler.is_on:
            raise ModelError(
                f"precision is {self.precision.name!r}, and nothing is attached that scales the loss",
                expected='"fp32" or "bf16"',
            )
        self.masters.follow(listed)
        if not self.masters.is_on:
            self.scaler.follow(listed)

    def before(self, optimizer: Optimizer) -> None:
        """Stop an optimizer from stepping on a failed step, or in the middle of one."""
        if is_in_backward():
            raise updated_inside(f"a hook calls {type(optimizer).__name__}.step()")
        self.check(optimizer)
        if self._is_stepped_inside(optimizer):
            return
        self._refuse_left(optimizer)
        self._check.refuse()
        if not self.validation.is_on:
            self._recording.settle()
        self._recording.between.enter("update")

    def after(self, optimizer: Optimizer) -> None:
        """Measure the update up to here."""
        if not self._is_inside:
            self._recording.between.leave()

    @contextmanager
    def inside(self, parameters: list[nn.Parameter], move: Callable[[list[nn.Parameter]], None]) -> Iterator[None]:
        """Let optimizers step inside of a step; `move` may give their parameters other memory with the same values."""
        self.masters.catch_up()
        move(parameters)
        self.masters.moved()
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False

    def _is_stepped_inside(self, optimizer: Optimizer) -> bool:
        """Whether the pipeline steps optimizers itself; refuse a step by anybody else."""
        if self.streams and not self._is_inside:
            raise RunError(
                f"{type(optimizer).__name__}.step() was called, and the schedule has no flush",
                expected="no call of it: optimizers from pipe.optimizer step inside pipe.step",
                fix="remove optimizer.step()",
            )
        return self.streams

    def check(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that would bypass the scaler or the master weights."""
        if optimizer in self._own_optimizers or not self._holds_back:
            return
        what = f'precision="{self.precision.name}"' if self.scaler.is_on else "master_weights=True"
        only_copies = not self.scaler.is_on and not self.validation.is_on
        if self.validation.is_on:
            what = 'validated="after" on another optimizer'
        kind = type(optimizer).__name__
        raise RunError(
            f"{kind} was created directly over the pipeline's parameters, with {what}",
            expected="one from pipe.optimizer, "
            + ("for the float32 copies" if only_copies else "so that all ranks skip the same steps"),
            fix=f"use pipe.optimizer(torch.optim.{kind}, ...)",
        )

    @property
    def _holds_back(self) -> bool:
        """Whether optimizers may have to leave an update out, or update copies."""
        return self.scaler.is_on or self.masters.is_on or self.validation.is_on

    def _refuse_left(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that still holds what has moved to other ranks, and so lacks what has come."""
        left = {id(param) for reference in self._left if (param := reference()) is not None}
        if left and any(id(param) in left for group in optimizer.param_groups for param in group["params"]):
            kind = type(optimizer).__name__
            raise RunError(
                f"{kind} holds parameters of layers that have moved to another rank",
                expected="an optimizer from pipe.optimizer, which follows them",
                fix=f"use pipe.optimizer(torch.optim.{kind}, ...)",
            )

    def forget(self) -> None:
        """Record that all gradients were set to zero."""
        self.validation.forget()
        self.scaler.forget()

    @property
    def handler(self) -> Handler:
        """What decides about steps that are not finite."""
        return self.scaler if self.scaler.is_on else self.validation

    def validate(self, after: bool, max_norm: float | None) -> None:
        """Have optimizers step before or after all ranks agree; all of them alike."""
        if bool(self._optimizers) and after != self.validation.is_on and self.optimizers():
            raise UsageError(
                f'validated is "{"after" if after else "before"}", and not so on another optimizer of this pipeline',
                expected="the same on all optimizers",
            )
        if not after:
            self.validation.turn_off()
            return
        self.validation.turn_on(max_norm)

    def optimizers(self) -> list[Optimizer]:
        """Return the optimizers that were made here and are still in use."""
        return [optimizer for reference in self._optimizers if (optimizer := reference()) is not None]

    def optimizer(
        self,
        kind: type[Optimizer],
        groups: Sequence[tuple[Sequence[nn.Parameter], Mapping[str, Any]]],
        settings: dict[str, Any],
        named: NamedTensors = tuple,
    ) -> Optimizer:
        """Return an optimizer of the requested class, whose state uses the names of the tensors it updates.

        `groups` are lists of parameters, each with settings of its own.
        """
        parameters = [param for listed, _ in groups for param in listed]
        if not isinstance(kind, type):
            raise RunError(
                f"pipe.optimizer got {kind!r:.60}",
                expected="an optimizer class, as in pipe.optimizer(torch.optim.AdamW)",
            )
        if issubclass(kind, torch.optim.LBFGS) and not self.holdings.crew.alone:
            raise RunError(
                f"{kind.__name__} weighs all parameters against each other, and each rank holds a part of them",
                expected="an optimizer that treats parameters one by one, such as AdamW",
            )
        if not by_element(kind):
            self.wholes.cover(parameters)
        if issubclass(kind, torch.optim.Muon) and any(param.device.type == "cpu" for param in parameters):
            settle_products()
        self.divided.divide([param for param in parameters if self.wholes.of(param) is None], kind)
        updated = [self.updated(param) for param in parameters]
        parts = [{**own_settings, "params": [*map(self.updated, listed)]} for listed, own_settings in groups]
        optimizer = kind(parts, **settings)
        copied = any(param is not other for param, other in zip(updated, parameters, strict=True))
        StateByName(named).attach(optimizer)
        self._optimizers.append(ref(optimizer))
        self._parameters[optimizer] = list(parameters)
        if self.streams:
            self._kept_optimizers.append(optimizer)
        if self.validation.is_on:
            optimizer.register_state_dict_pre_hook(lambda _: self._recording.settle())
            optimizer.register_load_state_dict_pre_hook(lambda *_: self._recording.settle())
        if self._holds_back or copied or not parameters:
            self._wrap(optimizer)
        return optimizer

    def _wrap(self, opt: Optimizer) -> None:
        """Give an optimizer its own `step` and `zero_grad`.

        No guard finds an optimizer without parameters here, and it must not step where others are held back.
        """
        self._own_optimizers.add(opt)
        # Use bound methods, because learning-rate schedulers wrap the function of what they find here.
        listed = self._parameters[opt]
        kept_optimizer = self.validation.keeping(opt) if self.validation.is_on else None
        setattr(opt, "step", MethodType(self._step(listed, kept_optimizer), opt))  # noqa: B010 - a method of this one instance
        setattr(opt, "zero_grad", MethodType(self._zero_grad(listed), opt))  # noqa: B010

    def strangers(self) -> list[Optimizer]:
        """Return optimizers that have stepped on parameters here and were not made here."""
        own_ids = set(map(id, self.optimizers()))
        return [optimizer for optimizer in guarded_by(self._guard) if id(optimizer) not in own_ids]

    def handed_over(self, parameters: Sequence[nn.Parameter]) -> list[ParameterState]:
        """Return what optimizers keep of parameters, for another rank."""
        self.masters.catch_up()
        groups = [
            {id(param): at for at, group in enumerate(optimizer.param_groups) for param in group["params"]}
            for optimizer in self.optimizers()
        ]
        states = []
        for param in parameters:
            updated = self.updated(param)
            kept_entries = [
                OptimizerEntry(at[id(updated)], dict(optimizer.state.get(updated, {}))) if id(updated) in at else None
                for optimizer, at in zip(self.optimizers(), groups, strict=True)
            ]
            whole, is_copied = self.wholes.of(param), updated is not self.piece(param)
            states.append(
                ParameterState(
                    updated.detach() if is_copied else None,
                    kept_entries,
                    None if whole is None else whole.detach(),
                    self.divided.handed_over(param),
                )
            )
        return states

    def drop(self, parameters: Sequence[nn.Parameter]) -> None:
        """Forget parameters that have left."""
        gone, updated = set(map(id, parameters)), [self.updated(param) for param in parameters]
        gone_too = set(map(id, updated))
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                group["params"][:] = [param for param in group["params"] if id(param) not in gone_too]
            self._parameters[optimizer][:] = [param for param in self._parameters[optimizer] if id(param) not in gone]
            for param in updated:
                optimizer.state.pop(param, None)
            if not self._parameters[optimizer] and optimizer not in self._own_optimizers:
                self._wrap(optimizer)
        self._left += map(ref, parameters)
        for parameter in parameters:
            self.masters.drop(self.piece(parameter))
            self.wholes.drop(parameter)
            self.divided.drop(parameter)

    def take_over(self, handed: Mapping[nn.Parameter, ParameterState], order: Sequence[nn.Parameter]) -> None:
        """Update parameters that have come, with what other ranks' optimizers kept of them; keep all in this order."""
        for parameter, state in handed.items():
            if state.whole is not None:
                self.wholes.adopt(parameter, state.whole)
            if state.division is not None:
                self.divided.take_over(parameter, state.division)
            if state.master is not None:
                self.masters.adopt(self.piece(parameter), state.master)
            updated = self.updated(parameter)
            for optimizer, entry in zip(self.optimizers(), state.entries, strict=True):
                if entry is not None:
                    optimizer.param_groups[entry.group]["params"].append(updated)
                    self._parameters[optimizer].append(parameter)
                    if entry.state:
                        optimizer.state[updated] = dict(entry.state)
                    if updated is not parameter and optimizer not in self._own_optimizers:
                        self._wrap(optimizer)
        here = set(map(id, order))
        self._left = [
            reference for reference in self._left if (param := reference()) is not None and id(param) not in here
        ]
        places = {id(self.updated(param)): at for at, param in enumerate(order)}
        for optimizer in self.optimizers():
            for group in optimizer.param_groups:
                group["params"].sort(key=lambda param: places.get(id(param), -1))

    def piece(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what an optimizer updates of a parameter, before precision: a whole copy, this line's part, or it."""
        whole = self.wholes.of(parameter)
        return self.divided.of(parameter) if whole is None else whole

    def updated(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that optimizers update for a parameter here."""
        piece = self.piece(parameter)
        return piece if self.wholes.of(parameter) is not None else self.masters.of(piece)

    def named(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that optimizers update, by name."""
        self.masters.catch_up()
        return ((name, self.updated(param)) for name, param in parameters)

    def _step(self, parameters: Sequence[nn.Parameter], kept_optimizer: Any) -> Callable[..., Any]:
        def step(optimizer: Optimizer, closure: Callable[[], float] | None = None) -> None:
            """Step, unless a gradient on any rank is not finite."""
            if closure is not None:
                raise RunError("optimizer.step got a closure", fix="call pipe.step first, then optimizer.step()")
            apply, follow = partial(self._apply, optimizer, parameters), partial(self._follow, parameters)
            if kept_optimizer is not None:
                self._check.refuse()
                self.validation.step(kept_optimizer, parameters, apply, follow)
                return
            if not self._is_stepped_inside(optimizer):
                self._recording.settle()
            if self.scaler.decide():
                apply()

        return step

    def _apply(self, optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> None:
        """Step, with the gradients that the parameters have now."""
        self.divided.take(parameters)
        self.masters.take([self.piece(param) for param in parameters])
        self.wholes.take(parameters)
        type(optimizer).step(optimizer)
        self._follow(parameters)

    def _follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Give parameters the values of what the optimizer updates in their place."""
        self.masters.give([self.piece(param) for param in parameters])
        self.wholes.give(parameters)
        self.divided.give(parameters)

    def _zero_grad(self, parameters: Sequence[nn.Parameter]) -> Callable[..., None]:
        def zero_grad(optimizer: Optimizer, set_to_none: bool = True) -> None:
            """Clear the gradients, also of parameters that only follow their copies; never in place."""
            held_gradients = (
                [] if set_to_none else [(param, param.grad) for param in parameters if param.grad is not None]
            )
            type(optimizer).zero_grad(optimizer)
            for param in parameters:
                param.grad = None
            for param, gradient in held_gradients:
                param.grad = torch.zeros_like(gradient)
            self.forget()

        return zero_grad
