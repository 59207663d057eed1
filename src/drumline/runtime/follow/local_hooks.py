"""Hooks that a forward puts on its blocks or takes from them while it runs, as those that collect features do.

When the pieces run, the blocks have the hooks that they had before. A hook that the forward added may therefore look at
what a block returns, which is followed as everything else is; it may not change it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from drumline.core.errors import ModelError

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
KINDS = tuple(name for name in vars(nn.Module()) if "hooks" in name)


class LocalHooks:
    """The hooks of a model's modules as they were; whatever comes later is looked after, and taken back in the end."""

    def __init__(self, model: nn.Module) -> None:
        self._before = {
            module: {kind: dict(vars(module)[kind]) for kind in KINDS if isinstance(vars(module).get(kind), dict)}
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
