"""Hooks of blocks where no rank has all of them: they run on every rank, and must return the same there.

    rank 0   layers.0 ──► (layers.1: received) ──► hooks of layers.1 ──► 2 x the same?
    rank 1   (received) ──► layers.1 ────────────► hooks of layers.1 ──► 3 x

They run everywhere because some keep what they see for the code between blocks. But what a hook counts while it trains
is known where its block is, and nowhere else. Then there is nothing to compare a step with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.engine.unsplit.comparing import off
from drumline.features.check.gradients.sketch import sketch
from drumline.model.hooks import BACKWARD, FORWARD
from drumline.model.values import pack

Sketches = tuple[Tensor | None, ...]
_NEAR = 1e-5  # they run the same code on the same numbers


@contextmanager
def watched_hooks(module: nn.Module, tell: Callable[[str, Sketches], None]) -> Iterator[None]:
    """Tell what a block's hooks make of its output and of the gradients of its inputs, if it has any.

    >>> layer = nn.Identity(); layer.register_forward_hook(lambda module, inputs, output: 2 * output)
    <...>
    >>> with watched_hooks(layer, print):
    ...     output = layer(torch.ones(1))
    its output (tensor([2.]),)
    """
    with ExitStack() as stack:
        if any(vars(module).get(kind) for kind in (*FORWARD, *BACKWARD)):

            def see_output(module: nn.Module, inputs: Any, output: Any) -> None:
                tell("its output", _sketches(pack(output)[0]))

            stack.callback(module.register_forward_hook(see_output).remove)
        if module._is_full_backward_hook and any(vars(module).get(kind) for kind in BACKWARD):

            def see_gradients(module: nn.Module, gradients: Any, outer: Any) -> None:
                tell("its inputs' gradients", _sketches(gradients if isinstance(gradients, tuple) else (gradients,)))

            stack.callback(module.register_full_backward_hook(see_gradients).remove)
        yield


def _sketches(tensors: Sequence[Tensor | None]) -> Sketches:
    return tuple(None if tensor is None else sketch(tensor).cpu() for tensor in tensors)


def are_alike(sketches: Sketches, others: Sketches) -> bool:
    """Whether two ranks' hooks have returned the same.

    >>> are_alike((torch.ones(1), None), (torch.ones(1), None)), are_alike((torch.ones(1),), (torch.zeros(1),))
    (True, False)
    """
    return len(sketches) == len(others) and all(
        mine is other or off(mine, other) <= _NEAR or (_is_none(mine) and _is_none(other))
        for mine, other in zip(sketches, others, strict=True)
    )


def _is_none(sketched: Tensor | None) -> bool:
    """Whether a sketch is of numbers that are none: these are never equal."""
    return sketched is not None and bool(torch.isnan(sketched).any())
