"""A recorder without a device: every operator is written down and done again, on the same memory.

As on a device, what is computed while recording is no result: it is spoiled with NaN, and what it wrote to other
tensors is undone. Unlike there, memory is never used twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from drumline.features.capture.captured_row import Recorder

Call = tuple[Any, Any, Any, Any]


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}  # what was written to, as it was

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default or func is torch.ops.aten.equal.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        written = [arg for info, arg in zip(func._schema.arguments, args, strict=False) if _writes(info)]
        for leaf in tree_leaves(written):
            if leaf.data_ptr() not in self.before:
                self.before[leaf.data_ptr()] = leaf.data, leaf.data.clone()
        made = func(*args, **kwargs)
        given = tree_map_only(Tensor, lambda tensor: tensor.data, (args, kwargs, made))
        self.calls.append((func, *given))
        return made

    def undo(self) -> None:
        for _, args, kwargs, made in self.calls:
            known = {
                leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)
            }
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() not in known:
                    spoil(leaf)
        for place, value in self.before.values():
            place.copy_(value)

    def replay(self) -> None:
        with torch.no_grad():
            for func, args, kwargs, made in self.calls:
                if "empty" in func.__name__:
                    continue
                again = func(*args, **kwargs)
                for place, value in zip(tree_leaves(made), tree_leaves(again), strict=True):
                    if isinstance(place, Tensor) and place.data_ptr() != value.data_ptr():
                        place.copy_(value)


def _writes(info: Any) -> bool:
    return info.alias_info is not None and info.alias_info.is_write


def spoil(tensor: Tensor) -> None:
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))


class HostRecorder(Recorder):
    device_type = "cpu"

    def __init__(self) -> None:
        self.num_captures = 0
        self.num_replays = 0

    @contextmanager
    def aside(self) -> Iterator[None]:
        yield

    def new_pool(self) -> object:
        return object()

    def capture(self, pool: object, run: Callable[[], None]) -> Callable[[], None]:
        assert pool is not None
        recording = Recording()
        with recording:
            run()
        recording.undo()
        self.num_captures += 1

        def replay() -> None:
            self.num_replays += 1
            recording.replay()

        return replay

    def borrowed(self, tensor: Tensor) -> Tensor:
        return tensor.data
