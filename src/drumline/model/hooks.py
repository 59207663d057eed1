"""The names of the tables in which a module keeps its hooks."""

from __future__ import annotations

from torch import nn

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)  # every kind of module hook
