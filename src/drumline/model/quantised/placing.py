"""Packed weights on devices: moved part by part, because torch would exchange the objects, or forget some parts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from drumline.model.quantised.packed import is_packed, mapped_parts, settle

Slot = tuple[dict[str, nn.Parameter | None], str, Tensor]


def packed_slots(modules: Iterable[nn.Module]) -> list[Slot]:
    """Return where modules hold packed parameters: table, key, tensor."""
    return [
        (module._parameters, key, tensor)
        for module in modules
        for key, tensor in module._parameters.items()
        if tensor is not None and is_packed(tensor)
    ]


def to_device(module: nn.Module, device: torch.device) -> None:
    """Move a module to a device.

    >>> to_device(nn.Linear(1, 1), torch.device("cpu"))
    """
    settle(module.modules())
    slots = packed_slots(module.modules())
    try:
        for table, key, _ in slots:
            table[key] = None
        module.to(device)
    finally:
        _put_back(slots)
    _put(slots, device)
    settle(module.modules())


@contextmanager
def packed_on(device: torch.device, modules: Iterable[nn.Module]) -> Iterator[None]:
    """Have the packed weights of modules on a device inside; afterwards they are where they were."""
    layers = list(modules)
    settle(layers)
    slots = packed_slots(layers)
    _put(slots, device)
    try:
        yield
    finally:
        settle(layers)
        _put_back(slots)
        settle(layers)


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is on a device; one without an index is any of its kind.

    >>> is_on(torch.ones(1), torch.device("cpu"))
    True
    """
    return tensor.device.type == device.type and (device.index is None or tensor.device.index == device.index)


def _put_back(slots: Iterable[Slot]) -> None:
    for table, key, tensor in slots:
        table[key] = tensor  # type: ignore[assignment]


def _put(slots: Iterable[Slot], device: torch.device) -> None:
    moved: dict[int, Tensor] = {}
    for table, key, tensor in slots:
        if not is_on(tensor, device):
            if id(tensor) not in moved:
                moved[id(tensor)] = mapped_parts(tensor, lambda part: part.to(device))
            table[key] = moved[id(tensor)]  # type: ignore[assignment]
