"""What the tracer intercepts: calls of modules, their attributes, and custom autograd functions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from drumline.core.errors import ModelError
from drumline.model.follow.attributes import Attributes
from drumline.model.patches import Patch, Replacement
from drumline.model.values import MISSING, tensors_in
from drumline.model.watch.surroundings import is_of_a_library


class Follower(Protocol):
    """The object that is notified."""

    attributes: Attributes
    function: str
    inside: frozenset[str]
    names: dict[int, str]
    within: list[str]  # the current block

    def block(self, module: nn.Module, name: str, call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a block."""

    def applied(self, cls: Any, apply: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a custom autograd function."""


@contextmanager
def coming_by(follower: Follower) -> Iterator[None]:
    """Let a follower intercept calls of modules, their attributes and custom autograd functions, in this thread."""
    with ExitStack() as stack:
        for patch in _PATCHES:
            stack.enter_context(patch.by(follower))
        yield


def _module_calls(replaced: Replacement) -> Any:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        module_call = replaced.original
        follower: Follower | None = replaced.watcher
        name = None if follower is None else follower.names.get(id(self))
        if follower is None or name is None or name in follower.inside or follower.within:
            return module_call(self, *args, **kwargs)
        if follower.function:
            raise ModelError(
                f"the autograd function {follower.function} calls block {name!r} in its forward",
                expected="blocks called by the model's forward itself: no stage sees a gradient inside the function",
                fix="call the block outside the function, or move the function into a block",
            )
        return follower.block(self, name, lambda *a, **k: module_call(self, *a, **k), args, kwargs)

    return call


def _functions(replaced: Replacement) -> Any:
    def applied(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        apply = replaced.original.__get__(None, cls)
        follower: Follower | None = replaced.watcher
        if follower is None or follower.within or follower.function:
            return apply(*args, **kwargs)
        if cls is CheckpointFunction:
            return _checkpointed(*args)
        return follower.applied(cls, apply, args, kwargs)

    return classmethod(applied)


def _checkpointed(run: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    """Run the function of a reentrant checkpoint: without gradients if no argument requires grad, as it does."""
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args))
    with torch.set_grad_enabled(wanted):
        return run(*args)


def _listener(replaced: Replacement) -> Attributes | None:
    """Return the object to notify of attributes in this thread, if any."""
    follower: Follower | None = replaced.watcher
    return None if follower is None else follower.attributes


def _reading(replaced: Replacement) -> Any:
    def read(self: nn.Module, key: str) -> Any:
        try:
            value = replaced.original(self, key)
        except AttributeError:
            if (attributes := _listener(replaced)) is not None and not _is_part(self, key):
                attributes.read(self, key, MISSING)
            raise
        if (attributes := _listener(replaced)) is not None:
            if key == "__dict__" and not _is_read_by_a_library(sys._getframe(1)):
                for name, item in value.items():
                    attributes.read(self, name, item)
            elif not isinstance(value, nn.Module) and getattr(value, "__self__", None) is not self:
                attributes.read(self, key, value)
        return value

    return read


def _is_read_by_a_library(frame: FrameType) -> bool:
    return is_of_a_library(str(frame.f_globals.get("__name__")))


def _changing(replaced: Replacement) -> Any:
    def change(self: nn.Module, key: str, *value: Any) -> None:
        """Set an attribute to the one given value, or delete it if there is none."""
        before = object.__getattribute__(self, "__dict__").get(key, MISSING)
        replaced.original(self, key, *value)
        now, attributes = value[0] if value else MISSING, _listener(replaced)
        if attributes is not None and not _is_part(self, key) and not isinstance(now, nn.Module):
            attributes.set(self, key, before, now)

    return change


_PATCHES = (
    Patch(nn.Module, "__call__", _module_calls),
    Patch(torch.autograd.Function, "apply", _functions),
    Patch(nn.Module, "__getattribute__", _reading),
    Patch(nn.Module, "__setattr__", _changing),
    Patch(nn.Module, "__delattr__", _changing),
)


def _is_part(module: nn.Module, key: str) -> bool:
    """Whether a name is that of a parameter, a buffer or a child."""
    attributes = object.__getattribute__(module, "__dict__")
    return any(key in attributes.get(kind, ()) for kind in ("_parameters", "_buffers", "_modules"))


def node_like(node: Any) -> Any:
    """Return a replacement for a node of autograd's graph that refuses hooks, because no piece would have them."""
    return type(type(node).__name__, (_Node,), {})(node)


class _Node:
    def __init__(self, node: Any) -> None:
        self._node = node

    def __getattr__(self, key: str) -> Any:
        if key in ("register_hook", "register_prehook"):
            raise ModelError(
                "the model's forward registers a hook on a node of the autograd graph between its blocks",
                expected="hooks on parameters or modules, or inside a block",
                fix="move it into a block",
            )
        return getattr(self._node, key)


def version_of(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place, if it is counted."""
    return 0 if tensor.is_inference() else tensor._version
