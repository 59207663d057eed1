"""Master weights: float32 copies of low-precision parameters, which the optimizer updates in their place.

A bfloat16 weight cannot take an update much smaller than itself: 1 + 0.001 is 1. So gradients are added up over
microbatches and steps in float32, the optimizer updates float32 copies, and the parameters follow, rounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from drumline.runtime.precision import LOW


class Masters:
    """The float32 copies of this process's low-precision parameters.

    >>> weight = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    >>> masters = Masters(); masters.follow([weight])
    >>> optimizer = torch.optim.SGD([masters.of(weight)], lr=1e-3)
    >>> (weight * 1.0).sum().backward()
    >>> masters.take(); optimizer.step(); masters.give()
    >>> masters.of(weight), weight
    (Parameter containing:
    tensor([0.9990, 0.9990], requires_grad=True), Parameter containing:
    tensor([1., 1.], dtype=torch.bfloat16, requires_grad=True))
    """

    def __init__(self) -> None:
        self._copies: dict[nn.Parameter, nn.Parameter] = {}
        self._seen: dict[nn.Parameter, tuple[int, int]] = {}  # where a parameter was, and at which version

    def follow(self, parameters: Iterable[nn.Parameter]) -> None:
        """Let these parameters' gradients be added up in float32."""
        for one in parameters:
            if one.dtype in LOW and one.requires_grad:
                one.grad_dtype = torch.float32

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the optimizer updates for a parameter: its copy, or itself where it is precise enough."""
        if parameter.dtype not in LOW:
            return parameter
        if parameter not in self._copies:
            self._copies[parameter] = nn.Parameter(parameter.detach().float())
            self._seen[parameter] = _mark(parameter)
        return self._copies[parameter]

    def named(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, Tensor]]:
        """Yield what counts for each of these parameters, under its name."""
        self._catch_up()
        return ((name, self.of(one)) for name, one in parameters)

    def take(self) -> None:
        """Before the optimizer steps: give the copies the gradients, and what others did to the parameters."""
        self._catch_up()
        for parameter, copy in self._copies.items():
            copy.grad = parameter.grad

    @torch.no_grad()
    def give(self) -> None:
        """After the optimizer has stepped: let the parameters follow."""
        if self._copies:
            torch._foreach_copy_(list(self._copies), list(self._copies.values()))
        for parameter, copy in self._copies.items():
            copy.grad = None
            self._seen[parameter] = _mark(parameter)

    @torch.no_grad()
    def _catch_up(self) -> None:
        """Take over parameters that somebody else has changed: a loaded state, an initialisation."""
        for parameter, copy in self._copies.items():
            if _mark(parameter) != self._seen[parameter]:
                copy.copy_(parameter)
                self._seen[parameter] = _mark(parameter)


def _mark(parameter: Tensor) -> tuple[int, int]:
    return parameter.data_ptr(), parameter._version
