"""Tensors as pickle's own large buffers: not copied into the stream, and two views of one memory stay two views.

torch pickles a tensor as its storage and how it lies in there, and a storage as a file within the pickle, copied three
times over. Only that second half is done otherwise here, and only for the CPU's memory.
"""

from __future__ import annotations

import pickle
from typing import Any

_SMALL_BYTES = 4096


class Storages:
    """The storages of one pickle, each written once."""

    def __init__(self) -> None:
        self._seen: dict[int, Any] = {}

    def reduce(self, storage: Any) -> Any:
        """Return how to make a typed or untyped storage again, or NotImplemented if torch is to do it."""
        import torch

        untyped: Any = getattr(storage, "_untyped_storage", storage)
        if untyped.device.type != "cpu":
            return NotImplemented
        if isinstance(storage, torch.UntypedStorage):
            data: Any = torch.empty(0, dtype=torch.uint8).set_(storage).numpy()
            # A message has a part for each buffer: not worth it for small ones.
            return _untyped, (data.tobytes() if data.nbytes < _SMALL_BYTES else pickle.PickleBuffer(data),)
        if isinstance(storage, torch.storage.TypedStorage):
            return _typed, (self._seen.setdefault(untyped._cdata, untyped), storage.dtype)
        return NotImplemented


def _untyped(data: Any) -> Any:
    import torch

    size = memoryview(data).nbytes
    made = torch.empty(size, dtype=torch.uint8)
    if size:
        made.numpy()[:] = memoryview(data)
    return made.untyped_storage()


def _typed(untyped: Any, dtype: Any) -> Any:
    from torch import storage

    made: Any = storage.TypedStorage
    return made(wrap_storage=untyped, dtype=dtype, _internal=True)
