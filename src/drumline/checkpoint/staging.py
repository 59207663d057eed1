"""Tensors copied aside in one stretch of memory, laid out as the file will be, and written from there.

    │ 8 bytes: n │ n bytes of JSON: name → type, shape, from, to │ bytes of all tensors, one after the other │

The memory is kept from one checkpoint to the next: new memory costs several times as much as the copy itself.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from drumline.model.weights.files import TYPES

_SIZE = struct.Struct("<Q")
_NAMES = {dtype: name for name, dtype in TYPES.items()}


class StagedFile:
    """Room for a set of tensors of given types and shapes.

    >>> import tempfile
    >>> from drumline.model.weights.files import Weights
    >>> staged, path = StagedFile(), Path(tempfile.mkdtemp()) / "one.safetensors"
    >>> staged.take({"a": torch.arange(3.0), "b": torch.tensor(True)})
    >>> sorted(staged.write(path)) == ["a", "b"], Weights(path).tensors["a"].read()
    (True, tensor([0., 1., 2.]))
    """

    def __init__(self) -> None:
        self._layout: dict[str, tuple[torch.dtype, tuple[int, ...]]] | None = None  # a file without tensors has one too
        self._header = b""
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._places: dict[str, Tensor] = {}
        self._bytes: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy tensors aside; waits for what the device still computes on them."""
        layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        if layout != self._layout:
            self._lay_out(layout)
        by_kind: dict[tuple[torch.device, torch.dtype], list[tuple[Tensor, Tensor]]] = {}
        for name, tensor in tensors.items():
            by_kind.setdefault((tensor.device, tensor.dtype), []).append((self._places[name], tensor))
        for pairs in by_kind.values():
            torch._foreach_copy_([to for to, _ in pairs], [tensor for _, tensor in pairs])

    def _lay_out(self, layout: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        # The widest types first, so that each tensor begins at a multiple of its elements' size.
        entries, places, at = {}, {}, 0
        for name in sorted(layout, key=lambda word: (-layout[word][0].itemsize, word)):
            dtype, shape = layout[name]
            size = dtype.itemsize * torch.Size(shape).numel()
            entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [at, at + size]}
            places[name] = (at, size, dtype, shape)
            at += size
        text = json.dumps(entries).encode()
        text += b" " * (-len(text) % 8)
        self._header = _SIZE.pack(len(text)) + text
        if self._memory.numel() != at:
            self._memory = torch.zeros(at, dtype=torch.uint8)  # zeros, so that the memory is there before it is needed
        self._bytes = {name: self._memory[start : start + size] for name, (start, size, _, _) in places.items()}
        self._places = {
            name: self._bytes[name].view(dtype).view(shape) for name, (_, _, dtype, shape) in places.items()
        }
        self._layout = layout

    @property
    def num_bytes(self) -> int:
        """How large the file will be."""
        return len(self._header) + self._memory.numel()

    def write(self, path: Path) -> dict[str, int]:
        """Write the file so that it outlives a power failure, and return every tensor's checksum."""
        with path.open("wb", buffering=0) as file:
            for part in (memoryview(self._header), self._memory.numpy().data.cast("B")):
                while part.nbytes:
                    part = part[file.write(part) :]
            os.fsync(file.fileno())
        return {name: zlib.crc32(tensor.numpy().data) for name, tensor in self._bytes.items()}


def checksum(tensor: Tensor) -> int:
    """Return the checksum of a tensor on the host.

    >>> checksum(torch.zeros(2)) == zlib.crc32(bytes(8))
    True
    """
    flat = tensor.detach().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data) if flat.numel() else 0
