"""Models that compute their loss themselves, as Hugging Face's do when they are given `labels`."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from drumline.core.errors import BatchError, ModelError
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
        self.place = _place_of_labels(model)

    def __call__(self, inputs: Inputs) -> float | Tensor:
        """Return the number of labels that count, or of rows if there are no labels."""
        if inputs.kwargs.get("num_items_in_batch") is not None:
            raise BatchError(
                "step got num_items_in_batch, by which the model would divide its loss",
                expected="a mean over each microbatch, which counts by its labels",
                fix="leave it out: the loss is the mean over the labels of the whole batch",
            )
        labels = inputs.kwargs.get("labels")
        if labels is None and self.place is not None and len(inputs.args) > self.place:
            labels = inputs.args[self.place]
        if not isinstance(labels, Tensor) or labels.is_floating_point():
            return num_rows(inputs)
        counted = labels[..., 1:] if self.shifted and labels.dim() > 1 else labels
        return (counted != _IGNORED).sum()


def _place_of_labels(model: nn.Module) -> int | None:
    """Return at which place among a model's arguments its labels stand, if it takes some in order."""
    try:
        given = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    names = [one.name for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    return names.index("labels") if "labels" in names else None


def _predicts_next(model: nn.Module) -> bool:
    """Whether the model's loss compares with the next token, so that the first label never counts."""
    loss = getattr(model, "loss_function", None)
    if getattr(loss, "__name__", "") != "ForCausalLMLoss":
        return False
    try:
        return "self.loss_function(" in inspect.getsource(type(model).forward)
    except (OSError, TypeError):
        return False
