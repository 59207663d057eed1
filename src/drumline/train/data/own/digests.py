"""Digests of batches, to tell whether data that are gone through again give the same ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drumline.train.data.items.fingerprint import digest

_MOST = 16  # blocks of a tensor


def digest_of(batch: Any, *, waits: bool = True) -> str:
    """Return a digest of a batch: of large tensors, of some blocks; objects of other kinds count by their class.

    Without `waits`, of tensors on an accelerator only shape and kind: reading them would wait for the device.

    >>> value = (torch.arange(3), {"target": [1.0, None]})
    >>> digest_of(value) == digest_of((torch.arange(3), {"target": [1.0, None]}))
    True
    >>> digest_of(value) == digest_of((torch.arange(1, 4), {"target": [1.0, None]}))
    False
    """
    checksum = blake2b(digest_size=16)
    for part in _parts(batch, waits, 0):
        checksum.update(part.encode(errors="surrogatepass") + b"\0")
    return checksum.hexdigest()


def joined(before: str, batch: Any) -> str:
    """Return the digest of all batches so far, from that of those before and the next one.

    >>> joined(joined("", 1), 2) == joined(joined("", 1), 3)
    False
    """
    return blake2b(f"{before} {digest_of(batch, waits=False)}".encode(), digest_size=16).hexdigest()


def _parts(value: Any, waits: bool, depth: int) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"tensor {value.dtype} {tuple(value.shape)}"
        if value.layout is torch.strided and (waits or value.device.type == "cpu") and value.device.type != "meta":
            yield _contents(value)
    elif isinstance(value, np.ndarray):
        yield f"array {value.dtype} {value.shape}" if value.dtype.hasobject else digest(value, most=_MOST)
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | np.generic):
        yield f"{type(value).__name__} {value!r}"
    elif depth > 20:
        yield "deep"
    elif isinstance(value, Mapping):
        yield f"dict {len(value)}"
        for name, item in value.items():
            yield f"{name!r}" if isinstance(name, str | int) else type(name).__name__
            yield from _parts(item, waits, depth + 1)
    elif isinstance(value, list | tuple):
        yield f"list {len(value)}"
        for item in value:
            yield from _parts(item, waits, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        yield type(value).__name__
        for field in fields(value):
            yield from _parts(getattr(value, field.name, None), waits, depth + 1)
    else:
        yield type(value).__name__


def _contents(value: Tensor) -> str:
    flat = value.detach().reshape(-1)
    if not flat.numel():
        return ""
    return digest(flat.cpu().contiguous().view(torch.uint8).numpy(), most=_MOST)
