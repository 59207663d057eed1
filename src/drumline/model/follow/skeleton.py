"""A copy of a model without its memory: all of its code and structure, none of its values.

Parameters and buffers are stand-ins that know their shape, dtype and device. Running the copy needs almost no memory
and changes nothing in the model itself. So every rank can trace the whole model's forward while it holds only its own
part.

`copy.deepcopy` does not copy functions. A hook that appends to `model.features` through a captured variable would
append to the model's list, while the copy reads its own. So functions are copied too if they captured something that
is an attribute of the model; their other captured variables stay the same.

Running a block on stand-ins, or if necessary on zeros, shows what it returns. Its hooks always run, on stand-ins, as
they will in real runs. Results of blocks that ran on zeros are remembered for similar blocks: only the forward of these
is skipped.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from types import CellType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from drumline.core.errors import ModelError
from drumline.model.catalogue import named_tensors
from drumline.model.follow.between_blocks import Source, attribute, named_values, places_of
from drumline.model.hooks import BACKWARD, FORWARD
from drumline.model.patches import Patch, Replacement, put_in
from drumline.model.quantised.packed import copied_states, settle, unpacked_shape
from drumline.model.quantised.sketch import sketch
from drumline.model.values import MISSING, content_of, pack, unpack
from drumline.model.watch.fingerprint import can_change
from drumline.model.watch.used_up import can_be_used_up

M = TypeVar("M", bound=nn.Module)
_dispatch: dict[Any, Any] = copy._deepcopy_dispatch  # type: ignore[attr-defined]


def copied(model: M, memo: dict[int, Any]) -> M:
    """Return a deep copy of a model, including functions that refer to parts of it.

    >>> class Keeps(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.kept = result = []
    ...         self.keep = lambda x: result.append(x)
    >>> copy = copied(Keeps(), {})
    >>> copy.keep(1)
    >>> copy.kept
    [1]
    """
    held_values = (value for module in model.modules() for value in (module, *vars(module).values()))
    own_ids = {id(value) for value in held_values if isinstance(value, nn.Module | Tensor) or can_change(value)}
    own_ids |= memo.keys()
    with _FUNCTIONS.by(own_ids), _METHODS.by(own_ids):
        return copy.deepcopy(model, memo)


def _of_function(replaced: Replacement) -> Any:
    def copy_function(fn: FunctionType, memo: dict[int, Any]) -> Any:
        own_watcher, cells = replaced.watcher or (), fn.__closure__ or ()
        if not any(id(content_of(cell)) in own_watcher for cell in cells):
            return replaced.original(fn, memo)
        function = FunctionType(
            fn.__code__, fn.__globals__, fn.__name__, fn.__defaults__, tuple(CellType() for _ in cells)
        )
        function.__kwdefaults__, function.__module__, function.__qualname__ = (
            fn.__kwdefaults__,
            fn.__module__,
            fn.__qualname__,
        )
        function.__dict__.update(fn.__dict__)
        memo[id(fn)] = function
        for cell, before in zip(function.__closure__ or (), cells, strict=True):
            content = content_of(before)
            if content is not MISSING:
                cell.cell_contents = copy.deepcopy(content, memo) if id(content) in own_watcher else content
        return function

    return copy_function


def _of_method(replaced: Replacement) -> Any:
    def copy_method(method: MethodType, memo: dict[int, Any]) -> Any:
        own_watcher = replaced.watcher
        if own_watcher is None:
            return replaced.original(method, memo)
        if id(method.__self__) not in own_watcher:
            return method
        return MethodType(method.__func__, copy.deepcopy(method.__self__, memo))

    return copy_method


_FUNCTIONS, _METHODS = Patch(_dispatch, FunctionType, _of_function), Patch(_dispatch, MethodType, _of_method)


class Meta(NamedTuple):
    """What is known about a tensor without its values; without strides it is contiguous."""

    shape: torch.Size
    dtype: torch.dtype
    strides: tuple[int, ...] | None = None
    wants_gradient: bool = False

    @classmethod
    def of(cls, tensor: Tensor) -> Meta:
        """Return the description of a tensor.

        >>> Meta.of(torch.ones(2, 3).t()).strides
        (1, 3)
        """
        strides = None if tensor.is_contiguous() else tensor.stride()
        return cls(tensor.shape, tensor.dtype, strides, tensor.requires_grad)


class Skeleton:
    """The copy, and what its stand-ins represent."""

    def __init__(self, model: nn.Module, device: torch.device, carried: frozenset[str] = frozenset()) -> None:
        self.device = device
        self.carried = carried  # attributes of modules whose tensors the forward changes between blocks
        self.block = ""  # the block that runs
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.states: dict[int, str] = {}  # first names of parameters and buffers, by the stand-in's id
        settle(model.modules())
        memo: dict[int, Any] = {}
        with self.mode:
            for name, tensor in named_tensors(model):
                if id(tensor) not in memo:
                    memo[id(tensor)] = stand_in = self._like(tensor)
                    self.states[id(stand_in)] = name
            places = places_of(model)
            for name in carried & places.keys():
                memo[id(places[name])] = stand_in = self._like(places[name])
                self.states[id(stand_in)] = name
            for module in model.modules():
                for value in vars(module).values():
                    if isinstance(value, Tensor) and value.grad_fn is not None and not isinstance(value, FakeTensor):
                        memo[id(value)] = self._like(value)  # that hooks compute before every forward: weight_norm
        self.alive = list(memo.values())
        memo |= _copied_apart(model)
        for name, value in named_values(model, can_be_used_up):
            memo[id(value)] = Source(name, value, lambda: self.block)
        for _, tensor in named_tensors(model):
            memo |= copied_states(tensor, tensor)  # nothing computes with them here
        try:
            self.model: nn.Module = copied(model, memo)
        except Exception as error:
            raise ModelError(
                f"{_uncopied(model) or f'the model, a {type(model).__name__}'}, cannot be copied: {error}",
                expected="a model that copy.deepcopy can copy: Drumline traces the copy to see where it can cut",
                fix="pass an nn.Sequential or a list of blocks, which Drumline does not copy",
            ) from error
        for original, module in zip(model.modules(), self.model.modules(), strict=True):
            sketch(original, module)
        _without_cache(self.model)
        # Of tensors in attributes, both: a trace computes with the copy, and pieces with the user's own.
        self.places = {name: memo[id(value)] for name, value in places.items() if id(value) in memo}
        self.originals = {id(self.places[name]): value for name, value in places.items() if name in self.places}
        self.names = {id(module): name for name, module in self.model.named_modules()}
        # Results of blocks that cannot run on stand-ins, by what such blocks have in common.
        self._known: dict[Any, tuple[Any, tuple[int | Meta, ...]]] = {}

    @property
    def has_numbers(self) -> bool:
        """Whether any block has run on numbers: what it made of them may be anywhere, as a plain value."""
        return bool(self._known)

    def _like(self, tensor: Tensor) -> Tensor:
        # Of 4-bit codes, the shape of what they stand for: DoRA computes with it.
        like = torch.empty(unpacked_shape(tensor), dtype=tensor.dtype, device=self.device)
        return nn.Parameter(like, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else like

    def fakes(self, metas: Iterable[Meta]) -> list[Tensor]:
        """Return new stand-ins for tensors like these; one that requires grad has a place in a graph."""
        with self.mode:
            return [self._fake(meta) for meta in metas]

    def _fake(self, meta: Meta) -> Tensor:
        shape, dtype, strides, wants_gradient = meta
        if strides is None:
            tensor = torch.empty(shape, dtype=dtype, device=self.device)
        else:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
        return tensor.requires_grad_().clone() if wants_gradient and torch.is_grad_enabled() else tensor

    def run(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Return the output of a block with its hooks: on stand-ins, else on zeros or from memory."""
        tensors, form = pack((args, kwargs))
        metas = tuple(Meta.of(tensor) for tensor in tensors)
        around = (module.training, torch.is_grad_enabled(), torch.is_autocast_enabled(self.device.type))
        key = (_kind(module), str(form), metas, around, _numbers_of(tensors))
        if key not in self._known:
            try:
                self.block = self.names[id(module)]
                with _QUIET[0].by(self), _QUIET[1].by(self), self.mode:
                    return call(*args, **kwargs)
            except ModelError:
                raise
            except Exception:
                self._known[key] = self._on_numbers(module, args, kwargs)
            finally:
                self.block = ""
        made_form, outputs = self._known[key]

        def remembered(*args: Any, **kwargs: Any) -> Any:
            given_tensors, fakes = (
                pack((args, kwargs))[0],
                iter(self.fakes(meta for meta in outputs if isinstance(meta, Meta))),
            )
            return unpack(
                [next(fakes) if isinstance(output, Meta) else alias_of(given_tensors[output]) for output in outputs],
                made_form,
            )

        with put_in([(vars(module), "forward", remembered)]):  # so that the call still runs its hooks
            return call(*args, **kwargs)

    def _on_numbers(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, tuple[int | Meta, ...]]:
        """Run one block on zeros, or with ones for integers if it takes no zeros, such as lengths."""
        try:
            return self._on_zeros(module, args, kwargs)
        except Exception:
            try:
                shapes = self._on_zeros(module, args, kwargs, integer=1)
            except Exception:
                shapes = None
            if shapes is None:
                raise
        try:
            other = self._on_zeros(module, args, kwargs, integer=2)
        except Exception:  # it may take no other number
            other = shapes
        if other != shapes:
            raise ModelError(
                f"the shape of what {self.names[id(module)]!r} returns depends on the integers that it gets",
                expected="blocks whose outputs' shapes depend on the shapes of their inputs",
                fix="pad to a fixed length: pad_packed_sequence(..., total_length=x.shape[1])",
            )
        return shapes

    def _on_zeros(
        self, module: nn.Module, args: Any, kwargs: Any, *, integer: int = 0
    ) -> tuple[Any, tuple[int | Meta, ...]]:
        """Run one block on zeros, because nothing else shows what it returns.

        Return the form of the result and, for each tensor in it, the input that it is, or its description.
        """
        tensors, form = pack((args, kwargs))
        own_places: list[tuple[dict[str, Any], str, Tensor]] = [
            (places, name, place)
            for part in module.modules()
            for places in (part._parameters, part._buffers)
            for name, place in places.items()
            if place is not None
        ]
        with unset_fake_temporarily():
            # Tensors that are not stand-ins have values, on which the block may branch.
            zeros = {
                id(tensor): self._zeros(tensor) if isinstance(tensor, FakeTensor) else tensor
                for tensor in (*tensors, *(tensor for _, _, tensor in own_places))
            }
            if integer:
                for tensor in tensors:
                    if isinstance(tensor, FakeTensor) and tensor.dtype in _INTEGERS[:-1]:
                        zeros[id(tensor)].fill_(integer)
            entries: list[tuple[dict[str, Any], str, Any]] = [
                (table, name, zeros[id(t)]) for table, name, t in own_places
            ]
            # Hooks must see stand-ins.
            entries += [(vars(module), kind, OrderedDict()) for kind in (*FORWARD, *BACKWARD)]
            with put_in(entries):
                arguments, named = unpack([zeros[id(tensor)] for tensor in tensors], form)
                new_tensors, made_form = pack(module(*arguments, **named))
        inputs = {id(zeros[id(tensor)]): at for at, tensor in enumerate(tensors)}
        return made_form, tuple(
            inputs[id(tensor)] if id(tensor) in inputs else Meta.of(tensor) for tensor in new_tensors
        )

    def _zeros(self, like: Tensor) -> Any:
        tensor = torch.zeros(tuple(like.shape), dtype=like.dtype, device=self.device)
        if isinstance(like, nn.Parameter):
            return nn.Parameter(tensor, like.requires_grad)
        return tensor.requires_grad_().clone() if like.requires_grad else tensor


def _copied_apart(model: nn.Module) -> dict[int, Any]:
    """Return copies, by id, of what modules keep that `copy.deepcopy` cannot copy: generators, results of a forward."""
    copies: dict[int, Any] = {}
    for module in model.modules():
        for value in vars(module).values():
            if isinstance(value, torch.Generator):
                copies[id(value)] = torch.Generator(value.device).set_state(value.get_state())
            elif isinstance(value, Tensor) and not value.is_leaf:
                copies[id(value)] = value.detach().clone()
    return copies


def _uncopied(model: nn.Module) -> str:
    """Return the attribute that cannot be copied, in words."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in ("_parameters", "_buffers", "_modules") and not isinstance(value, Tensor | torch.Generator):
                try:
                    copy.deepcopy(value)
                except Exception:
                    return f"{attribute(path, key)}, a {type(value).__name__}"
    return ""


def alias_of(tensor: Tensor) -> Tensor:
    """Return another stand-in with the same memory, for what a block may return as it got it, or may not.

    Of a block that decides by values or by chance, one run shows one of its ways.
    """
    if not isinstance(tensor, FakeTensor):
        return tensor
    with torch._C.DisableTorchFunction():
        return tensor.view_as(tensor)


def _numbers_of(tensors: Iterable[Tensor]) -> tuple[bytes, ...]:
    """Return the values of integers that are no stand-ins, on which a block may branch."""
    with torch._C.DisableTorchFunction():
        return tuple(
            tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
            for tensor in tensors
            if not isinstance(tensor, FakeTensor) and tensor.dtype in _INTEGERS and tensor.dim()
        )


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


def _without_cache(model: nn.Module) -> None:
    """Switch off the caches that Hugging Face models keep for generating text: training does not need them."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False) is True:
            config.use_cache = False


# Stop torch from logging that a function cannot run on stand-ins: there is another way.
_QUIET = [
    Patch(logging.getLogger(f"torch._subclasses.{name}"), "disabled", lambda _: True)
    for name in ("fake_tensor", "fake_impls")
]


def _kind(module: nn.Module) -> str:
    """Return what modules with the same kind of result have in common."""
    shapes = [(name, tuple(param.shape), param.dtype) for name, param in module.named_parameters()]
    return f"{type(module)} {module} {shapes}"
