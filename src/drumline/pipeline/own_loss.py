"""Models that compute their loss themselves, as Hugging Face's do when they are given `labels`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.runtime.batch import num_rows
from drumline.runtime.pieces import Inputs

_IGNORED = -100  # the label of a token that does not count


def loss_in(output: Any) -> Tensor | None:
    """Return the loss in a model's output, if it has one.

    >>> import torch
    >>> loss_in({"loss": torch.tensor(2.0), "logits": torch.ones(3)})
    tensor(2.)
    """
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) else None


def own_loss(output: Any, *, needed: bool = True) -> Tensor | None:
    """Return the loss in a model's output; where it is needed and not there, say so."""
    loss = loss_in(output)
    if loss is None and needed:
        raise ModelError(
            f"the model returned a {type(output).__name__} without a loss, and the pipeline has no loss_fn",
            expected="a loss_fn and a target, or an output with a `loss`",
            fix="pass loss_fn= to Pipeline, or labels= to step",
        )
    return loss


class OwnWeight:
    """How much a microbatch counts where the model takes the mean itself: by the labels that it does not ignore."""

    def __init__(self, model: nn.Module) -> None:
        self.shifted = _predicts_next(model)

    def __call__(self, inputs: Inputs) -> float | Tensor:
        """Return the number of labels that count, or of rows if there are no labels."""
        labels = inputs.kwargs.get("labels")
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return num_rows(inputs)
        counted = labels[..., 1:] if self.shifted and labels.dim() > 1 else labels
        return (counted != _IGNORED).sum()


def _predicts_next(model: nn.Module) -> bool:
    """Whether the model's loss compares with the next token, so that the first label never counts."""
    loss = getattr(model, "loss_function", None)
    if getattr(loss, "__name__", "") != "ForCausalLMLoss":
        return False
    try:
        return "self.loss_function(" in inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
