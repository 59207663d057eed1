"""Microbatches that the user cut: one value for each, instead of a tensor that would be cut into equal parts.

    cut by Drumline     x (8, 20)                                 (2, 20) (2, 20) (2, 20) (2, 20)
    cut by the user     Microbatches([a (2, 7), b (3, 20), ...])  (2, 7)  (3, 20) ...

Lengths and numbers of rows may differ. Behind the cut nobody knows of this: a microbatch is a value like any other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from drumline.core.errors import BatchError


class Microbatches(tuple[Any, ...]):
    """One value for each microbatch, instead of a tensor that would be cut: their shapes may differ.

    Pass it to `step` and `eval_step` for any argument and for the target, at any place in tuples and dicts.

    >>> import torch
    >>> import drumline as dl
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))
    >>> def loss_fn(output, target):
    ...     return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), ignore_index=-1)
    >>> pipe = dl.Pipeline(model, loss_fn=loss_fn, num_microbatches=3, num_ranks=2)
    >>> texts = [torch.randint(50, (2, length)) for length in (5, 3, 17)]
    >>> x = dl.Microbatches(text[:, :-1] for text in texts)
    >>> y = dl.Microbatches(text[:, 1:].clone() for text in texts)
    >>> y[0][1, 2:] = -1  # padding
    >>> loss = pipe.step(x, target=y).loss
    >>> logits = torch.cat([model(value).flatten(0, 1) for value in x])
    >>> torch.isclose(loss, loss_fn(logits[None], torch.cat([value.flatten() for value in y])))
    tensor(True)
    """

    __slots__ = ()

    def __new__(cls, values: Iterable[Any]) -> Microbatches:
        """Take one value for each microbatch, in their order."""
        if isinstance(values, Tensor | str | bytes | Mapping) or not isinstance(values, Iterable):
            description = (
                f"a tensor of the shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"{values!r:.60}"
            )
            raise BatchError(
                f"Microbatches got {description}",
                expected="a list with one value for each microbatch",
                fix="pass the tensor itself to have it cut, or Microbatches(tensor.split(num_rows))",
            )
        microbatches = super().__new__(cls, values)
        if not microbatches:
            raise BatchError("Microbatches got no values", expected="one for each microbatch")
        return microbatches

    def __repr__(self) -> str:
        return f"Microbatches({list(self)!r})"
