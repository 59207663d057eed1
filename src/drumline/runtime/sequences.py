"""How a model takes sequences: where it takes positions, how far back its layers attend, and what counts as packed.

What divides sequences, a mesh between its lines or a pipeline between slices, passes every token's position to the
model: a part does not begin at 0. Models of transformers make masks for windows and for packed documents, and tell what
they do in their configuration. So they are asked.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drumline.core.errors import BatchError, ModelError
from drumline.model.microbatches import Microbatches
from drumline.model.patches import Patch, Replacement
from drumline.model.values import pack
from drumline.runtime.user_batch import has_microbatches

_POSITIONS = ("position_ids", "positions")  # what models call the argument with each token's position
_SHIFTING = "ForCausalLMLoss"  # the loss of transformers' language models
_WINDOWS = {"sliding_window": "sliding_attention", "attention_chunk_size": "chunked_attention"}  # in configurations
_BY_LENGTH = ("dynamic", "longrope")  # rotary positions that turn otherwise in longer sequences
_PACKED = "find_packed_sequence_indices"  # by which transformers finds packed documents


class Divider(NamedTuple):
    """What divides sequences, as errors say it, and the setting that ends it.

    >>> Divider("cp divides", "cp=1").why
    'cp divides its sequences'
    """

    clause: str
    setting: str

    @property
    def why(self) -> str:
        """Why a model is asked."""
        return f"{self.clause} its sequences"


@dataclass(frozen=True, slots=True)
class Takes:
    """How a model takes sequences: positions as an argument of this name at this place, at most `window` tokens.

    `steady`: the most tokens in which its rotary positions do not depend on how many there are.
    `counted`: whether its positions must count up by one, because they would mean packed documents otherwise.
    `shifts`: whether its own loss compares each token's output with the next label, which may be in another part.
    `is_needed`: whether it cannot be called without them. `passes_on`: whether it hands further arguments to its loss.
    """

    name: str
    place: int
    window: int | None = None
    counted: bool = False
    shifts: bool = False
    is_needed: bool = False
    passes_on: bool = False
    steady: int | None = None


def positions_of(model: object, divider: Divider) -> Takes:
    """Return how a model takes the position of each token; refuse a model whose sequences cannot be divided.

    A model that counts positions by itself would begin at 0 in every part.

    >>> positions_of(nn.Linear(2, 2), Divider("cp divides", "cp=1"))
    Traceback (most recent call last):
    drumline.core.errors.ModelError: Linear takes no position_ids or positions, and cp divides its sequences; ...
    """
    parameters = inspect.signature(model.forward).parameters if isinstance(model, nn.Module) else {}
    takes = list(parameters)
    config = getattr(model, "config", None)
    kind = getattr(config, "_attn_implementation", None)  # only models of transformers have it
    if kind not in (None, "sdpa"):
        raise ModelError(
            f"{type(model).__name__} computes attention by {kind!r}, and {divider.why}",
            expected="'sdpa', torch's scaled_dot_product_attention, where keys and values of all parts are gathered",
            fix='create the model with attn_implementation="sdpa" if it has that (soft-capped attention has not), '
            f"or use {divider.setting}",
        )
    for name in _POSITIONS:
        if name in takes:
            shifts = kind is not None and getattr(getattr(model, "loss_function", None), "__name__", "") == _SHIFTING
            is_needed = parameters[name].default is inspect.Parameter.empty
            passes_on = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
            where = name, takes.index(name), window_of(config)
            return Takes(
                *where, counted=kind is not None, shifts=shifts, is_needed=is_needed, passes_on=shifts and passes_on,
                steady=steady_of(config),
            )  # fmt: skip
    raise ModelError(
        f"{type(model).__name__} takes no {' or '.join(_POSITIONS)}, and {divider.why}",
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


def steady_of(config: Any) -> int | None:
    """Return in how many tokens rotary positions do not depend on the length; None if they never do.

    >>> from types import SimpleNamespace
    >>> steady_of(SimpleNamespace(rope_scaling={"rope_type": "dynamic"}, max_position_embeddings=8))
    8
    >>> steady_of(SimpleNamespace(rope_scaling={"rope_type": "linear"}, max_position_embeddings=8))
    """
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    table = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    if not isinstance(table, dict):
        return None
    whole = getattr(text, "max_position_embeddings", None)
    name = "original_max_position_embeddings"
    limits = [
        each.get(name) or getattr(text, name, None) or whole
        for each in (table, *table.values())  # of kinds of layers
        if isinstance(each, dict) and each.get("rope_type", each.get("type")) in _BY_LENGTH
    ]
    return min((limit for limit in limits if type(limit) is int), default=None)


def refuse_long(length: int, takes: Takes, divider: Divider) -> None:
    """Refuse sequences in whose parts a model of transformers would do something else.

    >>> refuse_long(16, Takes("positions", 1, window=8), Divider("cp divides", "cp=1"))
    Traceback (most recent call last):
    drumline.core.errors.BatchError: cp divides sequences of 16 tokens, and layers of the model attend to a window ...
    """
    begins = f"{divider.clause} sequences of {length} tokens"
    fix = f"use shorter sequences, or {divider.setting}"
    if takes.window is not None and length > takes.window:
        raise BatchError(
            f"{begins}, and layers of the model attend to a window of {takes.window}",
            expected=f"at most {takes.window} tokens: masks of windows are made for only a part of the sequence",
            fix=fix,
        )
    if takes.steady is not None and length > takes.steady:
        raise BatchError(
            f"{begins}, and the model's rotary positions turn otherwise in more than {takes.steady}",
            expected=f"at most {takes.steady} tokens: a part does not know how long its sequence is",
            fix=fix,
        )


def refuse_packed(value: Any, name: str, divider: Divider) -> None:
    """Refuse positions that a model of transformers takes for packed documents: its masks are left out."""
    for tensor in pack(list(value) if isinstance(value, Microbatches) else value)[0]:
        if bool((tensor.diff(dim=-1) != 1).any()):
            raise BatchError(
                f"{name} do not count up by one in every row, as of packed documents, and {divider.clause} the"
                " sequences",
                expected="one document in each row: masks are made for only a part of the sequence",
                fix=f"leave {name} out, or use {divider.setting}",
            )


def sequences_in(*values: Any) -> list[Tensor]:
    """Return the sequences of the first value that has any: one tensor, or one of each microbatch."""
    for value in values:
        each = value if isinstance(value, Microbatches) else [value]
        tensors = [next((tensor for tensor in pack(part)[0] if tensor.dim() > 1), None) for part in each]
        if all(tensor is not None for tensor in tensors):
            return [tensor for tensor in tensors if tensor is not None]
    return []


def counted_positions(values: Any, sequences: list[Tensor]) -> Any:
    """Return the positions of all tokens in sequences that begin at 0, apart by microbatch where `values` are.

    >>> counted_positions((), [torch.zeros(1, 3)]).tolist()
    [[0, 1, 2]]
    """
    every = [
        torch.arange(tensor.shape[1], device=tensor.device)[None].expand(tensor.shape[0], -1) for tensor in sequences
    ]
    return Microbatches(every) if any(has_microbatches(value) for value in values) else every[0]


def without_packing() -> AbstractContextManager[None]:
    """Return what keeps transformers from looking for packed documents inside.

    While a model of transformers is traced, it cannot look whether positions mean packed documents, and makes a mask in
    any case. Positions that do are refused, so it need not.
    """
    masks = sys.modules.get("transformers.masking_utils")
    return _packed_in(masks).by(True) if hasattr(masks, _PACKED) else nullcontext()


@cache
def _packed_in(masks: Any) -> Patch:
    def unpacked(replaced: Replacement) -> Callable[..., Any]:
        return lambda *args, **kwargs: None if replaced.watcher else replaced.original(*args, **kwargs)

    return Patch(masks, _PACKED, unpacked)
