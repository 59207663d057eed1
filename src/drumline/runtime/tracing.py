"""Following a model's forward: which blocks it calls, what it computes between them, and which tensors go where.

The forward runs once on a `Skeleton`, with two watchers. Calls of blocks are noted whole, whatever goes on inside. All
other calls into torch are noted one by one; Python's own flow of control is not, so a graph belongs to one kind of
input (structure, shapes, plain values), and another kind is followed anew.

Between blocks only what depends on the inputs or on parameters is a stand-in. The rest (positions counted up from
nothing) is real, so that the model may decide by it.

Inside a block the watcher only looks for what would break a cut: a tensor that another block made and that did not come
in through the block's arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from drumline.core.errors import ModelError
from drumline.runtime.contents import found_in, refuse_objects, tensors_in
from drumline.runtime.graph import Autocast, Barrier, Call, Graph, Value, may_draw
from drumline.runtime.own_line import line_here, line_of
from drumline.runtime.skeleton import Skeleton
from drumline.runtime.stand_ins import Known, StandIns
from drumline.runtime.values import pack, unpack

Shapes = tuple[tuple[torch.Size, torch.dtype], ...]


def trace(skeleton: Skeleton, inside: frozenset[str], form: Any, shapes: Shapes, *, train: bool, known: Known) -> Graph:
    """Follow the model's forward on inputs of this form and these shapes; `known` remembers what blocks return."""
    inputs = skeleton.fakes(shapes)
    args, kwargs = unpack(inputs, form)
    tracer = _Tracer(skeleton, inside, inputs, known)
    with tracer.watching(train=train):
        try:
            made = skeleton.model(*args, **kwargs)
        except ModelError:
            raise
        except Exception as error:
            raise tracer.failed(error) from error
        tracer.finish(made)
    return tracer.graph


