"""Another batch for every step of `verify`, from the one that a user's function returns.

    step 0   rows 0 1 2 3 4 5 6 7
    step 1   rows 7 0 1 2 3 4 5 6      every microbatch has other rows, of shapes and values that the model takes

What a model keeps of an earlier step, or what was traced of its first inputs, then shows. `Microbatches` trade places.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from drumline.model.microbatches import Microbatches
from drumline.model.values import mapped, pack
from drumline.runtime.user_batch import has_microbatches


def can_turn(*values: Any) -> bool:
    """Whether rows of all values can trade places: each tensor has one for every row of the batch.

    >>> can_turn(torch.ones(4, 2), {"labels": torch.ones(4)}), can_turn(torch.ones(4, 2), torch.ones(3))
    (True, False)
    """
    are_split = {has_microbatches(value) for value in values if value is not None}
    if True in are_split:
        return len(are_split) == 1
    sizes = {tensor.shape[0] if tensor.dim() else 0 for value in values for tensor in pack(value)[0]}
    return len(sizes) == 1 and sizes.pop() > 1


def turned(value: Any, step: int) -> Any:
    """Return a batch or a target as a step gets it.

    >>> turned(torch.arange(4), 1), turned(Microbatches(["a", "b"]), 3)
    (tensor([3, 0, 1, 2]), Microbatches(['b', 'a']))
    """
    if not step or value is None:
        return value
    return _traded(value, step) if has_microbatches(value) else mapped(value, lambda tensor: _rolled(tensor, step))


def _rolled(tensor: Tensor, step: int) -> Tensor:
    rolled: Tensor = torch.roll(tensor, step, 0)
    return rolled


def _traded(value: Any, step: int) -> Any:
    if isinstance(value, Microbatches):
        at = -step % len(value)
        return Microbatches([*value[at:], *value[:at]])
    if isinstance(value, dict):
        return {key: _traded(item, step) for key, item in value.items()}
    if isinstance(value, tuple | list):
        items = [_traded(item, step) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: _traded(getattr(value, field.name), step) for field in fields(value)})
    return value
