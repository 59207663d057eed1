"""Errors of forwards that saw parts of features: what tp has to do with them.

How a forward cuts features into heads cannot be seen beforehand: few modules tell their numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

from drumline.core.errors import ModelError
from drumline.features.mesh.tensor.divide import Divided


def refusal(behind: Divided, makers: Iterable[Divided], size: int, error: Exception) -> ModelError:
    """Return what to raise for an error of a forward behind a layer that makes parts, one of several in its module.

    >>> from torch import nn
    >>> from drumline.model.layers.styles import Colwise
    >>> key = Divided("attention.key", nn.Linear(8, 2), Colwise(), nn.Module())
    >>> print(refusal(key, [key], 2, RuntimeError("no heads of 4 in 2")))
    the forward of attention (Module) fails with the features that tp = 2 leaves each line, attention.key 2 of 4: ...
    """
    told = []
    for one in (one for one in makers if one.parent is behind.parent):
        key = min(one.slices, key="weight".__ne__)
        length = one.module.get_parameter(key).shape[one.slices[key].dim]
        told.append(f"{one.name} {length} of {length * size}")
    said = str(error).partition("\n")[0]
    return ModelError(
        f"the forward of {behind.name.rpartition('.')[0] or behind.name} ({type(behind.parent).__name__}) fails with "
        f"the features that tp = {size} leaves each line, {', '.join(told)}: {type(error).__name__}: {said}",
        expected="a forward that takes any number of whole heads, and numbers of heads, of keys and values too, "
        f"that are multiples of {size}",
        fix="choose a tp that divides them, or divide the model along another axis of the mesh",
    )
