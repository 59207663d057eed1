"""What a model keeps where its forward may change it between blocks: tensors, generators, iterators.

    self.mean.mul_(0.9).add_(x.mean(0))    a tensor in an attribute: held by the stage that changes it, as a buffer is
    self.means[0] += x.mean(0)             a tensor elsewhere: refused by name
    next(self.scales)                      an iterator: refused by name, before anything takes from it
    self.chance.random()                   a generator: refused by name

A trace runs on copies, so what it changes is never the user's own. Iterators are replaced in it by `Source`s.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import IOBase
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from drumline.core.errors import ModelError
from drumline.model.catalogue import named_tensors, whole_name
from drumline.model.follow.refusals import line_here
from drumline.model.hooks import HOOKS
from drumline.model.kept_state.spaces import own_values, spaces_in
from drumline.model.kept_state.spies import original_of
from drumline.model.randomness import OWN_GENERATORS, state_of_own
from drumline.model.watch.fingerprint import WHOLE
from drumline.model.watch.surroundings import Surroundings, is_known
from drumline.model.watch.used_up import can_be_used_up

_TORCHS_OWN = frozenset({"_parameters", "_buffers", "_modules", *HOOKS})
_DEPTH = 4
_MOST = 1024  # items of a container that are looked into
_READS = frozenset({"send", "throw", "read", "readline", "readlines", "readinto"})
_INSIDE = "do it inside a block, or pass what it gives as an input of the model"


class Source:
    """Stands for an iterator, a file or the system's randomness in a trace: refuses to give anything between blocks.

    Inside a block it gives what a copy of the original gives, if there is one. What a `Spy` gives is given back.
    """

    gives_the_same = True  # nobody need give back what it gave

    def __init__(self, name: str, original: Any, is_inside: Callable[[], str]) -> None:
        self._name = name
        self._is_inside = is_inside
        try:
            self._copy = copy.deepcopy(original)
        except Exception:
            self._copy = None
        self._original = original
        self._kind = type(original_of(original))

    def __deepcopy__(self, memo: Any) -> Source:
        return self

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return next(self._giver())

    def __getattr__(self, key: str) -> Any:
        if key.startswith("__"):
            raise AttributeError(key)
        takes = key in _READS or issubclass(self._kind, random.SystemRandom)
        return getattr(self._giver() if takes else self._original, key)

    def _giver(self) -> Any:
        block, kind = self._is_inside(), self._kind.__name__
        if block and self._copy is not None:
            return self._copy
        if block:
            raise ModelError(
                f"block {block!r} takes from {self._name}, a {kind}, which cannot be copied",
                expected="blocks of a traced model to take from what a copy can stand for",
                fix="pass what it gives as an input, or pass an nn.Sequential, which Drumline does not trace",
            )
        raise ModelError(
            f"the model's forward takes from {self._name}, a {kind}, between its blocks{line_here()}",
            expected="a forward that does the same between its blocks in every step",
            fix=_INSIDE,
        )


def named_values(model: nn.Module, wanted: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield values that modules keep in attributes, and what they are called; those in containers too.

    >>> layer = nn.Identity(); layer.seen = {"a": [iter(())]}
    >>> [name for name, _ in named_values(layer, can_be_used_up)]
    ["the model's attribute 'seen'"]
    """
    known_ids: set[int] = set()
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _TORCHS_OWN:
                for item in _inside(value, wanted, known_ids, _DEPTH):
                    yield attribute(path, key), item


def attribute(path: str, key: str) -> str:
    """Return what to call an attribute of a module in an error.

    >>> attribute("", "mean"), attribute("layers.0", "mean")
    ("the model's attribute 'mean'", "the attribute 'mean' of 'layers.0'")
    """
    return f"the attribute {key!r} of {path!r}" if path else f"the model's attribute {key!r}"


def _inside(value: Any, wanted: Callable[[Any], bool], known_ids: set[int], depth: int) -> Iterator[Any]:
    if (isinstance(value, WHOLE) and not isinstance(value, Tensor | IOBase)) or id(value) in known_ids:
        return
    known_ids.add(id(value))
    if wanted(value):
        yield value
    elif depth and not isinstance(value, Tensor):
        items: Iterable[Any] = ()
        if isinstance(value, list | tuple | deque | set | frozenset):
            items = value
        elif isinstance(value, dict):
            items = value.values()
        elif not is_known(type(value)) or not callable(value):
            items = getattr(value, "__dict__", {}).values()
        items = list(items)
        for item in items if len(items) <= _MOST else ():
            yield from _inside(item, wanted, known_ids, depth - 1)


def variable_with(model: nn.Module, tensor: Tensor) -> str:
    """Return what outside of a model holds a tensor, in words; nothing if nothing does."""
    variables = [(f"variable {name!r}", value) for name, value, _ in Surroundings(model.modules()).named()]
    for space in spaces_in("", list(model.named_modules()), set()):
        for key, value in own_values(space.table.copy()).items():
            variables.append((f"attribute {space.path(key)!r}" if isinstance(key, str) else space.label(key), value))
    for what, value in variables:
        if any(True for _ in _inside(value, lambda each: each is tensor, set(), _DEPTH)):
            return what
    return ""


