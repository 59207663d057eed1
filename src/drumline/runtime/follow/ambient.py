"""What is going on around a call while a model is followed: what of it is kept in the pieces, and what cannot be.

Whether gradients are on and what autocast does is noted with every call. All else that a forward switches on around its
blocks would be missing when the pieces run, so it is refused by name.

When the pieces run, the blocks have the hooks that they had before. A hook that a forward puts on a block while it
runs, as those that collect features do, may therefore look at what the block returns, which is followed as everything
else is; it may not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from drumline.core.errors import ModelError
from drumline.runtime.backward.inner_gradients import transformed

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)  # of all kinds that a module has
_HARMLESS = ("torch.utils.checkpoint", "torch.autograd.graph")  # what they keep is what they give back


def around() -> list[str]:
    """Return in words what is switched on here that a piece would not know of.

    >>> with torch.autograd.graph.saved_tensors_hooks(print, print):
    ...     around()
    ['torch.autograd.graph.saved_tensors_hooks']
    """
    found = []
    if transformed():
        found.append("a transform of torch.func, such as torch.vmap")
    saved: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if saved is not None and getattr(saved[0], "__module__", "") not in _HARMLESS:
        found.append("torch.autograd.graph.saved_tensors_hooks")
    if parametrize._cache_enabled:
        found.append("torch.nn.utils.parametrize.cached")
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]  # type: ignore[no-untyped-call]
    found += [f"the mode {type(one).__name__}" for one in modes if not isinstance(one, DeviceContext)]
    if torch.get_default_dtype() is not torch.float32:
        found.append(f"the default type {torch.get_default_dtype()}")
    return found


class Ambient:
    """What was switched on when following began; anything more is refused around a block."""

    def __init__(self) -> None:
        self.known = around()

    def refuse_more(self, what: str) -> None:
        """Refuse a call of a block with more going on around it than when following began."""
        more = [one for one in around() if one not in self.known]
        if more:
            raise ModelError(
                f"the model's forward calls {what} inside of {more[0]}",
                expected="blocks that are called by themselves",
                fix="call it as it is, or move what is around it into the block",
            )


def refuse_backward_hooks(model: nn.Module, inside: frozenset[str]) -> None:
    """Refuse backward hooks on modules that are followed inside: no piece is that module, to see its gradients."""
    shared = nn.modules.module
    if shared._global_backward_hooks or shared._global_backward_pre_hooks:
        raise ModelError(
            "there is a global backward hook of modules",
            expected="none: the model itself and its containers are no modules of any stage, and would go without",
            fix="put it on the blocks: block.register_full_backward_hook(...)",
        )
    for name, module in model.named_modules(remove_duplicate=False):
        if name in inside and any(getattr(module, kind) for kind in BACKWARD):
            where = f"the container {name!r}" if name else "the model itself"
            raise ModelError(
                f"there is a backward hook on {where}, a {type(module).__name__}",
                expected="backward hooks on blocks, or on modules and parameters inside of them",
                fix="put it on a block: on the last one for the gradient of the output, on the first for the input's",
            )


class LocalHooks:
    """The hooks of a model's modules as they were; whatever comes later is looked after, and taken back in the end."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {
            module: {kind: dict(vars(module)[kind]) for kind in HOOKS if isinstance(vars(module).get(kind), dict)}
            for module in model.modules()
        }

    def look_after(self, block: nn.Module, name: str) -> None:
        """Let hooks that the forward put on a block only look, and refuse what else it did to its hooks."""
        for module in block.modules():
            for kind, before in self._before.get(module, {}).items():
                now = vars(module)[kind]
                if now.keys() == before.keys():
                    continue
                if kind not in FORWARD or not before.keys() <= now.keys():
                    raise _refusal(name)
                for key in now.keys() - before.keys():
                    if not isinstance(now[key], _Looks):
                        now[key] = _Looks(now[key], name)

    def take_back(self) -> None:
        """Give all modules the hooks that they had."""
        for module, kinds in self._before.items():
            for kind, before in kinds.items():
                now = vars(module)[kind]
                now.clear()
                now.update(before)


class _Looks:
    """A hook that is to return nothing."""

    def __init__(self, hook: Callable[..., Any], name: str) -> None:
        self.hook = hook
        self.name = name

    def __call__(self, *args: Any) -> None:
        if self.hook(*args) is not None:
            raise _refusal(self.name)


def _refusal(name: str) -> ModelError:
    return ModelError(
        f"the model's forward puts a hook on {name!r}, or takes one away, that changes what the block does",
        expected="hooks that are there before the forward begins, or only look at what blocks return",
        fix="put it on the block outside of the forward, or do its work between the blocks",
    )
