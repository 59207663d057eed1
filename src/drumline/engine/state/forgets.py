"""Whether what a stage keeps makes a difference: an experiment with other inputs, which leaves nothing behind.

::

    run x ──► y, A        other inputs ──► B        x again ──► z, C        as it was, x ──► D, other inputs ──► E

    B == A, D == E        it keeps something that no input changes: a table made when it was first needed
    z == y, C == A != B   it forgets: what it keeps is from the last input, and it was set before it was read
    else                  a counter, a running mean, a generator: the order of inputs makes a difference
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import ref

import numpy as np
import torch
from torch import Tensor, nn

from drumline.model.kept_state.contents import is_same_value, kind_of
from drumline.model.kept_state.keeping import as_before
from drumline.model.kept_state.spaces import Space
from drumline.model.values import MISSING, mapped, pack
from drumline.model.watch.keeping import nothing_left
from drumline.model.watch.used_up import can_be_used_up
from drumline.runtime.stage import Stage

_DEPTH = 6
Kept = tuple[Space, Any]  # a place


class Influence(NamedTuple):
    """What an experiment says of a place."""

    stays: bool  # no input changes it
    forgets: bool  # it is from the last input alone, and so is what the stage returns


def tried(
    stage: Stage, places: Sequence[Kept], as_it_was: Callable[[], AbstractContextManager[None]]
) -> list[Influence]:
    """Run a stage on its latest input and on others, also with what it kept before, and return what this says."""
    if stage.latest is None:
        return [Influence(False, False) for _ in places]
    microbatch, value = stage.latest
    modules = [module for block in stage.blocks for module in block.module.modules()]
    with nothing_left(modules, stage.randomness), as_before(modules):
        try:
            first = _run(stage, microbatch, value, places)
            for other in (_larger, _smaller):
                between = _run(stage, microbatch, mapped(value, other), places)
            last = _run(stage, microbatch, value, places)
            anew = [_begun(stage, microbatch, each, places, as_it_was) for each in (value, mapped(value, _larger))]
        except Exception:  # of the user's own code, on inputs that are none of the user's
            return [Influence(False, False) for _ in places]
    is_same = _is_same(first[0], last[0])
    verdicts = []
    for before, middle, after, *begun in zip(first[1], between[1], last[1], *anew, strict=True):
        is_still = _is_same(before, middle)
        verdicts.append(Influence(is_still and _is_same(*begun), is_same and not is_still and _is_same(before, after)))
    return verdicts


def _begun(
    stage: Stage, microbatch: int, value: Any, places: Sequence[Kept], as_it_was: Callable[[], Any]
) -> list[Any]:
    with as_it_was():
        return _run(stage, microbatch, value, places)[1]


def _run(stage: Stage, microbatch: int, value: Any, places: Sequence[Kept]) -> tuple[Any, list[Any]]:
    output = stage.repeated(microbatch, mapped(value, Tensor.clone))
    contents = [_content(space.table.get(key, MISSING)) for space, key in places]
    return [tensor.detach().clone() for tensor in pack(output)[0]], contents


def _larger(tensor: Tensor) -> Tensor:
    return _turned(tensor) if not tensor.is_floating_point() else _turned(tensor) * 2


def _smaller(tensor: Tensor) -> Tensor:
    return _turned(_turned(tensor)) if not tensor.is_floating_point() else tensor * -0.5


def _turned(tensor: Tensor) -> Tensor:
    """Return the rows of a tensor in another order, and what is in each."""
    for dim in range(tensor.dim()):
        tensor = tensor.roll(1, dim)
    return tensor


def _content(value: Any, depth: int = _DEPTH) -> Any:
    """Return what a value holds, for a comparison: what is in it, copies of tensors, the state of generators."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, tuple | frozenset):
        return [_content(item, depth - 1) for item in value] if depth else None
    if isinstance(value, ref):
        return _content(value(), depth)
    if can_be_used_up(value):
        return object()  # never the same again
    kind = None if isinstance(value, nn.Module) else kind_of(value)
    if kind is None or not depth:
        return value
    state = kind.take(value)
    if not kind.holds_objects:
        return state
    if isinstance(state, dict):
        return {key: _content(item, depth - 1) for key, item in state.items()}
    return [_content(item, depth - 1) for item in state]


def _is_same(content: Any, other: Any) -> bool:
    if isinstance(content, Tensor) and isinstance(other, Tensor):
        return content.shape == other.shape and torch.equal(content.nan_to_num(), other.nan_to_num())
    if type(content) is not type(other):
        return False
    if isinstance(content, dict):
        return content.keys() == other.keys() and all(_is_same(content[key], other[key]) for key in content)
    if isinstance(content, list | tuple):
        return len(content) == len(other) and all(map(_is_same, content, other))
    if isinstance(content, np.ndarray | array):
        return bool(content.tobytes() == other.tobytes())
    return is_same_value(content, other) or (isinstance(content, str | bytearray) and bool(content == other))
