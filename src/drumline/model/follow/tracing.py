"""Trace a model's forward: which blocks it calls, what it computes between them, and which tensors go where.

The forward runs once on a `Skeleton`, with two watchers. Calls of blocks are recorded whole, whatever happens inside.
All other calls into torch are recorded one by one. Python's control flow is not, so a graph belongs to one kind of
input (structure, shapes, plain values), and another kind is traced again.

Between blocks, only what depends on the inputs or on parameters is a stand-in. The rest (positions counted from
nothing) is real, so that the model may branch on it.

Inside a block, the watcher only looks for what would break a cut: a tensor that another block created and that is not
among the block's arguments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from drumline.core.errors import ModelError
from drumline.model.catalogue import whole_name
from drumline.model.follow.between_blocks import Kept, changed_by_name, replaced_sources
from drumline.model.follow.decisions import Answer, DataDependentRead, Undecided, asked
from drumline.model.follow.inputs import InputKind, Inputs, unchecked
from drumline.model.follow.inside_blocks import InsideBlocks
from drumline.model.follow.interception import coming_by, node_like, version_of
from drumline.model.follow.notes import Changes, TryAgain, Use
from drumline.model.follow.refusals import (
    LocalHooks,
    around,
    line_here,
    line_of,
    name_of,
    property_of,
    refuse_around,
    refuse_backward_hooks,
    refuse_changed,
    refuse_function,
    refuse_marked,
    refuse_others,
    refuse_own_generator,
)
from drumline.model.follow.skeleton import Meta, Skeleton, alias_of
from drumline.model.follow.uneven import PACKS, counts_rows, is_of_values, picked
from drumline.model.graph.graph import CallGraph, may_draw
from drumline.model.hooks import HOOKS
from drumline.model.kept_state.keeping import Beginning, surroundings_as_before
from drumline.model.randomness import HostChance
from drumline.model.transforms import transformed
from drumline.model.values import MISSING, mapped, pack, plain_in, refuse_objects, tensors_in, unpack
from drumline.model.watch.surroundings import Surroundings
from drumline.model.watch.watch import AttributeName


def trace(skeleton: Skeleton, inside: frozenset[str], kind: InputKind) -> tuple[CallGraph, list[AttributeName]]:
    """Trace the model's forward on inputs of this kind; return its graph, and the attributes that it depends on.

    It is traced as it will run: with gradients if it trains, and under autocast to a dtype if one is given.
    """
    refuse_backward_hooks(skeleton.model, inside)
    device = skeleton.device.type
    chance = HostChance()
    autocast = torch.autocast(device, dtype=kind.autocast, enabled=kind.autocast is not None)
    with torch.set_grad_enabled(kind.train), autocast:
        inputs = skeleton.fakes(kind.metas)
        args, kwargs = Inputs(*unpack(inputs, kind.form)).unpacked(skeleton.device)
        everywhere = Surroundings(skeleton.model.modules())
        sources = replaced_sources(everywhere, lambda: skeleton.block)
        surroundings = surroundings_as_before(skeleton.model.modules())
        contents = everywhere.keeping_contents()
        with chance.keeping_state(), contents as clear, surroundings as beginning, unchecked(), sources:
            tracer = _Tracer(skeleton, beginning, clear, inside, inputs, kind.decided)
            with tracer.watching(train=kind.train):
                try:
                    result = skeleton.model(*args, **kwargs)
                except ModelError:
                    raise
                except Exception as error:
                    raise tracer.failed(error) from error
                tracer.finish(result)
    return tracer.graph, tracer.attributes.read_between()


class Decides(TryAgain):
    """The forward branches on values; `inputs` are the positions of the inputs that they depend on."""

    def __init__(self, error: str, *, expected: str = "", fix: str = "", inputs: Sequence[int] = ()) -> None:
        self.inputs = inputs
        super().__init__(error, expected=expected, fix=fix)


def set_data(tensor: Tensor, value: Tensor) -> None:
    """Give a tensor other memory, as code between blocks does."""
    tensor.data = value


class _Tracer(InsideBlocks, TorchFunctionMode):
    def __init__(
        self,
        skeleton: Skeleton,
        beginning: Beginning,
        clear: Callable[[], None],
        inside: frozenset[str],
        inputs: Sequence[Tensor],
        decided: Sequence[Answer],
    ) -> None:
        InsideBlocks.__init__(self, skeleton, beginning, clear)
        TorchFunctionMode.__init__(self)
        self.inside = inside
        self.drawn: dict[int, bool] = {}  # random tensors created between blocks: whether uniform from 0 to 1
        self.broken = ""  # the block that failed
        self.read: tuple[Tensor, ...] = ()  # tensors whose values were read last, between blocks
        self.inputs = inputs
        self.decided = decided  # what the forward reads of integer inputs, in order
        self.num_decided = 0
        self.undecided: Undecided | None = None  # raised, whatever the forward makes of it
        self.thread = threading.get_ident()
        self.names = skeleton.names
        self.function = ""  # the current autograd function, between blocks
        self.nodes: dict[int, Any] = {}  # replacements for nodes of autograd's graph, one each
        self.surroundings = Surroundings(module for name, module in skeleton.model.named_modules() if name in inside)
        self.variables = self.surroundings.now()
        places = {name: tensor for name, tensor in skeleton.places.items() if name.rpartition(".")[0] in inside}
        self.kept_state = Kept(skeleton.model, self.surroundings, places)
        self.chance = HostChance()  # Python's random state when the last block ended
        self.marks = frozenset(vars(skeleton.fakes([Meta(torch.Size((1,)), torch.float32)])[0]))
        for tensor in inputs:
            self.graph.inputs.append(self.new(tensor))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if threading.get_ident() != self.thread:
            return func(*args, **named)
        if self.within:
            return self.inside_block(func, args, named)
        return self._noted(func, args, named)

    def _noted(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if transformed():
            return func(*args, **kwargs)
        if property_of(func, "__set__") == "data" and self._is_frozen_state(*args):
            func = set_data
        refuse_function(func)
        refuse_own_generator((*args, *kwargs.values()))
        tensors = tensors_in((args, kwargs))
        if self.drawn and name_of(func) in _READS and any(id(tensor) in self.drawn for tensor in tensors):
            raise ModelError(
                f"the model's forward branches on a random number between its blocks{line_here()}",
                expected="the same branches in every step, between blocks",
                fix=_DRAW_INSIDE,
            )
        for tensor in tensors:
            if id(tensor) in self.where and not isinstance(tensor, FakeTensor):
                self.number(tensor, f"the model, in {name_of(func)}")  # raises unless the block returned it
        if name_of(func) in _READS:
            self.read = tuple(tensors)
            if tensors and isinstance(tensors[0], FakeTensor):
                answer = self._answer(name_of(func), tensors[0])
                if answer is not MISSING:
                    return answer
        by_name = [args[0]] if func is set_data else changed_by_name(name_of(func), args, kwargs)
        self._find_place(tensors[:1] if property_of(func) == "data" else by_name)
        versions = [version_of(tensor) for tensor in tensors]
        result = args[0].copy_(args[1]) if func is set_data else self._result(func, args, kwargs, tensors)
        if property_of(func) == "grad_fn":
            return None if result is None else self.nodes.setdefault(id(result), node_like(result))
        changed = [tensor for tensor, before in zip(tensors, versions, strict=True) if version_of(tensor) != before]
        changed += [tensor for tensor in by_name if not any(tensor is other for other in changed)]
        if func is Tensor.requires_grad_ or property_of(func, "__set__") == "requires_grad":
            func, changed = Tensor.requires_grad_, [tensors[0]]
        if changed or any(id(tensor) not in self.numbers for tensor in tensors_in(result)):
            self.note(func, args, kwargs, result, changed)
        self._follow_chance(func, args, result)
        return result

    def _is_frozen_state(self, tensor: Tensor, value: Tensor) -> bool:
        """Whether a tensor is a frozen parameter or a buffer, and another one fits its memory."""
        is_state = id(tensor) in self.skeleton.states and not tensor.requires_grad
        return is_state and (tensor.shape, tensor.dtype) == (value.shape, value.dtype)

    def _find_place(self, changed: Iterable[Tensor]) -> None:
        """Have tensors that the model keeps, and that its forward will change, held by a stage; refuse others."""
        for tensor in changed:
            if place := self.kept_state.place_of(tensor):
                raise Changes(place)
            self.kept_state.refuse(tensor)

    def _answer(self, name: str, tensor: Tensor) -> Any:
        """Return what the forward reads of its integer inputs; MISSING if it depends on anything else."""
        number = self.numbers.get(id(tensor))
        ask = None if number is None else asked(name, self.graph, number, self.inputs, self.num_decided)
        if ask is None:
            if name in ("numpy", "__array__"):
                raise DataDependentRead(f"{name}() of a tensor that has no values here")
            return MISSING
        if self.num_decided == len(self.decided):
            error = f"the model's forward reads its inputs' values between its blocks{line_here()}"
            self.undecided = Undecided(error, ask)
            raise self.undecided
        self.num_decided += 1
        return self.decided[self.num_decided - 1]

    def _result(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: Sequence[Tensor]) -> Any:
        """Return what a function returns between blocks, and remember what is as long as values make it."""
        is_uneven = any(id(tensor) in self.uneven for tensor in tensors)
        try:
            if name_of(func) in PACKS and any(isinstance(tensor, FakeTensor) for tensor in tensors):
                raise DataDependentRead("lengths of sequences")  # torch would mix stand-ins with others
            result = func(*args, **kwargs)
        except Exception as error:
            if not is_of_values(error):
                raise
            self.read = tuple(tensor for tensor in tensors if not tensor.is_floating_point()) or tuple(tensors)
            result, is_assumed = picked(func, name_of(func), args, kwargs)
            if result is MISSING:
                raise
            is_uneven |= is_assumed
        if is_uneven:
            name = property_of(func) or name_of(func)
            if counts_rows(name, result):
                self.read = tuple(tensors)
                raise DataDependentRead(f"{name} of rows that a mask picks")
            for tensor in tensors_in(result):
                if tensor.dim() and id(tensor) not in self.numbers:
                    self.uneven.add(id(tensor))
                    self.kept_objects.append(tensor)
        return result

    def _follow_chance(self, func: Callable[..., Any], args: tuple[Any, ...], result: Any) -> None:
        """Remember random tensors on which Python could branch, and what is computed from them."""
        tensors = [tensor for tensor in tensors_in(args) if id(tensor) in self.drawn]
        if name_of(func).strip("_") in _COMPARES and tensors and self.drawn[id(tensors[0])] and len(args) == 2:
            bound = args[1] if args[0] is tensors[0] else args[0]
            if isinstance(bound, int | float) and not 0 < bound < 1:
                return  # the result is the same whatever is drawn
        if tensors or may_draw(func):
            evenly = func is torch.rand
            self.drawn.update(
                (id(tensor), evenly) for tensor in tensors_in(result) if not isinstance(tensor, FakeTensor)
            )

    def block(self, module: nn.Module, name: str, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a block and record it as one call."""
        self._begin(module, name)
        before = pack((args, kwargs))
        tensors = tensors_in((args, kwargs))
        refuse_marked(self._unmarked(tensors), self.marks, f"the model's forward gives {name!r}")
        with torch._C.DisableTorchFunction():
            versions = [version_of(tensor) for tensor in tensors]
        own_states = {self.skeleton.states.get(id(p), ""): p for p in (*module.parameters(), *module.buffers())}
        before_block = {name: version_of(p) for name, p in own_states.items()}
        self.begin_inside(name, tensors)
        try:
            result = self.skeleton.run(module, call, args, kwargs)
            self.attributes.look()
            self.end_inside(module, call, args, kwargs)
        except Exception:
            self.broken = name
            raise
        finally:
            self.within.pop()
        if self.chance.has_moved():  # it may return what it got, or not
            with torch._C.DisableTorchFunction():
                result = mapped(result, lambda tensor: alias_of(tensor) if id(tensor) in self.taken else tensor)
        self.chance = HostChance()
        self.kept_state.renew()
        with torch._C.DisableTorchFunction():
            changed_names = {state for state, p in own_states.items() if version_of(p) != before_block[state]}
            changed_names |= self.changed_inside
        self.uses.append(Use(len(self.graph.calls), own_states.keys() | self.reads, changed_names))
        self._follow_uneven(name, tensors, result)
        refuse_changed(name, before, pack((args, kwargs)))
        refuse_marked(self._unmarked(tensors_in(result)), self.marks, f"{name!r} returns")
        with torch._C.DisableTorchFunction():
            changed = [tensor for tensor, before in zip(tensors, versions, strict=True) if version_of(tensor) != before]
            self.note(None, args, kwargs, result, changed, block=name, reads=sorted(self.reads - own_states.keys()))
        return result

    def _begin(self, module: nn.Module, name: str) -> None:
        """Refuse to run a block in different surroundings than its own."""
        self._look_around()
        refuse_around(name, self.around)
        self.hooks.look_after(module, name)
        refuse_others(module, name, self.skeleton.states)

    def _look_around(self) -> None:
        """Refuse changes since the last block that cannot be repeated."""
        if self.chance.has_moved():
            raise ModelError(
                "the model's forward draws random numbers from Python or NumPy between its blocks",
                expected="a forward that does the same between its blocks in every step",
                fix=_DRAW_INSIDE.replace("layerdrop=0", "layerdrop=0, apply_spec_augment=False"),
            )
        self.kept_state.refuse_drawn()
        with torch._C.DisableTorchFunction():
            name = self.surroundings.changed(self.variables)
        if name:
            raise ModelError(
                f"the model's forward, or one of its blocks, changes {name}, which the forward reads between blocks",
                expected="variables outside the model that stay unchanged while the forward runs",
                fix="collect what blocks return in a local variable of the forward; count outside the forward",
            )
        self.attributes.look()

    def _unmarked(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the stand-ins for values: parameters may have custom attributes."""
        return [value for value in tensors if isinstance(value, FakeTensor) and id(value) not in self.skeleton.states]

    def applied(self, cls: Any, apply: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a custom autograd function and record it as one call."""
        tensors = tensors_in((args, kwargs))
        self.function = cls.__name__
        try:
            with torch._C.DisableTorchFunction():
                versions = [version_of(tensor) for tensor in tensors]
                result = apply(*args, **kwargs)
                changed = [
                    value for value, before in zip(tensors, versions, strict=True) if version_of(value) != before
                ]
                self.note(cls.apply, args, kwargs, result, changed)
        finally:
            self.function = ""
        return result

    @contextmanager
    def watching(self, *, train: bool) -> Iterator[None]:
        """Watch everything that happens, in the requested mode."""
        model = self.skeleton.model
        before = [(module, dict(vars(module))) for module in model.modules()]
        parts = [
            (attributes[kind], dict(attributes[kind]))
            for _, attributes in before
            for kind in _PARTS
            if kind in attributes
        ]
        buffers = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
        self.hooks = LocalHooks(model)
        if not train:
            for module, _ in before:
                module.training = False
        try:
            with coming_by(self), self:
                self.around = around()
                yield
            self._refuse_exchanged(buffers)
        finally:
            for module, attributes in before:
                vars(module).clear()
                vars(module).update(attributes)
            for part, content in parts:
                part.clear()
                part.update(content)

    def _refuse_exchanged(self, buffers: Sequence[tuple[nn.Module, Mapping[str, Any]]]) -> None:
        """Refuse a forward that replaces a buffer between blocks: only the copy would see the new tensor."""
        for module, before in buffers:
            name = self.skeleton.names[id(module)]
            for key, buffer in module._buffers.items():
                if name in self.inside and buffer is not before.get(key):
                    raise ModelError(
                        f"the model's forward replaces the buffer {whole_name(name, key)!r} by another tensor",
                        expected="in-place changes of buffers between blocks",
                        fix=f"write self.{key}.copy_(...), or do it inside a block",
                    )

    def _follow_uneven(self, name: str, tensors: Sequence[Tensor], result: Any) -> None:
        """Remember what a block makes of rows that a mask picked."""
        if not any(id(tensor) in self.uneven for tensor in tensors):
            return
        outputs, form = pack(result)
        if any(isinstance(value, int | float) and not isinstance(value, bool) for value in plain_in(form)):
            raise ModelError(
                f"{name!r} gets rows that a mask picks, and returns a number",
                expected="blocks that return tensors: a number may depend on how many rows there are",
                fix="return a tensor, or put what picks the rows into the block",
            )
        self.uneven.update(id(tensor) for tensor in outputs if tensor.dim())
        self.kept_objects += outputs

    def _keep_uneven_together(self) -> None:
        """Forbid cuts between rows that a mask picks and their uses: no other stage knows how many they are."""
        uneven = [number for number, value in enumerate(self.graph.values) if value.is_uneven]
        for number in uneven:
            uses = [at for at, call in enumerate(self.graph.calls) if number in call.takes]
            if uses:
                self.bar(self.made_by.get(number, 0), "rows that a mask picks are used there", uses[-1])
        if any(number in self.graph.outputs for number in uneven):
            raise ModelError(
                "the model returns rows that a mask picks",
                expected="outputs whose shapes depend on the shapes of inputs",
                fix="return the mask and all rows, or pick the rows in the loss_fn",
            )

    def finish(self, output: Any) -> None:
        """Record what the model returned, and refuse what cannot be repeated."""
        if self.undecided is not None:
            raise self.undecided
        self._look_around()
        self.attributes.judge(lambda call: self.graph.calls[call].block, self.bar)
        tensors, self.graph.output_form = pack(output)
        refuse_objects(self.graph.output_form, "the model's output")
        self.graph.outputs = tuple(self.number(tensor, "the model's output") for tensor in tensors)
        self._keep_uneven_together()
        self._keep_changes_together()

    def failed(self, error: Exception) -> ModelError:
        """Return the error to raise for one that occurred while tracing."""
        block = self.within[-1] if self.within else self.broken
        where = f" in {block!r}" if block else " between its blocks"
        kind = type(error).__name__
        if is_of_values(error):
            read = [self.numbers[id(tensor)] for tensor in self.read if id(tensor) in self.numbers and not block]
            return Decides(
                f"the model's forward branches on the values of a tensor{where}{line_of(error)}",
                expected="branches on shapes and plain values only, between blocks",
                fix="move it into a block",
                inputs=sorted(self.graph.inputs.index(origin) for origin in self.graph.origins(read)[0]),
            )
        reason = f"while Drumline traced it: {kind}: {error}{line_of(error)}"
        return ModelError(
            f"the model's forward failed{where} {reason}",
            expected="a forward that runs on a copy of the model, as on the model itself",
            fix="if it runs by itself, pass an nn.Sequential or a list of blocks, which Drumline does not copy",
        )


_DRAW_INSIDE = (
    'draw it inside a block: wrap each layer in a module that skips it (see "Layers that are skipped at random" in'
    " docs/models-rules.md), or switch it off (layerdrop=0)"
)
_READS = ("__bool__", "__float__", "__int__", "__index__", "item", "tolist", "numpy", "__array__")
_COMPARES = ("lt", "le", "gt", "ge")
_PARTS = ("_parameters", "_buffers", "_modules", *HOOKS)  # the dicts of a module
