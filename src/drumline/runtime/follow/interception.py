"""What comes by the tracer while a model is followed: calls of modules, their attributes, custom autograd functions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from drumline.core.errors import ModelError
from drumline.runtime.blocks.contents import tensors_in
from drumline.runtime.follow.attributes import MISSING, Attributes
from drumline.runtime.watch.fingerprint import can_change

_Apply = Callable[..., Any]


class Follower(Protocol):
    """Who is told."""

    attributes: Attributes
    function: str
    is_aside: bool
    inside: frozenset[str]

    names: dict[int, str]

    @property
    def is_within(self) -> bool:
        """Whether a block runs."""

    def block(self, module: nn.Module, name: str, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a block."""

    def applied(self, cls: Any, apply: _Apply, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a custom autograd function."""


@contextmanager
def coming_by(follower: Follower) -> Iterator[None]:
    """Let calls of modules, their attributes and custom autograd functions pass by a follower, in this thread."""
    thread = threading.get_ident()
    with _module_calls(follower, thread), _functions(follower, thread), _attributes(follower, thread):
        yield


@contextmanager
def _module_calls(follower: Follower, thread: int) -> Iterator[None]:
    module_call = nn.Module.__call__
    names, inside = follower.names, follower.inside

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        name = names.get(id(self))
        if name is None or name in inside or follower.is_within or threading.get_ident() != thread:
            return module_call(self, *args, **kwargs)
        if follower.function:
            raise ModelError(
                f"the autograd function {follower.function} calls the block {name!r} in its forward",
                expected="blocks that the model's forward calls itself: no stage sees a gradient inside of a function",
                fix="call it outside of the function, or let the function be part of a block",
            )
        return follower.block(self, name, lambda *a, **k: module_call(self, *a, **k), args, kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__call__ = module_call  # type: ignore[method-assign]


@contextmanager
def _functions(follower: Follower, thread: int) -> Iterator[None]:
    function_apply = torch.autograd.Function.__dict__["apply"]

    def applied(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        apply = function_apply.__get__(None, cls)
        if follower.is_within or follower.function or threading.get_ident() != thread:
            return apply(*args, **kwargs)
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        return follower.applied(cls, apply, args, kwargs)

    torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = function_apply  # type: ignore[method-assign]


def _checkpointed(run: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    """Run what a reentrant checkpoint would: without gradients if no argument wants one, as is its way."""
    wanted = torch.is_grad_enabled() and any(one.requires_grad for one in tensors_in(args))
    with torch.set_grad_enabled(wanted):
        return run(*args)


@contextmanager
def _attributes(follower: Follower, thread: int) -> Iterator[None]:
    plain: Any = nn.Module
    setattr_, delattr_ = nn.Module.__setattr__, nn.Module.__delattr__
    attributes = follower.attributes

    def is_told() -> bool:
        return not follower.is_aside and threading.get_ident() == thread

    def read(self: nn.Module, key: str) -> Any:
        try:
            value = object.__getattribute__(self, key)
        except AttributeError:
            if is_told() and not _is_part(self, key):
                attributes.read(self, key, MISSING)
            raise
        if is_told() and (not callable(value) or can_change(value)):
            attributes.read(self, key, value)
        return value

    def set_(self: nn.Module, key: str, value: Any) -> None:
        before = object.__getattribute__(self, "__dict__").get(key, MISSING)
        setattr_(self, key, value)
        if is_told() and not _is_part(self, key) and not isinstance(value, nn.Module):
            attributes.set(self, key, before, value)

    def delete(self: nn.Module, key: str) -> None:
        before = object.__getattribute__(self, "__dict__").get(key, MISSING)
        delattr_(self, key)
        if is_told() and before is not MISSING:
            attributes.set(self, key, before, MISSING)

    plain.__getattribute__, plain.__setattr__, plain.__delattr__ = read, set_, delete
    try:
        yield
    finally:
        del plain.__getattribute__
        plain.__setattr__, plain.__delattr__ = setattr_, delattr_


def _is_part(module: nn.Module, key: str) -> bool:
    """Whether a name is that of a parameter, a buffer or a child."""
    own = object.__getattribute__(module, "__dict__")
    return any(key in own.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


class Nodes:
    """Stand-ins for nodes of autograd's graph, which nobody may put a hook on: no piece would have it."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def of(self, node: Any) -> Any:
        """Return what stands for a node; the same for the same."""
        if node is None:
            return None
        if id(node) not in self._made:
            kind = type(type(node).__name__, (_Node,), {})
            self._made[id(node)] = kind(node)
        return self._made[id(node)]


class _Node:
    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, key: str) -> Any:
        if key in ("register_hook", "register_prehook"):
            raise ModelError(
                "the model's forward puts a hook on a node of the graph between its blocks",
                expected="hooks on parameters or modules, or inside of a block",
                fix="move it into a block",
            )
        return getattr(self._node, key)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, where anybody counts."""
    return 0 if tensor.is_inference() else tensor._version
