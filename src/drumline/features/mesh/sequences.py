"""How a model takes sequences, and a line's part of them where the axis cp divides them.

A part does not begin at 0, so every token's position is passed to the model. Models of transformers make masks for
windows and for packed documents, and tell what they do in their configuration. So they are asked: windows must hold
whole sequences, and positions must count up by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drumline.channel.lines.axes import Axes
from drumline.core.errors import BatchError, ModelError
from drumline.features.mesh.context import AXIS
from drumline.model.microbatches import Microbatches
from drumline.model.values import mapped, pack
from drumline.runtime.user_batch import has_microbatches

_POSITIONS = ("position_ids", "positions")  # what models call the argument with each token's position
_SHIFTING = "ForCausalLMLoss"  # the loss of transformers' language models
_WINDOWS = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}  # in configurations


def own_part(values: Any, lengths: Collection[int], axes: Axes) -> Any:
    """Return this line's part of every tensor whose second dimension is a sequence of one of these lengths.

    Parts are contiguous, as whole sequences are: models view them.
    """
    size, place = axes.size(AXIS), axes.place(AXIS)

    def part(tensor: Tensor) -> Tensor:
        return tensor.chunk(size, 1)[place].contiguous() if tensor.dim() > 1 and tensor.shape[1] in lengths else tensor

    return mapped(values, part)


@dataclass(frozen=True, slots=True)
class Takes:
    """How a model takes sequences: positions as an argument of this name at this place, at most `window` tokens.

    `counted`: whether its positions must count up by one, because they would mean packed documents otherwise.
    `shifts`: whether its own loss compares each token's output with the next label, which may be in another part.
    """

    name: str
    place: int
    window: int | None = None
    counted: bool = False
    shifts: bool = False


def positions_of(model: object) -> Takes:
    """Return how a model takes the position of each token; refuse a model whose sequences cannot be divided.

    A model that counts positions by itself would begin at 0 in every part.

    >>> positions_of(nn.Linear(2, 2))
    Traceback (most recent call last):
    drumline.core.errors.ModelError: Linear takes no position_ids or positions, and cp divides its sequences; ...
    """
    takes = list(inspect.signature(model.forward).parameters) if isinstance(model, nn.Module) else []
    config = getattr(model, "config", None)
    kind = getattr(config, "_attn_implementation", None)  # only models of transformers have it
    if kind not in (None, "sdpa"):
        raise ModelError(
            f"{type(model).__name__} computes attention by {kind!r}, and cp divides its sequences",
            expected="'sdpa', torch's scaled_dot_product_attention, where keys and values of all parts are gathered",
            fix='create the model with attn_implementation="sdpa" if it has that (soft-capped attention has not), '
            "or use cp=1",
        )
    for name in _POSITIONS:
        if name in takes:
            shifts = kind is not None and getattr(getattr(model, "loss_function", None), "__name__", "") == _SHIFTING
            return Takes(name, takes.index(name), window_of(config), counted=kind is not None, shifts=shifts)
    raise ModelError(
        f"{type(model).__name__} takes no {' or '.join(_POSITIONS)}, and cp divides its sequences",
        expected="a model whose forward takes the position of each token, since a part does not begin at 0",
        fix="give its forward an argument `positions` of the shape (rows, length), and use that",
    )


def window_of(config: Any) -> int | None:
    """Return how far back some layer attends, as a configuration of transformers says; None if all attend to all.

    >>> from types import SimpleNamespace
    >>> window_of(SimpleNamespace(sliding_window=4, layer_types=["full_attention", "sliding_attention"]))
    4
    >>> window_of(SimpleNamespace(sliding_window=4, layer_types=["full_attention"]))
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    kinds = getattr(text, "layer_types", None)
    sizes = [
        size
        for name, kind in _WINDOWS.items()
        if type(size := getattr(text, name, None)) is int and (not kinds or kind in kinds)
    ]
    return min(sizes, default=None) if getattr(text, "use_sliding_window", True) else None


def placed(
    args: tuple[Any, ...], named: dict[str, Any], target: Any, takes: Takes, axes: Axes
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return a step's arguments with the positions of all tokens, unless they are given."""
    batch = _sequences(*args, *named.values())
    for part in batch or _sequences(target):
        if takes.window is not None and part.shape[1] > takes.window:
            raise BatchError(
                f"sequences of {part.shape[1]} tokens are divided over cp = {axes.size(AXIS)}, and layers of the model "
                f"attend to a window of {takes.window}",
                expected=f"at most {takes.window} tokens: masks of windows are made for only a part of the sequence",
                fix="use shorter sequences, or cp=1",
            )
        if part.shape[1] % axes.size(AXIS):
            raise BatchError(
                f"sequences of {part.shape[1]} tokens are divided over cp = {axes.size(AXIS)}",
                expected="a multiple of it",
                fix="pad the sequences, or choose another size of cp",
            )
    name = takes.name
    value = named.get(name, args[takes.place] if takes.place < len(args) else None)
    if takes.counted and value is not None:
        _refuse_packed(value, name)
    if takes.shifts and named.get("labels") is not None:
        raise BatchError(
            "the model shifts labels itself, and cp divides its sequences: the last label of a part is in the next",
            expected="a target that was shifted before: the next token of each",
            fix="leave out labels=, pass loss_fn= to Pipeline, and that target= to step",
        )
    if not batch or value is not None:  # ranks without the first stage may have no batch
        return args, named, target
    every = [torch.arange(tensor.shape[1], device=tensor.device)[None].expand(tensor.shape[0], -1) for tensor in batch]
    is_apart = any(has_microbatches(argument) for argument in (*args, *named.values()))
    return args, {**named, name: Microbatches(every) if is_apart else every[0]}, target


def _refuse_packed(positions: Any, name: str) -> None:
    """Refuse positions that a model of transformers takes for packed documents: its masks are left out."""
    for tensor in pack(list(positions) if isinstance(positions, Microbatches) else positions)[0]:
        if bool((tensor.diff(dim=-1) != 1).any()):
            raise BatchError(
                f"{name} do not count up by one in every row, as of packed documents, and cp divides the sequences",
                expected="one document in each row: masks are made for only a part of the sequence",
                fix=f"leave {name} out, or use cp=1",
            )


def _sequences(*values: Any) -> list[Tensor]:
    """Return the sequences of the first value that has any: one tensor, or one of each microbatch."""
    for value in values:
        each = value if isinstance(value, Microbatches) else [value]
        tensors = [next((tensor for tensor in pack(part)[0] if tensor.dim() > 1), None) for part in each]
        if all(tensor is not None for tensor in tensors):
            return [tensor for tensor in tensors if tensor is not None]
    return []


def divided(
    args: tuple[Any, ...], named: dict[str, Any], target: Any, takes: Takes, axes: Axes
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return a step's arguments with this line's part of every sequence, and its positions unless they are given."""
    args, named, target = placed(args, named, target, takes, axes)
    lengths = {sequence.shape[1] for sequence in _sequences(*args, *named.values()) or _sequences(target)}
    return own_part(args, lengths, axes), own_part(named, lengths, axes), own_part(target, lengths, axes)
