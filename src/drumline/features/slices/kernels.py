"""Causal attention of a slice's queries to all keys up to their own, forward and backward.

Queries are fewer than keys, and see the keys up to their own place. `is_causal` of torch aligns the first query with
the first key, so it is used for square pieces alone, and no mask is made::

    keys       0 1 2 3 4 5 6 7
    query 6    x x x x x x x .        prefix: keys of earlier slices, all visible
    query 7    x x x x x x x x        diagonal: the slice's own keys, causal
               └─ prefix ┘ └ diagonal

The two are merged by their log-sum-exp. A backward gets the merged output and log-sum-exp, so each piece finds its own
part of the gradients, and the parts of a query's gradient are added. On a GPU, torch's flash kernel aligns the last
query with the last key by itself, and takes both pieces at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

Gradients = tuple[Tensor, Tensor, Tensor]  # of queries, keys, values


class Attended(NamedTuple):
    """An output, its log-sum-exp, and what else its backward needs."""

    out: Tensor
    lse: Tensor
    more: tuple[Tensor, ...] = ()


class SliceKernel(NamedTuple):
    """How attention is computed; `noise` multiplies its weights (dropout), where the kernel takes that."""

    forward: Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Attended]
    backward: Callable[[Tensor, Tensor, Tensor, Tensor, Attended, float, Tensor | None], Gradients]


def kernel_for(query: Tensor, key: Tensor, value: Tensor, *, has_noise: bool) -> SliceKernel:
    """Return the kernel for such tensors: the one that torch would choose for a whole sequence, if slices can use it.

    >>> tensor = torch.ones(1, 1, 2, 8)
    >>> kernel_for(tensor, tensor, tensor, has_noise=True) is PLAIN
    True
    """
    if has_noise or query.dim() != 4 or query.shape[-1] != value.shape[-1]:
        return PLAIN
    if query.is_cpu:
        return ON_CPU
    is_grouped = query.shape[1] != key.shape[1]
    chosen = torch._fused_sdp_choice(query, key, value, None, 0.0, True, enable_gqa=is_grouped)
    if chosen not in OF_DEVICES and is_grouped:  # pieces have keys of all heads
        chosen = torch._fused_sdp_choice(query, query, query, None, 0.0, True)
    return OF_DEVICES.get(chosen, PLAIN)


def expanded(tensor: Tensor, heads: int) -> Tensor:
    """Return keys or values of grouped heads, once for every query head.

    >>> expanded(torch.arange(2.0).view(1, 2, 1, 1), 4).flatten().tolist()
    [0.0, 0.0, 1.0, 1.0]
    """
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def grouped(gradient: Tensor, heads: int) -> Tensor:
    """Return the gradient of keys or values of so many heads, summed over the query heads of each.

    >>> grouped(torch.arange(4.0).view(1, 4, 1, 1), 2).flatten().tolist()
    [1.0, 5.0]
    """
    rows, num_queries, *shape = gradient.shape
    return gradient if num_queries == heads else gradient.reshape(rows, heads, -1, *shape).sum(2)


# ---- one product after the other: any dtype, any device, dropout ----------------------------------------------------


def _scores(query: Tensor, keys: Tensor, scale: float) -> Tensor:
    queries, length = query.shape[-2], keys.shape[-2]
    future = torch.ones(queries, queries, dtype=torch.bool, device=query.device).triu(1)
    scores = (query @ keys.mT) * scale
    scores[..., length - queries :].masked_fill_(future, -math.inf)
    return scores


def _plain(query: Tensor, keys: Tensor, values: Tensor, scale: float, noise: Tensor | None) -> Attended:
    keys, values = expanded(keys, query.shape[1]), expanded(values, query.shape[1])
    scores = _scores(query, keys, scale)
    lse = scores.logsumexp(-1)
    weights = (scores - lse[..., None]).exp()
    return Attended((weights if noise is None else weights * noise) @ values, lse)


def _plain_backward(
    gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, result: Attended, scale: float, noise: Tensor | None
) -> Gradients:
    heads = keys.shape[1]
    keys, values = expanded(keys, query.shape[1]), expanded(values, query.shape[1])
    weights = (_scores(query, keys, scale) - result.lse[..., None]).exp()
    of_values = (weights if noise is None else weights * noise).mT @ gradient
    of_weights = gradient @ values.mT
    of_weights = of_weights if noise is None else of_weights * noise
    of_scores = weights * (of_weights - (gradient * result.out).sum(-1, keepdim=True)) * scale
    return of_scores @ keys, grouped(of_scores.mT @ query, heads), grouped(of_values, heads)


PLAIN = SliceKernel(_plain, _plain_backward)


# ---- prefix and diagonal, merged -------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor, bool, float], Attended]
Back = Callable[[Tensor, Tensor, Tensor, Tensor, Attended, bool, float], Gradients]


def in_pieces(attend: Attend, back: Back) -> SliceKernel:
    """Return a kernel made of one that takes square causal pieces and whole rectangles; keys have all heads there."""

    def forward(query: Tensor, keys: Tensor, values: Tensor, scale: float, noise: Tensor | None) -> Attended:
        keys, values = expanded(keys, query.shape[1]), expanded(values, query.shape[1])
        parts = [attend(query, key, value, causal, scale) for key, value, causal in _pieces(query, keys, values)]
        out, lse, more = parts[0]
        for other, other_lse, other_more in parts[1:]:
            both = torch.logaddexp(lse, other_lse)
            out = out * (lse - both).exp_()[..., None].to(out.dtype)
            out.addcmul_(other, (other_lse - both).exp_()[..., None].to(out.dtype))
            lse, more = both, (*more, *other_more)
        return Attended(out, lse, more)

    def backward(
        gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, result: Attended, scale: float, noise: Any
    ) -> Gradients:
        heads = keys.shape[1]
        keys, values = expanded(keys, query.shape[1]), expanded(values, query.shape[1])
        pieces = _pieces(query, keys, values)
        each = len(result.more) // len(pieces)
        parts = []
        for at, (key, value, causal) in enumerate(pieces):
            of_piece = result._replace(more=result.more[at * each : (at + 1) * each])
            parts.append(back(gradient, query, key, value, of_piece, causal, scale))
        of_query = parts[0][0]
        for part in parts[1:]:
            of_query = of_query + part[0]
        of_keys, of_values = (torch.cat([part[at] for part in parts[::-1]], -2) for at in (1, 2))
        return of_query, grouped(of_keys, heads), grouped(of_values, heads)

    return SliceKernel(forward, backward)


def _pieces(query: Tensor, keys: Tensor, values: Tensor) -> list[tuple[Tensor, Tensor, bool]]:
    """Return keys, values and whether it is causal of each piece: the diagonal, and the prefix if there is one."""
    prefix = keys.shape[-2] - query.shape[-2]
    cuts = [(slice(prefix, None), True), (slice(0, prefix), False)]
    return [(keys[..., cut, :], values[..., cut, :], causal) for cut, causal in cuts[: 1 + bool(prefix)]]


def _cpu(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Attended:
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return Attended(*attend(query, key, value, 0.0, causal, attn_mask=None, scale=scale))


def _cpu_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Attended, causal: bool, scale: float
) -> Gradients:
    back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_query, of_key, of_value = back(
        gradient, query, key, value, result.out, result.lse, 0.0, causal, attn_mask=None, scale=scale
    )
    return of_query, of_key, of_value


ON_CPU = in_pieces(_cpu, _cpu_backward)


def _cudnn(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Attended:
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, _, _, _, _, seed, offset, _ = attend(query, key, value, None, True, 0.0, causal, False, scale=scale)
    return Attended(out, lse.reshape(lse.shape[:3]), (seed, offset))


def _cudnn_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Attended, causal: bool, scale: float
) -> Gradients:
    back = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    lengths, lse = (query.shape[-2], key.shape[-2]), result.lse[..., None].contiguous()
    of_query, of_key, of_value = back(
        gradient, query, key, value, result.out, lse, *result.more, None, None, None, *lengths, 0.0, causal, scale=scale
    )
    return of_query, of_key, of_value


CUDNN = in_pieces(_cudnn, _cudnn_backward)


_ALIGNED = 32  # queries: the backward below reads log-sum-exps of so many at once


def _efficient(query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float) -> Attended:
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    out, lse, seed, offset = attend(query, key, value, None, True, 0.0, causal, scale=scale)
    return Attended(out, lse[..., : query.shape[-2]], (seed, offset))


def _efficient_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, result: Attended, causal: bool, scale: float
) -> Gradients:
    back = torch.ops.aten._scaled_dot_product_efficient_attention_backward
    lse = torch.nn.functional.pad(result.lse, (0, -result.lse.shape[-1] % _ALIGNED), value=math.inf)
    wanted = [True, True, True, False]
    of_query, of_key, of_value, _ = back(
        gradient, query, key, value, None, result.out, lse, *result.more, 0.0, wanted, causal, scale=scale
    )
    return of_query, of_key, of_value


EFFICIENT = in_pieces(_efficient, _efficient_backward)


# ---- flash attention of a GPU: aligned to the last query and the last key --------------------------------------------


def _flash(query: Tensor, keys: Tensor, values: Tensor, scale: float, noise: Tensor | None) -> Attended:
    attend = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse, _, _, _, _, state, unused, _ = attend(query, keys, values, 0.0, True, False, scale=scale)
    return Attended(out, lse, (state, unused))


def _flash_backward(
    gradient: Tensor, query: Tensor, keys: Tensor, values: Tensor, result: Attended, scale: float, noise: Tensor | None
) -> Gradients:
    back = torch.ops.aten._scaled_dot_product_flash_attention_backward
    lengths = (query.shape[-2], keys.shape[-2])
    gradients = back(
        gradient,
        query,
        keys,
        values,
        result.out,
        result.lse,
        None,
        None,
        *lengths,
        0.0,
        True,
        *result.more,
        scale=scale,
    )
    return gradients[0], gradients[1], gradients[2]


FLASH = SliceKernel(_flash, _flash_backward)

OF_DEVICES = {
    SDPBackend.FLASH_ATTENTION.value: FLASH,
    SDPBackend.CUDNN_ATTENTION.value: CUDNN,
    SDPBackend.EFFICIENT_ATTENTION.value: EFFICIENT,
}
