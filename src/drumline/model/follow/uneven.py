"""Rows that a mask picks between blocks: how many they are depends on values, and differs between microbatches.

    active = logits[mask]                 traced as if the mask picked all of them
    loss = cross_entropy(active, ...)     right for any number of rows
    active.shape[0]                       refused: a trace would keep the number of one microbatch

The code that is written of a trace calls the same functions on real tensors. So it is right as long as Python never
sees how many rows there are, and no cut parts them from where they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn import functional

from drumline.model.values import MISSING, tensors_in

PACKS = ("_pack_padded_sequence", "_pad_packed_sequence")
# What Python may ask of rows whose number it must not know.
_HARMLESS = frozenset(
    {
        "dtype", "device", "layout", "requires_grad", "is_leaf", "grad_fn", "is_floating_point", "is_complex", "dim",
        "ndim", "ndimension", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_meta", "_version", "output_nr",
        "retain_grad", "__hash__", "is_nested", "is_inference", "names", "grad", "is_contiguous",
    }
)  # fmt: skip
# The number of their results, or of their dimensions, depends on the number of rows.
_COUNTING = frozenset(
    {
        "unbind",
        "split",
        "chunk",
        "tensor_split",
        "split_with_sizes",
        "__iter__",
        "squeeze",
        "vsplit",
        "dsplit",
        "hsplit",
    }
)


def is_of_values(error: Exception) -> bool:
    """Whether a function failed because stand-ins have no values."""
    kind = type(error).__name__
    return "DataDependent" in kind or "DynamicOutputShape" in kind


def counts_rows(name: str, result: Any) -> bool:
    """Whether a call tells Python how many rows there are."""
    return name in _COUNTING or (name not in _HARMLESS and result is not None and not tensors_in(result))


def picked(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """Return what a function makes whose result's shape depends on values, and whether that shape is only assumed.

    MISSING if nothing is known of it.
    """
    if name == "masked_select" and len(args) == 2 and not kwargs:
        tensor, mask = torch.broadcast_tensors(*args)  # type: ignore[no-untyped-call]
        return _indexed(tensor, mask)
    if name == "__getitem__":
        return _indexed(*args)
    if name in ("nonzero", "argwhere") and len(args) == 1 and not any(kwargs.values()):
        return args[0].new_empty((args[0].numel(), args[0].dim()), dtype=torch.long), True
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    if name == "bincount" and least and "weights" not in kwargs and (len(args) < 2 or args[1] is None):
        return args[0].new_empty((least,), dtype=torch.long), True
    if func is functional.ctc_loss and len(args) >= 4:
        reduction = kwargs.get("reduction", args[5] if len(args) > 5 else "mean")
        shape = args[3].shape if reduction == "none" else ()
        return args[0].new_zeros(shape) + 0 * args[0].sum(), False
    numbers = [tensor for tensor in tensors_in((args, kwargs)) if not tensor.is_floating_point()]
    if name in PACKS and numbers and not any(isinstance(tensor, FakeTensor) for tensor in numbers):
        return _packed(func, args, kwargs), False
    return MISSING, False


def _indexed(tensor: Tensor, index: Any) -> tuple[Any, bool]:
    """Return the rows that masks pick: those that they really pick if they are known, else all."""
    parts: list[Any] = []
    assumed = False
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, Tensor) and part.dtype is torch.bool:
            fake = isinstance(part, FakeTensor)
            assumed |= fake
            with unset_fake_temporarily():
                mask = torch.ones(tuple(part.shape), dtype=torch.bool, device=part.device) if fake else part
                parts += mask.nonzero(as_tuple=True)
        else:
            parts.append(part)
    return tensor[tuple(parts)], assumed


def _packed(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run a function of torch's packed sequences on zeros, whose lengths are known; what it counts is real."""
    arguments = {id(tensor): tensor for tensor in tensors_in((args, kwargs))}
    with unset_fake_temporarily():
        real = {
            at: torch.zeros(tuple(tensor.shape), dtype=tensor.dtype) if isinstance(tensor, FakeTensor) else tensor.cpu()
            for at, tensor in arguments.items()
        }
        data, numbers = func(*(real.get(id(arg), arg) for arg in args), **kwargs)
        shape = tuple(data.shape)
    first = next(tensor for tensor in arguments.values() if tensor.is_floating_point())
    return first.new_empty(shape) + 0 * first.sum(), numbers
