"""A file of tensors written one after the other, so that no more than one of them is in memory.

::

    │ 8 bytes: n │ n bytes of JSON: name → type, shape, from, to │ bytes of all tensors, one after the other │
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from drumline.model.weights.files import TYPES

_SIZE = struct.Struct("<Q")
_NAMES = {dtype: name for name, dtype in TYPES.items()}
Layout = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def write_tensors(path: Path, layout: Layout, read: Callable[[str], Tensor]) -> int:
    """Write tensors of these types and shapes, each as `read` returns it; returns how many bytes they take.

    >>> import tempfile
    >>> from drumline.model.weights.files import Weights
    >>> path = Path(tempfile.mkdtemp()) / "one.safetensors"
    >>> write_tensors(path, {"a": (torch.float32, (2,))}, lambda name: torch.ones(2))
    8
    >>> Weights(path).tensors["a"].read()
    tensor([1., 1.])
    """
    entries, at = {}, 0
    order = sorted(layout, key=lambda name: (-layout[name][0].itemsize, name))  # each begins at a multiple of its size
    for name in order:
        dtype, shape = layout[name]
        size = dtype.itemsize * torch.Size(shape).numel()
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(_SIZE.pack(len(header)) + header)
        for name in order:
            dtype, shape = layout[name]
            tensor = read(name).detach().to("cpu", dtype).contiguous()
            assert tuple(tensor.shape) == tuple(shape), f"{name} has the shape that was announced"
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return at
