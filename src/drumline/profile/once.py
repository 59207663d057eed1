"""Compute a large product or cast once for each shape: what memory a block takes does not depend on its values.

    mm of (1024, 5120) and (5120, 13824)     the first time: computed, and timed
                                             later: a result of the same form, and the time is owed

Results stand in with the shape, strides and memory of the first. Small ones have its values, so that a router spreads
tokens as before; large ones are zero, in pages that take no memory until they are written. Only on a host: there an
operation's memory is what it returns.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.flop_counter import flop_registry

from drumline.runtime.draft import Clock

_ATEN: Any = torch.ops.aten
_ATTENTION = (
    _ATEN._scaled_dot_product_flash_attention_for_cpu, _ATEN._scaled_dot_product_flash_attention_for_cpu_backward,
)  # fmt: skip
_CASTS = (_ATEN._to_copy,)  # of weights, once for each microbatch
_NEVER = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded)
_FLOPS = 2**28  # of a product that is large: some milliseconds
_ELEMENTS = 2**20  # of an operation of a library of quantised weights
_TABLE = 2**24  # of an embedding whose rows are drawn, because its stand-in was never written; of a cast that is large
_DEVIATION = 0.02


@dataclass(frozen=True, slots=True)
class _Result:
    """What an operation returned the first time."""

    nanoseconds: int
    leaves: tuple[Any, ...]  # small tensors, or the forms of large ones
    spec: Any

    def again(self) -> Any:
        leaves = [each.tensor() if isinstance(each, _Form) else each.clone() for each in self.leaves]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a tensor."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    num_bytes: int

    def tensor(self) -> Tensor:
        pages = torch.frombuffer(
            mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANON), dtype=torch.uint8
        )
        return torch.empty(0, dtype=self.dtype).set_(pages.untyped_storage(), self.offset, self.size, self.stride)


class Once(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, large products are computed once for each shape; `owed_ns` is the time of those left out.

    >>> a = torch.ones(1024, 1024)
    >>> with Once() as once:
    ...     first, second = a @ a, a @ a
    >>> once.owed_ns > 0, second.shape == first.shape, once.is_used
    (True, True, True)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owed_ns = 0
        self.is_used = False  # whether anything was large
        self._results: dict[Hashable, _Result] = {}
        self._generator = torch.Generator().manual_seed(0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its own operations come here
        kwargs = kwargs or {}
        if any(issubclass(kind, FakeTensor) for kind in types):
            return func(*args, **kwargs)  # the model is being traced
        key = _key(func, args, kwargs) if _may_repeat(func) else None
        if key is not None and (known := self._results.get(key)) is not None:
            self.owed_ns += known.nanoseconds
            return known.again()
        begun = time.perf_counter_ns()
        result = func(*args, **kwargs)
        nanoseconds = time.perf_counter_ns() - begun
        if key is not None and _is_large(func, args, kwargs, result):
            self._keep(key, result, nanoseconds)
        elif func is _ATEN.embedding.default and args[0].numel() >= _TABLE:
            self.is_used = True
            result = result.normal_(0.0, _DEVIATION, generator=self._generator)
        return result

    def _keep(self, key: Hashable, result: Any, nanoseconds: int) -> None:
        leaves, spec = tree_flatten(result)
        if all(isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.is_cpu for leaf in leaves):
            self.is_used = True
            self._results[key] = _Result(nanoseconds, tuple(map(_stored, leaves)), spec)


class OwedClock(Clock):
    """The host's time, and what is owed for products that were left out."""

    def __init__(self, once: Once) -> None:
        self._once = once

    def mark(self) -> int:
        """Mark the present moment."""
        return self.now() + self._once.owed_ns


def _stored(tensor: Tensor) -> Any:
    storage = tensor.untyped_storage()
    if tensor.numel() <= _ELEMENTS and storage.nbytes() == tensor.nbytes:
        return tensor.clone()
    return _Form(
        tensor.dtype,
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        max(int(storage.nbytes()), 1),
    )


def _may_repeat(func: Any) -> bool:
    """Whether an operation is a product, a cast, or a library's own, and only returns something new."""
    packet = func._overloadpacket
    if func.namespace == "aten" and packet not in flop_registry and packet not in _ATTENTION + _CASTS:
        return False
    schema = func._schema
    if schema.is_mutable or any(tag in func.tags for tag in _NEVER):
        return False
    return all(returned.alias_info is None for returned in schema.returns)


def _is_large(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    tensors = list(_tensors(args, kwargs))
    if (count := flop_registry.get(func._overloadpacket)) is not None:
        return int(count(*args, **kwargs, out_val=result)) >= _FLOPS
    if func._overloadpacket in _CASTS:
        return bool(result.numel() >= _TABLE)
    if func._overloadpacket in _ATTENTION:
        *_, length, width = tensors[0].shape
        return prod(tensors[0].shape[:-2]) * length * length * width * 4 >= _FLOPS
    return any(tensor.numel() >= _ELEMENTS for tensor in tensors)


def _key(func: Any, args: Any, kwargs: Any) -> Hashable:
    leaves, spec = tree_flatten((args, kwargs))
    return func, str(spec), tuple(
        (leaf.shape, leaf.stride(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
    )  # fmt: skip


def _tensors(*values: Any) -> Iterator[Tensor]:
    yield from (leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor))
