"""The notes of a trace: the values of a forward, the calls that create them, and where no cut is possible.

A tensor is a value of the graph: an input, the result of a call, part of the model's state, or one that existed before.
A tensor that a block created but did not return is not a value: using it elsewhere is refused, or prevents cuts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from drumline.core.errors import ModelError
from drumline.model.catalogue import whole_name
from drumline.model.follow.between_blocks import variable_with
from drumline.model.follow.skeleton import Skeleton
from drumline.model.graph.graph import Autocast, Barrier, Call, CallGraph, Value
from drumline.model.values import found_in, pack, refuse_objects


class TryAgain(ModelError):
    """A refusal of a trace that may go well another way; if none does, users see it `as_seen`."""

    def as_seen(self) -> ModelError:
        """Return it as an error of the public tree."""
        return ModelError(self.error, expected=self.expected, fix=self.fix).with_traceback(self.__traceback__)


class Changes(TryAgain):
    """The forward changes a tensor in an attribute in place; a stage can hold it as it holds a buffer."""

    def __init__(self, name: str) -> None:
        self.name = name
        super().__init__(
            f"the model's forward changes the tensor {name!r} in place between its blocks",
            expected="a forward that also changed it when the model was cut",
            fix="create a new pipeline, with a batch as example= for which the forward changes it",
        )


class Unseen(TryAgain):
    """A tensor that a block created but did not return is used outside it."""

    def __init__(self, error: str, *, expected: str = "", fix: str = "", block: str = "") -> None:
        self.block = block
        super().__init__(error, expected=expected, fix=fix)


class Use(NamedTuple):
    """The parameters and buffers that a block uses, and those that it changes in place."""

    call: int
    names: set[str]
    changed: set[str]


class Notes:
    """The graph of a forward while it is traced."""

    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.graph = CallGraph()
        self.numbers: dict[int, int] = {}  # numbers of values, by the tensor's id
        self.kept_objects: list[Any] = []  # kept alive, so that no id is reused
        self.storages: dict[int, int] = {}
        self.made_by: dict[int, int] = {}  # the call that created a value
        self.where: dict[int, int] = {}  # tensors created inside blocks: the call
        self.base = _autocast(skeleton.device.type)
        self.gradients = torch.is_grad_enabled()
        self.uses: list[Use] = []
        self.uneven: set[int] = set()  # ids of tensors whose shape depends on values

    def new(self, tensor: Tensor, **more: Any) -> int:
        """Return the number of a new value."""
        number = len(self.graph.values)
        storage = id(tensor.untyped_storage())
        self.kept_objects += [tensor, tensor.untyped_storage()]
        kind = f"{tensor.dtype}{tuple(tensor.shape)}".removeprefix("torch.")
        uneven = id(tensor) in self.uneven
        place = self.storages.setdefault(storage, number)
        self.graph.values.append(Value(tensor.nbytes, place, kind=kind, is_uneven=uneven, **more))
        self.numbers[id(tensor)] = number
        return number

    def number(self, tensor: Tensor, what: str) -> int:
        """Return the value of a tensor; a part of the model, or a tensor that existed before, becomes one."""
        if id(tensor) in self.numbers:
            return self.numbers[id(tensor)]
        if id(tensor) in self.skeleton.states:
            return self.new(tensor, state=self.skeleton.states[id(tensor)])
        if not isinstance(tensor, FakeTensor) and id(tensor) not in self.where:
            if tensor.requires_grad and tensor.is_leaf:
                raise ModelError(
                    f"{what} uses a tensor of shape {tuple(tensor.shape)} that requires grad but is not a parameter of "
                    f"the model{self.kept_in(tensor)}",
                    expected="every trained tensor to be a parameter",
                    fix="register it: self.scale = nn.Parameter(scale)",
                )
            return self.new(tensor, constant=self.skeleton.originals.get(id(tensor), tensor))
        if (call := self.where.get(id(tensor))) is not None:
            block = self.graph.calls[call].block
            self.bar(call, f"{what} uses a tensor that {block!r} created but did not return{self.kept_in(tensor)}")
            raise Unseen(
                self.graph.barriers[-1].reason,
                expected="blocks that return every tensor used elsewhere",
                fix=f"return it from {block!r}, or use it only inside that block",
                block=block,
            )
        raise ModelError(
            f"{what} takes a tensor that was created where Drumline cannot trace it",
            expected="tensors created by torch functions, but not inside torch.vmap or another torch.func transform",
            fix="move it into a block, or register it as a buffer",
        )

    def kept_in(self, tensor: Tensor) -> str:
        """Return where the model keeps a tensor, in words, if it does."""
        for name, module in self.skeleton.model.named_modules():
            for key, attribute in vars(module).items():
                if attribute is tensor:
                    return f" (the model keeps it as {whole_name(name, key)})"
        variable = variable_with(self.skeleton.model, tensor)
        return f" (the {variable} keeps it)" if variable else ""

    def bar(self, first: int, reason: str, last: int | None = None) -> None:
        """Forbid cuts after call `first` and up to call `last`, by default the next one."""
        self.graph.barriers.append(Barrier(first, len(self.graph.calls) if last is None else last, reason))

    def note(
        self,
        func: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        changed: Sequence[Tensor] = (),
        block: str = "",
        reads: Sequence[str] = (),
    ) -> None:
        """Record a call of a function or block, with what it took, created and changed."""
        what = f"{block!r}" if block else f"the model, in {getattr(func, '__name__', func)}"
        tensors, form = pack((args, kwargs))
        refuse_objects(form, what)
        takes = tuple(self.number(tensor, what) for tensor in tensors)
        for tensor in changed:
            self._alone(self.number(tensor, what), what)
        makes = tuple((path, self.new(tensor)) for path, tensor in found_in(result) if id(tensor) not in self.numbers)
        self.made_by.update((value, len(self.graph.calls)) for _, value in makes)
        self.graph.calls.append(
            Call(
                None if block else func,
                block,
                form,
                takes,
                makes,
                tuple(self.numbers[id(tensor)] for tensor in changed),
                None if (on := torch.is_grad_enabled()) is self.gradients else on,
                None if (now := _autocast(self.skeleton.device.type)) == self.base else now,
                tuple(reads),
            )
        )

    def _keep_changes_together(self) -> None:
        """Forbid cuts between the calls that change a part of the model's state in place and those that use it.

        Another stage would have a copy, or see what later microbatches have made of it.
        """
        values, places = self.graph.values, dict[int, set[str]]()  # names of states by their memory
        for value in values:
            if value.state:
                places.setdefault(value.storage, set()).add(value.state)
        uses, changes = dict[str, set[int]](), dict[str, int]()
        for at, call in enumerate(self.graph.calls):
            for number in call.takes:
                for name in places.get(values[number].storage, ()):
                    uses.setdefault(name, set()).add(at)
            for number in call.changes:
                changes.update((name, at) for name in places.get(values[number].storage, ()))
        for use in self.uses:
            for name in use.names - {""}:
                uses.setdefault(name, set()).add(use.call)
            changes.update((name, use.call) for name in use.changed - {""})
        self.graph.changed = frozenset(changes)
        for name, at in changes.items():
            first, last = min(uses[name]), max(uses[name])
            if first < last:
                call = self.graph.calls[at]
                who = f"{call.block!r}" if call.block else f"the model, in {getattr(call.function, '__name__', '')},"
                self.bar(first, f"{who} changes {name!r} in place, which is used there", last)

    def _alone(self, changed: int, what: str) -> None:
        """Forbid cuts between a value that is changed in place and others that share its memory."""
        values = self.graph.values
        shared = [number for number, value in enumerate(values) if value.storage == values[changed].storage]
        carried = [number for number in shared if self.graph.is_carried(number)]
        if len(shared) > 1 and carried:
            first = min(self.made_by.get(number, 0) for number in carried)
            self.bar(first, f"{what} changes in place a tensor that shares memory with other values")


def _autocast(device: str) -> Autocast:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
