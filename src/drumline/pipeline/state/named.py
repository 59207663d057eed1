"""A rank's parameters and buffers under the names of the unsplit model, to be kept and given back.

What several blocks hold has several names there, and is stored once, by the rank that is its home: so the ranks' states
together are the model's, with every tensor once. A state is taken back under any of its names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import DrumlineError, ModelError, nearest
from drumline.runtime.blocks.cut import Block
from drumline.runtime.stage import Stage
from drumline.runtime.weights.tied import Ties


def parameters_on(
    ties: Ties, rank: int, stages: Mapping[int, Stage], *, at_home: bool
) -> list[tuple[str, nn.Parameter]]:
    """Return a rank's parameters, each once and by its first name; `at_home`, those alone whose home the rank is."""
    found = ties.on(_blocks(stages))
    return [
        (name, one)
        for name, (home, one) in found.items()
        if isinstance(one, nn.Parameter) and (home == rank or not at_home)
    ]


def state_on(ties: Ties, rank: int, stages: Mapping[int, Stage]) -> dict[str, Any]:
    """Return what a rank stores: parameters and persistent buffers whose home it is."""
    found: dict[str, Any] = {}
    for index, block in _blocks(stages):
        for name, value in _entries(block):
            if ties.home(name, index) == rank:
                found.setdefault(ties.first(name), value.detach() if isinstance(value, Tensor) else value)
    return found


def problem_with(state: Mapping[str, Any], ties: Ties, rank: int, stages: Mapping[int, Stage]) -> DrumlineError | None:
    """Return why a state cannot be given to a rank, None if it can."""
    try:
        if not isinstance(state, Mapping):
            raise ModelError(f"the state is a {type(state).__name__}", expected="a dict of tensors by name")
        for index, block in _blocks(stages):
            for name, own in _entries(block):
                value = _given(state, ties, name)
                if value is None and ties.home(name, index) == rank:
                    raise ModelError(
                        f"the state has no {name!r}",
                        expected="every parameter and buffer of this rank's stages",
                        fix=nearest(name, state),
                    )
                if isinstance(own, Tensor) and value is not None and not isinstance(value, Tensor):
                    raise ModelError(f"{name!r} is a {type(value).__name__} in the state", expected="a tensor")
                if isinstance(own, Tensor) and value is not None and value.is_meta:
                    raise ModelError(f"{name!r} is on the meta device in the state", expected="a tensor with numbers")
                if isinstance(own, Tensor) and value is not None and value.shape != own.shape:
                    raise ModelError(
                        f"{name!r} has the shape {tuple(value.shape)} in the state", expected=str(tuple(own.shape))
                    )
    except DrumlineError as error:
        return error
    return None


def load_on(state: Mapping[str, Any], ties: Ties, stages: Mapping[int, Stage]) -> None:
    """Give a rank's blocks what the state has of them."""
    for _, block in _blocks(stages):
        prefix = _prefix(block)
        given = {name: (_given(state, ties, name), own) for name, own in _entries(block)}
        block.module.load_state_dict(
            {name.removeprefix(prefix): own if value is None else value for name, (value, own) in given.items()}
        )


def _given(state: Mapping[str, Any], ties: Ties, name: str) -> Any:
    """Return what the state has under any of a tensor's names."""
    held = ties.find(name)
    names = [one for one in ((name,) if held is None else held.names) if one in state]
    values = [state[one] for one in names]
    for other, value in zip(names[1:], values[1:], strict=True):
        if value is not values[0] and not (value.shape == values[0].shape and torch.equal(value, values[0])):
            raise ModelError(
                f"{names[0]!r} and {other!r} differ in the state", expected="the same: they are one tensor of the model"
            )
    return values[0] if values else None


def _blocks(stages: Mapping[int, Stage]) -> Iterable[tuple[int, Block]]:
    return [(index, block) for index, stage in stages.items() for block in stage.blocks]


def _prefix(block: Block) -> str:
    prefix = block.name if block.prefix is None else block.prefix
    return f"{prefix}." if prefix else ""


def _entries(block: Block) -> Iterator[tuple[str, Any]]:
    """Yield what a block stores, under the names of the unsplit model."""
    yield from block.module.state_dict(prefix=_prefix(block), keep_vars=True).items()