@contextmanager
def replaced_sources(surroundings: Surroundings, is_inside: Callable[[], str]) -> Iterator[None]:
    """Let variables outside of the model that hold iterators hold stand-ins for them, in a trace."""
    undo = [
        (put, value, put(Source(f"the variable {name!r}", value, is_inside)))
        for name, value, put in surroundings.named()
        if can_be_used_up(value)
    ]
    try:
        yield
    finally:
        for put, value, _ in undo:
            put(value)


class Kept:
    """The tensors and generators that a traced model and its surroundings keep, as they were when the trace began.

    `places` are the tensors in attributes, by name: those can be held by a stage.
    """

    def __init__(self, model: nn.Module, surroundings: Surroundings, places: Mapping[str, Tensor]) -> None:
        self._alive: list[Any] = []  # so that no storage's id is used again
        self._tensors: dict[int, str] = {}
        for name, tensor in named_values(model, _is_real):
            self._add(name, tensor)
        generators = list(named_values(model, _is_generator))
        for name, value, _ in surroundings.named():
            known_ids: set[int] = set()
            for tensor in _inside(value, _is_real, known_ids, _DEPTH):
                self._add(f"the variable {name!r}", tensor)
            generators += [(f"the variable {name!r}", each) for each in _inside(value, _is_generator, set(), _DEPTH)]
        self._places: dict[int, str] = {}
        for name, tensor in places.items():
            self._places.setdefault(storage_of(tensor), name)
        self._generators = [(name, each, _state(each)) for name, each in generators]

    def _add(self, name: str, tensor: Tensor) -> None:
        self._tensors.setdefault(storage_of(tensor), name)
        self._alive.append(tensor.untyped_storage())

    def place_of(self, tensor: Tensor) -> str:
        """Return the attribute whose memory a tensor uses, if a stage can hold it."""
        return "" if isinstance(tensor, FakeTensor) else self._places.get(storage_of(tensor), "")

    def refuse(self, tensor: Tensor) -> None:
        """Refuse to change a tensor that no stage can hold."""
        name = "" if isinstance(tensor, FakeTensor) else self._tensors.get(storage_of(tensor), "")
        if name:
            raise ModelError(
                f"the model's forward changes a tensor in {name} between its blocks{line_here()}",
                expected="changes in place of buffers, or of tensors that are attributes themselves",
                fix="register it: self.register_buffer(...), or change it inside a block",
            )

    def refuse_drawn(self) -> None:
        """Refuse a draw between blocks: a step would have the numbers of the trace."""
        for name, generator, state in self._generators:
            if _state(generator) != state:
                raise ModelError(
                    f"the model's forward draws from {name}, a {type(generator).__name__}, between its blocks",
                    expected="a forward that does the same between its blocks in every step",
                    fix="draw it inside a block: a block may have generators of its own",
                )

    def renew(self) -> None:
        """Take the generators as they are: a block may have drawn."""
        self._generators = [(name, each, _state(each)) for name, each, _ in self._generators]


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor | nn.Parameter)


def _is_generator(value: Any) -> bool:
    return isinstance(value, OWN_GENERATORS) and not isinstance(value, random.SystemRandom)


def _state(generator: Any) -> str:
    state = state_of_own(generator)
    return str(state.tolist() if isinstance(state, Tensor) else state)


def storage_of(tensor: Tensor) -> int:
    """Return what tensors of one memory have in common."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


_HARMLESS = frozenset({"requires_grad_", "retain_grad_", "detach_", "share_memory_", "pin_memory_"})


def changed_by_name(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors that a function changes in place, as its name says.

    >>> x = torch.ones(2)
    >>> [len(changed_by_name(name, (x, x), {})) for name in ("add_", "add", "__iadd__", "__setitem__", "__init__")]
    [1, 0, 1, 1, 0]
    """
    first: Any = None
    if name.endswith("_") and not name.endswith("__") and name not in _HARMLESS:
        first = args[0] if args else next(iter(kwargs.values()), None)
    elif name == "__setitem__" or (name.startswith("__i") and name[3:-2] in _OPERATORS):
        first = args[0]
    elif (out := kwargs.get("out")) is not None:
        first = out
    return [tensor for tensor in (first if isinstance(first, list | tuple) else [first]) if isinstance(tensor, Tensor)]


_OPERATORS = frozenset(
    {"add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift", "div"}
)


def places_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are attributes of modules, by name: neither parameters nor buffers, and without a graph.

    >>> layer = nn.Linear(2, 2); layer.mean = torch.zeros(2)
    >>> [*places_of(nn.Sequential(layer))]
    ['0.mean']
    """
    return {
        whole_name(path, key): value
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if type(value) is Tensor and not value.requires_grad and value.grad_fn is None
    }


def refuse_shared(model: nn.Module, name: str) -> None:
    """Refuse a tensor in an attribute that changes, if another of the model uses its memory."""
    places = places_of(model)
    memory = storage_of(places[name])
    others = {**dict(named_tensors(model)), **places}
    for other, tensor in others.items():
        if other != name and not isinstance(tensor, FakeTensor) and storage_of(tensor) == memory:
            raise ModelError(
                f"the model's forward changes the tensor {name!r} in place between its blocks, and {other!r} is of the "
                "same memory",
                expected="a tensor that changes to have memory of its own",
                fix=f"write self.{name.rpartition('.')[2]} = self.{name.rpartition('.')[2]}.clone(), or change it "
                "inside a block",
            )
