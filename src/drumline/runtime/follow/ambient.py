"""What is going on around a call while a model is followed: what of it is kept in the pieces, and what cannot be.

Whether gradients are on and what autocast does is noted with every call. All else that a forward switches on around its
blocks would be missing when the pieces run, so it is refused by name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from drumline.core.errors import ModelError
from drumline.runtime.backward.inner_gradients import transformed

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


_BACKWARD = ("_backward_hooks", "_backward_pre_hooks")


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
        if name in inside and any(getattr(module, kind) for kind in _BACKWARD):
            where = f"the container {name!r}" if name else "the model itself"
            raise ModelError(
                f"there is a backward hook on {where}, a {type(module).__name__}",
                expected="backward hooks on blocks, or on modules and parameters inside of them",
                fix="put it on a block: on the last one for the gradient of the output, on the first for the input's",
            )
