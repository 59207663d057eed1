"""Sketches: few numbers that stand for a tensor, to tell whether two tensors are the same up to rounding.

    elements   e0 e1 ... e191 | e192 ... e383 | ... | fewer than 192
    sketch     w0 e0 + ...    | w0 e192 + ... | ... | as they are

Every group is summed with the same random weights, in one pass over the tensor. Sketches add up as their tensors do,
and the norm of a sketch is about the tensor's. No weight is near 0, so that one wrong element always shows; several
wrong elements of one group cancel only by chance, and those of different groups never do.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

GROUP = 192  # no power of two, so that groups are not the rows of most matrices
_SMALL = 16 * GROUP  # up to here a tensor is its own sketch
_COLUMNS = 1021  # a prime, so that columns of no matrix fall together
_FEW = 4


def sketch(tensor: Tensor) -> Tensor:
    """Return a tensor's sketch, on its device.

    >>> value, other = torch.ones(3, 2000), torch.arange(6000.0).view(3, 2000)
    >>> sketch(value).shape, torch.allclose(sketch(value) + sketch(other), sketch(value + other))
    (torch.Size([79]), True)
    """
    flat = tensor.detach()
    if flat.layout is not torch.strided:
        flat = flat.to_dense()
    if flat.is_complex():
        flat = torch.view_as_real(flat.resolve_conj())
    flat = flat.reshape(-1)
    if flat.dtype.itemsize < 4:
        flat = flat.float()
    size = flat.numel()
    if size <= _SMALL:
        return flat.clone()
    rest = size % GROUP
    with torch._C._DisableAutocast(), _whole_products():
        sums = flat[: size - rest].view(-1, GROUP).mv(_weights(flat.dtype, flat.device))
    return torch.cat((sums, flat[size - rest :])) if rest else sums


@contextmanager
def _whole_products() -> Iterator[None]:
    """Let products on processors keep all bits, whatever `torch.set_float32_matmul_precision` allows there."""
    backends: Any = torch.backends
    settings = backends.mkldnn.matmul
    allowed = settings.fp32_precision
    if allowed in ("none", "ieee"):
        yield
        return
    settings.fp32_precision = "ieee"
    try:
        yield
    finally:
        settings.fp32_precision = allowed


@cache
def _weights(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the random weights, whose squares are 1 on average."""
    drawn = random.Random(0)
    sizes = [drawn.choice((-1, 1)) * drawn.uniform(0.5, 1.5) for _ in range(GROUP)]
    mean = sum(size * size for size in sizes) / GROUP
    return torch.tensor([size / mean**0.5 for size in sizes], dtype=dtype, device=device)


def few(sketched: Tensor) -> list[float]:
    """Return a few numbers that stand for a sketch where each rank has part of a sum; they add up as sketches do.

    Each is a product with a random vector, so it is off by about the norm of what the tensor is off by.

    >>> value, other = torch.ones(3000), torch.arange(3000.0)
    >>> both = [a + b for a, b in zip(few(value), few(other), strict=True)]
    >>> all(abs(a - b) < 1e-6 for a, b in zip(both, few(value + other), strict=True))
    True
    """
    flat = sketched.to("cpu", torch.float64)
    rows = -(-flat.numel() // _COLUMNS)
    padded = torch.nn.functional.pad(flat, (0, rows * _COLUMNS - flat.numel())).view(rows, _COLUMNS)
    return [float(value) for value in ((padded @ _numbers(_COLUMNS, 0)) * _numbers(rows, 1)).sum(0)]


@cache
def _numbers(rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, _FEW, generator=generator, dtype=torch.float64)


def norms(tensors: Sequence[Tensor]) -> list[float]:
    """Return the norms of tensors of one device, which is waited for once.

    >>> norms([torch.tensor([3.0, 4.0]), torch.zeros(2, dtype=torch.float64)])
    [5.0, 0.0]
    """
    if not tensors:
        return []
    norms_there = torch._foreach_norm(list(tensors), 2, dtype=torch.float64)
    return [float(norm) for norm in torch.stack(norms_there).tolist()]


def distances(sketches: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """Return how far sketches are apart, pair by pair; those of different shapes are infinitely far.

    >>> distances([torch.ones(4), torch.ones(2)], [torch.zeros(4), torch.zeros(3)])
    [2.0, inf]
    """
    pairs = [(tensor, other) for tensor, other in zip(sketches, wanted, strict=True) if tensor.shape == other.shape]
    lengths = iter(norms([tensor - other.to(tensor.device) for tensor, other in pairs]))
    return [
        next(lengths) if t.shape == other.shape else float("inf") for t, other in zip(sketches, wanted, strict=True)
    ]
