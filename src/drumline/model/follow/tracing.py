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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode

from drumline.core.errors import ModelError
from drumline.model.catalogue import whole_name
from drumline.model.follow.between_blocks import replaced_sources
from drumline.model.follow.decisions import Answer
from drumline.model.follow.functions_between import DRAW_INSIDE, FunctionsBetween
from drumline.model.follow.inputs import InputKind, Inputs, unchecked
from drumline.model.follow.interception import coming_by, version_of
from drumline.model.follow.notes import TryAgain, Use
from drumline.model.follow.refusals import (
    LocalHooks,
    around,
    line_of,
    refuse_around,
    refuse_backward_hooks,
    refuse_changed,
    refuse_marked,
    refuse_others,
)
from drumline.model.follow.skeleton import Meta, Skeleton, alias_of
from drumline.model.follow.uneven import is_of_values
from drumline.model.graph.graph import CallGraph
from drumline.model.hooks import HOOKS
from drumline.model.kept_state.keeping import Beginning, surroundings_as_before
from drumline.model.randomness import HostChance
from drumline.model.values import mapped, pack, refuse_objects, tensors_in, unpack
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


class _Tracer(FunctionsBetween, TorchFunctionMode):
    def __init__(
        self,
        skeleton: Skeleton,
        beginning: Beginning,
        clear: Callable[[], None],
        inside: frozenset[str],
        inputs: Sequence[Tensor],
        decided: Sequence[Answer],
    ) -> None:
        FunctionsBetween.__init__(self, skeleton, beginning, clear, inside, inputs, decided)
        TorchFunctionMode.__init__(self)
        self.broken = ""  # the block that failed
        self.thread = threading.get_ident()
        self.names = skeleton.names
        self.function = ""  # the current autograd function, between blocks
        self.variables = self.surroundings.now()
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
        return self.between_blocks(func, args, named)

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
        self.follow_uneven(name, tensors, result)
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
                fix=DRAW_INSIDE.replace("layerdrop=0", "layerdrop=0, apply_spec_augment=False"),
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

    def finish(self, output: Any) -> None:
        """Record what the model returned, and refuse what cannot be repeated."""
        if self.undecided is not None:
            raise self.undecided
        self._look_around()
        self.attributes.judge(lambda call: self.graph.calls[call].block, self.bar)
        tensors, self.graph.output_form = pack(output)
        refuse_objects(self.graph.output_form, "the model's output")
        self.graph.outputs = tuple(self.number(tensor, "the model's output") for tensor in tensors)
        self.keep_uneven_together()
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


_PARTS = ("_parameters", "_buffers", "_modules", *HOOKS)  # the dicts of a module
