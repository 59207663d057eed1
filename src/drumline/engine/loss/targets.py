"""What a target is to a loss: how much torch's own losses count of it, and how many elements it has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.model.loss.counts import labels_counted
from drumline.model.values import pack

_IGNORED = -100  # the label that torch's losses ignore by default


def labels_weight(loss_fn: Any) -> Callable[[Any], Tensor] | None:
    """Return a function that weights a target, if the loss is one of torch's losses over labels (function or module).

    >>> weight = labels_weight(nn.CrossEntropyLoss(ignore_index=0))
    >>> weight(torch.tensor([3, 0, 2]))
    tensor(2)
    """
    arguments: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial):
        if loss_fn.args:
            return None
        arguments = {**loss_fn.keywords, **arguments}
        loss_fn = loss_fn.func
    if type(loss_fn) in (nn.CrossEntropyLoss, nn.NLLLoss):
        arguments = {"ignore_index": loss_fn.ignore_index, "weight": loss_fn.weight, "reduction": loss_fn.reduction}
    elif loss_fn not in (functional.cross_entropy, functional.nll_loss):
        return None
    if arguments.get("reduction", "mean") != "mean":
        return None
    ignored, weight = arguments.get("ignore_index", _IGNORED), arguments.get("weight")

    def counted(target: Any) -> Tensor:
        if not isinstance(target, Tensor) or target.is_floating_point():  # chances of classes: every place counts
            return torch.tensor(target.numel() if isinstance(target, Tensor) else len(target))
        return labels_counted(target, ignored, weight)

    return counted


def uneven(why: str) -> ModelError:
    """Return the error of a loss that cannot be weighed for microbatches of different lengths."""
    return ModelError(
        f"loss_fn {why}",
        expected="a mean over the target's elements or labels, for microbatches of different lengths",
        fix="pass loss_weight=, what a microbatch's target counts",
    )


def size_of(target: Any) -> int:
    """Return how many elements a target has.

    >>> size_of((torch.ones(2, 3), torch.ones(2)))
    6
    """
    return next((tensor.numel() for tensor in pack(target)[0] if tensor.dim()), 1)


def elements_of(target: Any, rows: int) -> int:
    """Return how many elements the rows of a target have; as many as rows if it has no such tensor.

    >>> elements_of((torch.ones(5), torch.ones(2, 3)), 2), elements_of("none", 2)
    (6, 2)
    """
    return next((tensor.numel() for tensor in pack(target)[0] if tensor.dim() and tensor.shape[0] == rows), rows)
