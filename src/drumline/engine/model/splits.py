"""How to split a batch's arguments into microbatches: as the user says, and as the model implies.

::

    input_ids       (rows, length)       along the rows, which is the default
    position_ids    (3, rows, length)    along dimension 1: three kinds of positions, for text and pictures
    pixel_values    (patches, numbers)   packed: each row owns the patches of its pictures
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import UsageError
from drumline.model.block import Model
from drumline.runtime.batch import Split


def check(split: Any) -> None:
    """Refuse a split that does not say how to split arguments.

    >>> check({"position_ids": "rows"})
    Traceback (most recent call last):
    drumline.core.errors.UsageError: split is 'rows' for 'position_ids'; expected a dimension, None, or a function
    """
    if split is None:
        return
    if not isinstance(split, Mapping):
        raise UsageError(f"split is {split!r:.80}", expected="a dict: how to split each argument, by name or position")
    for name, how in split.items():
        if isinstance(name, bool) or not isinstance(name, str | int):
            raise UsageError(f"split names {name!r}", expected="an argument's name or position")
        if isinstance(how, bool) or not (how is None or isinstance(how, int) or callable(how)):
            raise UsageError(f"split is {how!r} for {name!r}", expected="a dimension, None, or a function")


def found_split(model: Model, said: Split | None) -> Callable[[Any], Split | None]:
    """Return a function that says how to split a batch: as the user says, else as the model's layout implies."""
    config = getattr(model, "config", None)

    def of(batch: Any) -> Split | None:
        kwargs = getattr(batch, "kwargs", None)
        if not isinstance(kwargs, Mapping) or not kwargs:
            return said
        split = {**_positions(kwargs), **_pictures(kwargs, config), **(said or {})}
        return split or None

    return of


def _positions(arguments: Mapping[str, Any]) -> Split:
    """Split positions of several kinds along dimension 1, which holds their rows."""
    ids, positions = arguments.get("input_ids"), arguments.get("position_ids")
    if not isinstance(ids, Tensor) or not isinstance(positions, Tensor) or positions.dim() != 3:
        return {}
    return {"position_ids": 1} if positions.shape[1:] == ids.shape and positions.shape[0] in (3, 4) else {}


_PACKED = (
    ("pixel_values", "image_grid_thw", "image_token_id"),
    ("pixel_values_videos", "video_grid_thw", "video_token_id"),
)


def _pictures(arguments: Mapping[str, Any], config: Any) -> Split:
    """Assign packed picture patches to the rows whose text has placeholders for them."""
    split: dict[str | int, Any] = {}
    for pixels, grid, token in _PACKED:
        sizes, ids, place = arguments.get(grid), arguments.get("input_ids"), getattr(config, token, None)
        if not isinstance(sizes, Tensor) or not isinstance(ids, Tensor) or place is None or ids.dim() != 2:
            continue
        merged = getattr(getattr(config, "vision_config", None), "spatial_merge_size", 1) ** 2
        patches = sizes.prod(-1)
        owners = _owners(patches // merged, (ids == place).sum(-1))
        if owners is None:
            continue
        rows = len(ids)
        split[grid] = _counter(torch.bincount(owners, minlength=rows))
        split[pixels] = _counter(torch.zeros(rows, dtype=torch.long).index_add_(0, owners, patches.cpu()))
    return split


def _counter(counts: Tensor) -> Callable[[Any], Tensor]:
    return lambda arguments: counts


def _owners(tokens: Tensor, places: Tensor) -> Tensor | None:
    """Return the row of each picture: pictures fill the rows' placeholders in order; None if they do not fit.

    >>> _owners(torch.tensor([4, 2, 2]), torch.tensor([4, 0, 4]))
    tensor([0, 2, 2])
    """
    row, left, rows = -1, 0, []
    room = places.tolist()
    for count in tokens.tolist():
        while left == 0 and row + 1 < len(room):
            row += 1
            left = room[row]
        if count > left:
            return None
        left -= count
        rows.append(row)
    return torch.tensor(rows) if left == 0 and not any(room[row + 1 :]) else None
