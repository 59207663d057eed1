"""Float32 copies of parameters of lower precision, which optimizers update."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from drumline.engine.updates.attached import ParameterCopies
from drumline.model.precision import LOW


class Masters(ParameterCopies):
    """The float32 copies of this process's low-precision parameters, which the optimizer updates in their place.

    A bfloat16 weight cannot take an update much smaller than itself: 1 + 0.001 is 1. So gradients accumulate over
    microbatches and steps in float32, the optimizer updates float32 copies, and the parameters follow, rounded.

    >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> masters = Masters(); masters.follow([weight])
    >>> optimizer = torch.optim.SGD([masters.of(weight)], lr=1e-3)
    >>> (weight * 1.0).sum().backward()
    >>> masters.take([weight]); optimizer.step(); masters.give([weight])
    >>> masters.of(weight), weight
    (Parameter containing:
    tensor([0.9990, 0.9990], requires_grad=True), Parameter containing:
    tensor([1., 1.], dtype=torch.bfloat16, requires_grad=True))
    """

    is_on = True

    def __init__(self) -> None:
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._marks: dict[nn.Parameter, tuple[int, int]] = {}  # a parameter's address and version

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Accumulate the gradients of these parameters in float32."""
        for param in parameters:
            if param.dtype in LOW and param.requires_grad:
                param.grad_dtype = torch.float32

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return the tensor that the optimizer updates for a parameter: its copy, or itself if it is precise enough."""
        if parameter.dtype not in LOW:
            return parameter
        if parameter not in self._copies:
            self._copies[parameter] = nn.Parameter(parameter.detach().float())
            self._marks[parameter] = _mark(parameter)
        return self._copies[parameter]

    def drop(self, parameter: nn.Parameter) -> None:
        """Forget a parameter's copy."""
        self._copies.pop(parameter, None)
        self._marks.pop(parameter, None)

    def adopt(self, parameter: nn.Parameter, copy: Tensor) -> None:
        """Take a copy that another rank made and updated."""
        self._copies[parameter] = nn.Parameter(copy)
        self._marks[parameter] = _mark(parameter)

    def take(self, parameters: Iterable[nn.Parameter]) -> None:
        """Before an optimizer steps, give the copies of its parameters the gradients and any outside changes."""
        self.catch_up()
        for parameter in parameters:
            if parameter in self._copies:
                self._copies[parameter].grad = parameter.grad

    @torch.no_grad()
    def give(self, parameters: Iterable[nn.Parameter]) -> None:
        """After the optimizer steps, copy the results to its parameters."""
        stepped = {param: self._copies[param] for param in parameters if param in self._copies}
        if stepped:
            torch._foreach_copy_(list(stepped), list(stepped.values()))
        for parameter, copy in stepped.items():
            copy.grad = None
            self._marks[parameter] = _mark(parameter)

    def moved(self) -> None:
        """Take note that parameters may have moved to other memory, with the same values."""
        self._marks = {parameter: _mark(parameter) for parameter in self._copies}

    @torch.no_grad()
    def catch_up(self) -> None:
        """Adopt parameters that other code has changed, such as a loaded state or an initialisation."""
        for parameter, copy in self._copies.items():
            if _mark(parameter) != self._marks[parameter]:
                copy.copy_(parameter)
                self._marks[parameter] = _mark(parameter)


def _mark(parameter: Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version
