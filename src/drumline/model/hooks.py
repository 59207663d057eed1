"""Hooks of modules and parameters: the names of a module's tables, and hooks where autograd adds up a gradient."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

FORWARD = ("_forward_hooks", "_forward_pre_hooks")
BACKWARD = ("_backward_hooks", "_backward_pre_hooks")
HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name)  # every kind of module hook


def is_hooked(parameter: nn.Parameter) -> bool:
    """Whether a hook is registered on the node of autograd that adds up a parameter's gradient (AccumulateGrad).

    >>> weight = nn.Parameter(torch.ones(2))
    >>> node = (weight * 1).grad_fn.next_functions[0][0]
    >>> handle = node.register_hook(print)
    >>> is_hooked(weight), handle.remove(), is_hooked(weight)
    (True, None, False)
    """
    return any(_tables(parameter))


def hooks_behind(parameter: nn.Parameter) -> dict[int, Any]:
    """Return the table of the hooks that run there once the gradient was added.

    >>> hooks_behind(nn.Parameter(torch.ones(2)))
    OrderedDict()
    """
    return _tables(parameter)[0]


def _tables(parameter: nn.Parameter) -> list[dict[int, Any]]:
    """Return the tables of a node's hooks, behind and before the sum: torch shows them to whoever registers one."""
    node: Any = get_gradient_edge(parameter).node  # a new one, unless somebody holds it
    tables = []
    for register in (node.register_hook, node.register_prehook):
        handle = register(_nothing)
        tables.append(handle.hooks_dict_ref())
        handle.remove()
    return tables


def with_holders(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """Return those of which some code holds that node, without which no hook on it lives; asking takes less time.

    >>> weight, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    >>> node = (weight * 1).grad_fn.next_functions[0][0]
    >>> with_holders([weight, other])[0] is weight, len(with_holders([weight, other]))
    (True, 1)
    """
    with torch.enable_grad():
        return [param for param in parameters if param.requires_grad and _num_holders(param) > _none()]


def _num_holders(parameter: nn.Parameter) -> int:
    return sys.getrefcount(parameter.view_as(parameter).grad_fn.next_functions[0][0])  # type: ignore[union-attr]


@cache
def _none() -> int:
    return _num_holders(nn.Parameter(torch.zeros(1)))


def _nothing(*_: Any) -> None:
    """Change nothing."""
