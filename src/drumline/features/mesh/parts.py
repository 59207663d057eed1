"""Parameters of which each line along an axis holds a part, and modules that can have them whole for a while."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.slices import Slice, cut_out, put_together, slice_of
from drumline.features.mesh.reduce import share_values
from drumline.model.patches import put_in
from drumline.model.weights.remote_blocks import without_memory


class HeldParts:
    """The parts of parameters that this line holds, and what else is other than in one process."""

    def __init__(self, axes: Axes) -> None:
        self.axes = axes
        self._parts: list[tuple[dict[str, Any], str, nn.Parameter]] = []  # by their places in modules
        self._entries: list[tuple[dict[str, Any], str, Any]] = []  # of modules and of our own, as in one process

    @torch.no_grad()
    def _local(self, whole: nn.Parameter, part: Slice, device: torch.device) -> nn.Parameter:
        """Return this line's part of a parameter; all lines call it alike."""
        there = whole.detach().to(device)
        share_values(self.axes, [there])  # so that the lines' parts are those of one model
        local = cut_out(there, part, self.axes)
        # A part that is a view would keep the whole in memory.
        return _as_part(local if local._base is None else local.clone(), whole, part)

    def _absent(self, whole: nn.Parameter, part: Slice) -> nn.Parameter:
        """Return what stands for this line's part of a parameter that another rank holds: its shape, without memory."""
        shape = list(whole.shape)
        shape[part.dim] //= self.axes.size(part.axis)
        return _as_part(without_memory(shape, whole.dtype, whole.device), whole, part)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have the modules as in one process inside, with whole parameters; all lines call it alike."""
        wholes: dict[nn.Parameter, nn.Parameter] = {}
        for local in dict.fromkeys(local for _, _, local in self._parts):
            whole = put_together(local.detach(), slice_of(local), self.axes)
            wholes[local] = nn.Parameter(whole, local.requires_grad)
            wholes[local]._backward_hooks = local._backward_hooks
        with put_in([*self._entries, *((table, key, wholes[local]) for table, key, local in self._parts)]):
            yield


Hook = Callable[..., Any]
HookOf = Callable[[nn.Module, Hook], Hook]


def _as_part(local: Tensor, whole: nn.Parameter, part: Slice) -> nn.Parameter:
    parameter = nn.Parameter(local, whole.requires_grad)
    parameter.__dict__.update(vars(whole))
    parameter._backward_hooks = whole._backward_hooks
    parameter.slice = part  # type: ignore[attr-defined]
    return parameter


def hook_of(module: nn.Module, hook: Hook) -> Hook:
    """Return a hook that acts for this module alone: a copy of a user's module shares its table of hooks.

    >>> copied = nn.ReLU()
    >>> hook_of(copied, lambda module: "ran")(copied), hook_of(copied, lambda module: "ran")(nn.ReLU())
    ('ran', None)
    """
    return lambda target, *args: hook(target, *args) if target is module else None


def as_it_is(module: nn.Module, hook: Hook) -> Hook:
    """Return a hook for whichever module shares the table of this one."""
    return hook