class _Tracer(TorchFunctionMode):
    def __init__(self, skeleton: Skeleton, inside: frozenset[str], inputs: Sequence[Tensor], known: Known) -> None:
        super().__init__()
        self.skeleton = skeleton
        self.inside = inside
        self.stand_ins = StandIns(skeleton, known)
        self.graph = Graph()
        self.numbers: dict[int, int] = {}  # of values, by their tensor's id
        self.kept: list[Any] = []  # what must live on, so that no id is taken twice
        self.storages: dict[int, int] = {}
        self.within: list[str] = []  # the block that runs now
        self.where: dict[int, int] = {}  # tensors made inside of blocks: the call
        self.taken: set[int] = set()  # tensors that came in through the running block's arguments
        self.reads: set[str] = set()
        self.drawn: dict[int, bool] = {}  # random tensors made between blocks: whether evenly from 0 to 1
        self.broken = ""  # the block that failed
        self.thread = threading.get_ident()
        self.base = _autocast(skeleton.device.type)
        for tensor in inputs:
            self.graph.inputs.append(self._new(tensor))

    # ---- values ------------------------------------------------------------------------------------------------------

    def _new(self, tensor: Tensor, **more: Any) -> int:
        number = len(self.graph.values)
        storage = id(tensor.untyped_storage())
        self.kept += [tensor, tensor.untyped_storage()]
        kind = f"{tensor.dtype}{tuple(tensor.shape)}".removeprefix("torch.")
        self.graph.values.append(Value(tensor.nbytes, self.storages.setdefault(storage, number), kind=kind, **more))
        self.numbers[id(tensor)] = number
        return number

    def _number(self, tensor: Tensor, what: str) -> int:
        """Return a tensor's value; one that is part of the model or was there before becomes one."""
        if id(tensor) in self.numbers:
            return self.numbers[id(tensor)]
        if id(tensor) in self.skeleton.states:
            return self._new(tensor, state=self.skeleton.states[id(tensor)])
        if not isinstance(tensor, FakeTensor):
            return self._new(tensor, constant=tensor)
        if (made := self.where.get(id(tensor))) is not None:
            block = self.graph.calls[made].block
            self._bar(made, f"{what} uses a tensor that {block!r} made and did not return{self._kept_in(tensor)}")
            raise ModelError(
                self.graph.barriers[-1].reason,
                expected="blocks that return what others use",
                fix=f"return it from {block!r}, or use it inside",
            )
        raise ModelError(
            f"{what} takes a tensor that was made where it could not be followed",
            expected="tensors made by torch functions",
            fix="make it inside of a block, or register it as a buffer",
        )

    def _kept_in(self, tensor: Tensor) -> str:
        for name, module in self.skeleton.model.named_modules():
            for key, one in vars(module).items():
                if one is tensor:
                    return f" (it is kept as {name}.{key})" if name else f" (it is kept as {key})"
        return ""

    def _bar(self, first: int, reason: str) -> None:
        self.graph.barriers.append(Barrier(first, len(self.graph.calls), reason))

    # ---- calls of functions ------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if threading.get_ident() != self.thread:
            return func(*args, **named)
        if self.within:
            return self._inside(func, args, named)
        return self._noted(func, args, named)

    def _inside(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a function inside of a block, looking for tensors that did not come in through its arguments."""
        for one in tensors_in((args, kwargs)):
            self._look(one)
        made = func(*args, **kwargs)
        for one in tensors_in(made):
            self.where.setdefault(id(one), len(self.graph.calls))
            self.kept.append(one)
        return made

    def _look(self, one: Tensor) -> None:
        at, block = len(self.graph.calls), self.within[-1]
        if id(one) in self.taken or self.where.get(id(one)) == at:
            return
        if name := self.skeleton.states.get(id(one)):
            self.reads.add(name)
        elif (number := self.numbers.get(id(one))) is not None:
            if self.graph.is_carried(number):
                first = max(self.graph.made_at.get(number, -1), 0)
                del self.graph.made_at
                self._bar(first, f"{block!r} uses a tensor that is not among its arguments{self._kept_in(one)}")
                self.taken.add(id(one))
        elif (made := self.where.get(id(one))) is not None:
            other = self.graph.calls[made].block
            reason = f"{block!r} reads a tensor that {other!r} made and did not return{self._kept_in(one)}"
            self._bar(made, reason)
            self.taken.add(id(one))

    def _noted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is Tensor.register_hook:
            raise ModelError(
                f"the model's forward puts a hook on a tensor between its blocks{line_here()}",
                expected="hooks on parameters or modules, or inside of a block",
                fix="move it into a block",
            )
        given = tensors_in((args, kwargs))
        if self.drawn and _name(func) in _READS and any(id(one) in self.drawn for one in given):
            raise ModelError(
                f"the model's forward decides by a random number between its blocks{line_here()}",
                expected="decisions that are the same in every step, between blocks",
                fix="draw it inside of a block, or switch it off (layerdrop=0)",
            )
        versions = [one._version for one in given]
        made = func(*args, **kwargs)
        changed = [one for one, before in zip(given, versions, strict=True) if one._version != before]
        if changed or any(id(one) not in self.numbers for one in tensors_in(made)):
            self._note(func, args, kwargs, made, changed)
        self._follow_chance(func, args, made)
        return made

    def _follow_chance(self, func: Callable[..., Any], args: tuple[Any, ...], made: Any) -> None:
        """Remember random tensors that Python could decide by, and what is made of them."""
        given = [one for one in tensors_in(args) if id(one) in self.drawn]
        if _name(func).strip("_") in _COMPARES and given and self.drawn[id(given[0])] and len(args) == 2:
            bound = args[1] if args[0] is given[0] else args[0]
            if isinstance(bound, int | float) and not 0 < bound < 1:
                return  # it comes out alike, whatever is drawn
        if given or may_draw(func):
            evenly = func is torch.rand
            self.drawn.update((id(one), evenly) for one in tensors_in(made) if not isinstance(one, FakeTensor))

    def _note(
        self,
        func: Callable[..., Any] | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        made: Any,
        changed: Sequence[Tensor] = (),
        block: str = "",
        reads: Sequence[str] = (),
    ) -> None:
        what = f"{block!r}" if block else f"the model, in {getattr(func, '__name__', func)}"
        tensors, form = pack((args, kwargs))
        refuse_objects(form, what)
        takes = tuple(self._number(one, what) for one in tensors)
        for one in changed:
            self._alone(self._number(one, what), what)
        paths = [(path, one) for path, one in found_in(made) if id(one) not in self.numbers]
        self.graph.calls.append(
            Call(
                None if block else func,
                block,
                form,
                takes,
                tuple((path, self._new(one)) for path, one in paths),
                tuple(self.numbers[id(one)] for one in changed),
                torch.is_grad_enabled(),
                None if (now := _autocast(self.skeleton.device.type)) == self.base else now,
                tuple(reads),
            )
        )

    def _alone(self, changed: int, what: str) -> None:
        """Forbid cuts between a value that is changed in place and the others that share its memory."""
        values = self.graph.values
        at = {value: call for call, one in enumerate(self.graph.calls) for _, value in one.makes}
        shared = [one for one, value in enumerate(values) if value.storage == values[changed].storage]
        if len(shared) > 1:
            first = min(at.get(one, 0) for one in shared)
            self._bar(first, f"{what} changes a tensor in place of which other values are views")

    # ---- calls of blocks ---------------------------------------------------------------------------------------------

    def block(self, module: nn.Module, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a block and note it as one call."""
        given = tensors_in((args, kwargs))
        with torch._C.DisableTorchFunction():
            versions = [one._version for one in given]
        self.taken = {id(one) for one in given}
        own = {self.skeleton.states.get(id(one), "") for one in (*module.parameters(), *module.buffers())}
        self.reads = set()
        self.within.append(name)
        try:
            made = self.stand_ins.run(module, name, call, args, kwargs)
        except Exception:
            self.broken = name
            raise
        finally:
            self.within.pop()
        with torch._C.DisableTorchFunction():
            changed = [one for one, before in zip(given, versions, strict=True) if one._version != before]
            self._note(None, args, kwargs, made, changed, block=name, reads=sorted(self.reads - own))
        return made

    # ---- around it all -----------------------------------------------------------------------------------------------

    @contextmanager
    def watching(self, *, train: bool) -> Iterator[None]:
        """Watch all that goes on, in the mode wanted."""
        modes = [(module, module.training) for module in self.skeleton.model.modules()]
        buffers = [(module, dict(module._buffers)) for module in self.skeleton.model.modules() if module._buffers]
        if not train:
            for module, _ in modes:
                module.training = False
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                stack.enter_context(_calls_go_to(self))
                stack.enter_context(self)
                yield
            self._refuse_exchanged(buffers)
        finally:
            for module, mode in modes:
                module.training = mode
            for module, before in buffers:
                module._buffers.update(before)

    def _refuse_exchanged(self, buffers: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
        """Refuse a forward that puts another tensor in a buffer's place between blocks: only the copy would see it."""
        for module, before in buffers:
            name = self.skeleton.names[id(module)]
            for key, buffer in module._buffers.items():
                if name in self.inside and buffer is not before.get(key):
                    whole = f"{name}.{key}" if name else key
                    raise ModelError(
                        f"the model's forward puts another tensor in the place of the buffer {whole!r}",
                        expected="buffers that are changed in place, between blocks",
                        fix=f"write self.{key}.copy_(...), or do it inside of a block",
                    )

    def finish(self, made: Any) -> None:
        """Note what the model returned."""
        tensors, self.graph.output_form = pack(made)
        refuse_objects(self.graph.output_form, "the model's output")
        self.graph.outputs = tuple(self._number(one, "the model's output") for one in tensors)

    def failed(self, error: Exception) -> ModelError:
        """Return the error to raise for one that came up while following."""
        block = self.within[-1] if self.within else self.broken
        where = f" in {block!r}" if block else " between its blocks"
        kind = type(error).__name__
        if "DataDependent" in kind or "DynamicOutputShape" in kind:
            return ModelError(
                f"the model's forward decides by the numbers in a tensor{where}{line_of(error)}",
                expected="decisions by shapes and plain values only, between blocks",
                fix="move it into a block",
            )
        told = f"while it was followed: {kind}: {error}{line_of(error)}"
        return ModelError(f"the model's forward failed{where} {told}")


_READS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "__array__")
_COMPARES = ("lt", "le", "gt", "ge")


@contextmanager
def _calls_go_to(tracer: _Tracer) -> Iterator[None]:
    """Let calls of modules and of custom autograd functions pass by the tracer."""
    module_call, function_apply = nn.Module.__call__, torch.autograd.Function.__dict__["apply"]
    names, inside = tracer.skeleton.names, tracer.inside

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None or name in inside or tracer.within or threading.get_ident() != tracer.thread:
            return module_call(self, *args, **kwargs)
        return tracer.block(self, name, lambda *a, **k: module_call(self, *a, **k), args, kwargs)

    def applied(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        apply = function_apply.__get__(None, cls)
        if tracer.within or threading.get_ident() != tracer.thread:
            return apply(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            made = apply(*args, **kwargs)
            tracer._note(cls.apply, args, kwargs, made)
        return made

    nn.Module.__call__ = called  # type: ignore[method-assign]
    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment]
    try:
        yield
    finally:
        nn.Module.__call__ = module_call  # type: ignore[method-assign]
        torch.autograd.Function.apply = function_apply  # type: ignore[method-assign]


def _name(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    return name


def _autocast(device: str) -> Autocast:
    return device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
