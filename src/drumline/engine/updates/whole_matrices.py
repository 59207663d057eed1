"""Whole copies of divided matrices, for optimizers whose update of one element needs the whole matrix, such as Muon.

    gradients of all lines ──gathered──► whole gradient ──► the optimizer steps on the copy ──► each keeps its part

Every line along the axis computes the same update. It costs the memory and time of the undivided matrices.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.slices import cut_out, put_together, slice_of
from drumline.model.precision import LOW

# Optimizers of torch that treat every element alike, so that they can update any part of a parameter.
_BY_ELEMENT = (
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam,
    torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.ASGD, torch.optim.RMSprop, torch.optim.Rprop,
)  # fmt: skip


def by_element(kind: type[Optimizer]) -> bool:
    """Whether an optimizer updates each element by itself; a class that is not torch's own may not.

    >>> by_element(torch.optim.AdamW), by_element(torch.optim.Adafactor)
    (True, False)
    """
    return kind in _BY_ELEMENT


class WholeMatrices:
    """The whole copies of this process's divided parameters; all lines along an axis call its methods alike."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self.precise = False  # whether copies of parameters of low precision are in float32
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._marks: dict[nn.Parameter, tuple[int, int]] = {}

    def cover(self, parameters: Iterable[nn.Parameter]) -> None:
        """Make whole copies of those that are divided."""
        for param in parameters:
            if slice_of(param) is not None and param not in self._copies:
                whole = self._whole(param, param.detach())
                whole = whole.float() if self.precise and whole.dtype in LOW else whole
                self._copies[param] = nn.Parameter(whole, param.requires_grad)
                self._marks[param] = _mark(param)

    def _whole(self, parameter: nn.Parameter, own_tensor: Tensor) -> Tensor:
        return put_together(own_tensor, slice_of(parameter), self._axes)

    def of(self, parameter: nn.Parameter) -> nn.Parameter | None:
        """Return the whole copy of a parameter, None if there is none."""
        return self._copies.get(parameter)

    def drop(self, parameter: nn.Parameter) -> None:
        """Forget a parameter's copy."""
        self._copies.pop(parameter, None)
        self._marks.pop(parameter, None)

    def adopt(self, parameter: nn.Parameter, copy: Tensor) -> None:
        """Take a copy that another rank made and updated."""
        self._copies[parameter] = nn.Parameter(copy, parameter.requires_grad)
        self._marks[parameter] = _mark(parameter)

    @torch.no_grad()
    def take(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before an optimizer steps, give its copies the whole gradients, and values that others changed."""
        held_parameters = [param for param in parameters if param in self._copies]
        self._catch_up(held_parameters)
        for param in held_parameters:
            self._copies[param].grad = None if param.grad is None else self._whole(param, param.grad.detach())

    @torch.no_grad()
    def give(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the optimizer steps, give each parameter its part of the copy."""
        for param in (param for param in parameters if param in self._copies):
            copy = self._copies[param]
            param.copy_(cut_out(copy.detach(), slice_of(param), self._axes))
            copy.grad = None
            self._marks[param] = _mark(param)

    def _catch_up(self, held_parameters: Sequence[nn.Parameter]) -> None:
        """Adopt parameters that other code has changed on any line, such as a loaded state."""
        for axis in dict.fromkeys(part.axis for param in held_parameters if (part := slice_of(param)) is not None):
            along = [param for param in held_parameters if (part := slice_of(param)) is not None and part.axis == axis]
            changed = [float(_mark(param) != self._marks[param]) for param in along]
            every = self._axes.summed(torch.tensor(changed, device=along[0].device), axis).tolist()
            for param, count in zip(along, every, strict=True):
                if count:
                    self._copies[param].copy_(self._whole(param, param.detach()))
                    self._marks[param] = _mark(param)


def _mark(parameter: Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version
