"""A line's part of sequences, where the axis cp divides them.

A part does not begin at 0, so every token's position is passed to the model. Windows of attention must hold whole
sequences, and positions must count up by one.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor

from drumline.channel.lines.axes import Axes
from drumline.core.errors import BatchError
from drumline.features.mesh.context import AXIS
from drumline.model.values import mapped
from drumline.runtime.sequences import Divider, Takes, counted_positions, refuse_long, refuse_packed, sequences_in

BY_CP = Divider("cp divides", "cp=1")


def own_part(values: Any, lengths: Collection[int], axes: Axes) -> Any:
    """Return this line's part of every tensor whose second dimension is a sequence of one of these lengths.

    Parts are contiguous, as whole sequences are: models view them.
    """
    size, place = axes.size(AXIS), axes.place(AXIS)

    def part(tensor: Tensor) -> Tensor:
        return tensor.chunk(size, 1)[place].contiguous() if tensor.dim() > 1 and tensor.shape[1] in lengths else tensor

    return mapped(values, part)


def placed(
    args: tuple[Any, ...], named: dict[str, Any], target: Any, takes: Takes, axes: Axes
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return a step's arguments with the positions of all tokens, unless they are given."""
    batch = sequences_in(*args, *named.values())
    for part in batch or sequences_in(target):
        refuse_long(part.shape[1], takes, BY_CP)
        if part.shape[1] % axes.size(AXIS):
            raise BatchError(
                f"sequences of {part.shape[1]} tokens are divided over cp = {axes.size(AXIS)}",
                expected="a multiple of it",
                fix="pad the sequences, or choose another size of cp",
            )
    name = takes.name
    value = named.get(name, args[takes.place] if takes.place < len(args) else None)
    if takes.counted and value is not None:
        refuse_packed(value, name, BY_CP)
    if takes.shifts and named.get("labels") is not None:
        raise BatchError(
            "the model shifts labels itself, and cp divides its sequences: the last label of a part is in the next",
            expected="a target that was shifted before: the next token of each",
            fix="leave out labels=, pass loss_fn= to Pipeline, and that target= to step",
        )
    if not batch or value is not None:  # ranks without the first stage may have no batch
        return args, named, target
    return args, {**named, name: counted_positions((*args, *named.values()), batch)}, target


def divided(
    args: tuple[Any, ...], named: dict[str, Any], target: Any, takes: Takes, axes: Axes
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return a step's arguments with this line's part of every sequence, and its positions unless they are given."""
    args, named, target = placed(args, named, target, takes, axes)
    lengths = {sequence.shape[1] for sequence in sequences_in(*args, *named.values()) or sequences_in(target)}
    return own_part(args, lengths, axes), own_part(named, lengths, axes), own_part(target, lengths, axes)
