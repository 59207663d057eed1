"""A call for every work, on random numbers: what the plain model's step would launch for it."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.plan.calibrated.step_tape import UNALIGNED, Work
from drumline.profile.calibrate.plain_model import normalised

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "tf32": torch.float32}
_ATEN = torch.ops.aten
_ROW = 64  # numbers of a row, where single numbers have to be in rows
_TENSORS = 4  # that an optimizer updates
_KERNELS_OF_MUON = 24  # three products in each of five rounds, and what is around them


class CallOfWork(NamedTuple):
    """A call, the work whose seconds it contains besides, and about how many kernels it launches."""

    call: Callable[[], Any]
    besides: Work | None = None
    kernels: int = 1


def call_of(work: Work, device: torch.device) -> CallOfWork:
    """Return what runs a work.

    >>> call_of(Work("product", "fp32", (2, 3, 4)), torch.device("cpu")).call().shape
    torch.Size([2, 3])
    """
    make = _MAKERS.get(work.kind) or _MAKERS[work.kind.partition("-")[0]]
    return make(_Maker(work, device))


@contextmanager
def precise(dtype: str) -> Any:
    """Multiply float32 numbers in fewer bits, inside, for tf32 alone."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class _Maker:
    """Makes the tensors of a work."""

    def __init__(self, work: Work, device: torch.device) -> None:
        self.work, self.shape, self.device = work, work.shape, device
        self.dtype = DTYPES.get(work.dtype, torch.bfloat16)

    def random(self, *sizes: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(sizes, device=self.device, dtype=dtype or self.dtype)

    def numbers(self, most: int, count: int) -> Tensor:
        return torch.randint(most, (count,), device=self.device)

    def rows(self, width: int = _ROW) -> Tensor:
        """Return the numbers of the work in rows."""
        count = self.shape[0]
        return self.random(max(count // width, 1), min(width, count))


def _product(maker: _Maker) -> CallOfWork:
    rows, columns, depth = maker.shape
    if maker.work.dtype == "fp8":
        return _product_fp8(maker)
    kind = maker.work.kind.removesuffix(UNALIGNED)
    if kind == "product":
        left, right = maker.random(rows, depth), maker.random(columns, depth).t()
    elif kind == "product-input":
        left, right = maker.random(rows, depth), maker.random(depth, columns)
    else:
        left, right = maker.random(depth, rows).t(), maker.random(depth, columns)
    return CallOfWork(lambda: torch.mm(left, right))


def _product_fp8(maker: _Maker) -> CallOfWork:
    rows, columns, depth = maker.shape
    left = maker.random(rows, depth).to(torch.float8_e4m3fn)
    right = maker.random(columns, depth).to(torch.float8_e4m3fn).t()
    scale = torch.ones((), device=maker.device)
    return CallOfWork(lambda: torch._scaled_mm(left, right, scale, scale, out_dtype=torch.bfloat16))


def _attention(maker: _Maker) -> CallOfWork:
    rows, length, heads, keys, width = maker.shape
    inputs = [maker.random(rows, length, count, width).transpose(1, 2) for count in (heads, keys, keys)]
    queries, others, values = inputs

    def forward() -> Tensor:
        return functional.scaled_dot_product_attention(
            queries, others, values, is_causal=True, enable_gqa=keys < heads
        )  # fmt: skip

    if maker.work.kind == "attention":
        return CallOfWork(forward)
    for tensor in inputs:
        tensor.requires_grad_()
    towards = maker.random(rows, length, heads, width).transpose(1, 2)
    besides = maker.work._replace(kind="attention")
    return CallOfWork(lambda: torch.autograd.grad(forward(), inputs, towards), besides)


def _norm(maker: _Maker) -> CallOfWork:
    rows, width = maker.shape
    hidden, weight = maker.random(rows, width), maker.random(width)
    if maker.work.kind == "norm":
        return CallOfWork(lambda: normalised(hidden, weight))
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    towards = maker.random(rows, width)
    besides = maker.work._replace(kind="norm")
    return CallOfWork(lambda: torch.autograd.grad(normalised(hidden, weight), inputs, towards), besides)


def _softmax(maker: _Maker) -> CallOfWork:
    logits = maker.random(*maker.shape)
    if maker.work.kind == "softmax":
        return CallOfWork(lambda: functional.log_softmax(logits, -1))
    shares, towards = functional.log_softmax(logits, -1), maker.random(*maker.shape)
    return CallOfWork(lambda: _ATEN._log_softmax_backward_data(towards, shares, -1, shares.dtype))


def _nll(maker: _Maker) -> CallOfWork:
    rows, words = maker.shape
    shares, target = maker.random(rows, words), maker.numbers(words, rows)
    if maker.work.kind == "nll":
        return CallOfWork(lambda: functional.nll_loss(shares, target))
    seed, weight = maker.random(), maker.random()
    return CallOfWork(lambda: _ATEN.nll_loss_backward(seed, shares, target, None, 1, -100, weight))


def _embedding(maker: _Maker) -> CallOfWork:
    tokens, width, words = maker.shape
    places = maker.numbers(words, tokens)
    if maker.work.kind == "embedding":
        table = maker.random(words, width)
        return CallOfWork(lambda: functional.embedding(places, table))
    towards = maker.random(tokens, width)
    return CallOfWork(lambda: _ATEN.embedding_dense_backward(towards, places, words, -1, False))


def _adamw(maker: _Maker) -> CallOfWork:
    kind = maker.work.kind.partition("-")[2] or "fused"
    count = 1 if kind == "loop" else _TENSORS
    parameters = [_parameter(maker, math.ceil(maker.shape[0] / count)) for _ in range(count)]
    how: dict[str, Any] = {"fused": True} if kind == "fused" else {"foreach": kind == "foreach"}
    optimizer = torch.optim.AdamW(parameters, capturable=kind == "fused" and maker.device.type != "cpu", **how)
    return CallOfWork(optimizer.step)


def _muon(maker: _Maker) -> CallOfWork:
    return CallOfWork(torch.optim.Muon([_parameter(maker, *maker.shape)]).step, kernels=_KERNELS_OF_MUON)


def _parameter(maker: _Maker, *sizes: int) -> nn.Parameter:
    parameter = nn.Parameter(maker.random(*sizes))
    parameter.grad = maker.random(*sizes)
    return parameter


def _single(how: Callable[[Tensor, Tensor], Any]) -> Callable[[_Maker], CallOfWork]:
    def make(maker: _Maker) -> CallOfWork:
        left, right = maker.rows(), maker.rows()
        return CallOfWork(lambda: how(left, right))

    return make


def _scale(maker: _Maker) -> CallOfWork:
    heads, cosines = maker.rows(), maker.random(_ROW)
    return CallOfWork(lambda: heads * cosines)


def _neg(maker: _Maker) -> CallOfWork:
    halves = maker.rows(2 * _ROW).repeat(2, 1)[:, _ROW:]
    return CallOfWork(lambda: -halves)


def _cat(maker: _Maker) -> CallOfWork:
    heads = maker.rows()
    left, right = heads[:, _ROW // 2 :], heads[:, : _ROW // 2]
    return CallOfWork(lambda: torch.cat((left, right), -1))


def _copy(maker: _Maker) -> CallOfWork:
    by_head = maker.random(8, max(maker.shape[0] // 8 // _ROW, 1), _ROW).transpose(0, 1)
    return CallOfWork(lambda: by_head.clone(memory_format=torch.contiguous_format))


def _fill(maker: _Maker) -> CallOfWork:
    return CallOfWork(lambda: torch.zeros(maker.shape[0], device=maker.device, dtype=maker.dtype))


def _repeat(maker: _Maker) -> CallOfWork:
    if maker.work.kind == "repeat-backward":
        wide = maker.random(2, 4, max(maker.shape[0] // 8 // _ROW, 1), _ROW)
        return CallOfWork(lambda: wide.sum(1))
    heads = maker.random(2, 1, max(maker.shape[0] // 8 // _ROW, 1), _ROW).expand(-1, 4, -1, -1)
    return CallOfWork(lambda: heads.clone(memory_format=torch.contiguous_format))


def _cast(maker: _Maker) -> CallOfWork:
    to, source = torch.float32, maker.random(maker.shape[0])
    if maker.work.kind == "cast-down":
        to, source = maker.dtype, source.float()
    return CallOfWork(lambda: source.to(to))


_MAKERS: dict[str, Callable[[_Maker], CallOfWork]] = {
    "product": _product,
    "attention": _attention,
    "norm": _norm,
    "softmax": _softmax,
    "nll": _nll,
    "embedding": _embedding,
    "adamw": _adamw,
    "muon": _muon,
    "add": _single(lambda left, right: left + right),
    "mul": _single(lambda left, right: left * right),
    "silu": _single(lambda left, right: functional.silu(left)),
    "silu-backward": _single(_ATEN.silu_backward),
    "exp": _single(lambda left, right: left.exp()),
    "times": _single(lambda left, right: left * 0.5),
    "scale": _scale,
    "neg": _neg,
    "cat": _cat,
    "copy": _copy,
    "fill": _fill,
    "repeat": _repeat,
    "cast": _cast,
}
