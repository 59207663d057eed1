"""An MLP: linear layers with a ReLU behind all but the last."""

from __future__ import annotations

from itertools import pairwise

from torch import nn


def mlp(num_layers: int, hidden: int, inputs: int, outputs: int) -> nn.Sequential:
    """Return an MLP of `num_layers` linear layers.

    >>> [type(value).__name__ for value in mlp(3, 8, 4, 2)]
    ['Sequential', 'Sequential', 'Linear']
    """
    widths = [inputs, *[hidden] * (num_layers - 1), outputs]
    linear = [nn.Linear(before, after) for before, after in pairwise(widths)]
    return nn.Sequential(*(nn.Sequential(layer, nn.ReLU()) for layer in linear[:-1]), linear[-1])
