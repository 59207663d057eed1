"""A step's arguments in units: every sequence of every microbatch in slices, with the position of each token.

    input_ids (4, 12), 2 microbatches, 3 slices     position_ids
    (2, 4) (2, 4) (2, 4)   rows 0 and 1             0..3   4..7   8..11
    (2, 4) (2, 4) (2, 4)   rows 2 and 3             0..3   4..7   8..11

Behind the cut a unit is a microbatch like any other: its loss counts its own labels, and its share of the batch follows
from that. So the logits of a whole sequence never exist at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from drumline.core.errors import BatchError
from drumline.core.slices.division import SliceLengths
from drumline.model.microbatches import Microbatches
from drumline.model.values import mapped, pack, unpack
from drumline.runtime.batch import rows_of_each
from drumline.runtime.sequences import Divider, Takes, counted_positions, refuse_long, refuse_packed, sequences_in
from drumline.runtime.step import CalledWith, Step
from drumline.runtime.user_batch import has_microbatches

BY_SLICES = Divider("slices divide", "slices=1")
# What the loss of transformers takes instead of shifting labels itself, which would lose the last of every slice.
_SHIFTED, _IGNORED = "shift_labels", -100
_MASK = "attention_mask"


def in_units(call: CalledWith, takes: Takes, division: SliceLengths, num_microbatches: int) -> CalledWith:
    """Return what a step is called with, every tensor with one value for each unit."""
    args, named, target = call
    if any(has_microbatches(value) for value in (*args, *named.values(), target)):
        raise BatchError(
            "a step gets Microbatches, and its sequences are divided into slices",
            expected="tensors with one row for each sequence",
            fix="pass sequences of one length as a tensor, or use slices=1",
        )
    _check(args, named, takes)
    named = _without_mask(named) if takes.counted else named
    batch = sequences_in(*args, *named.values())
    lead = next(iter(batch or sequences_in(target)), None)
    if lead is None:  # this rank has neither the first nor the last stage
        return call
    rows, length = int(lead.shape[0]), int(lead.shape[1])
    _refuse_target(target, rows, length)
    refuse_long(length, takes, BY_SLICES)
    if rows < num_microbatches:
        raise BatchError(
            f"the batch has {rows} rows for {num_microbatches} microbatches",
            expected="a row for each microbatch; slices divide a sequence further",
            fix=f"use num_microbatches={rows} or fewer",
        )
    if batch and takes.name not in named and takes.place >= len(args):
        named = {**named, takes.name: torch.arange(length, device=lead.device)[None].expand(rows, -1)}
    if takes.passes_on and isinstance(labels := named.get("labels"), Tensor) and named.get(_SHIFTED) is None:
        named = {**named, _SHIFTED: functional.pad(labels, (0, 1), value=_IGNORED)[:, 1:]}
    cut = _Cut(rows_of_each(rows, num_microbatches), division.parts(length), rows, length)
    if not batch:  # this rank has the last stage alone, and gets None for the rest
        return CalledWith((), {}, cut.each(target))
    return CalledWith(cut.each(args), cut.each(named), cut.each(target))


def in_one_piece(user_call: CalledWith, takes: Takes) -> CalledWith:
    """Return what a step is called with, for a model that takes whole sequences, and positions if it needs them."""
    args, named, target = user_call
    batch = sequences_in(*args, *named.values())
    if not takes.is_needed or not batch or takes.name in named or takes.place < len(args):
        return user_call
    return CalledWith(args, {**named, takes.name: counted_positions((*args, *named.values()), batch)}, target)


def in_sequences(step: Step, num_slices: int) -> Any:
    """Return a step's outputs with whole sequences and all rows, from those of its units."""
    units = [step.outputs[number] for number in sorted(step.outputs)]
    packed = [pack(unit)[0] for unit in units]
    form = pack(units[0])[1]
    tensors = []
    for column in zip(*packed, strict=True):
        if not column[0].dim():  # a mean, as of a loss
            shares = torch.stack(list(step.shares)) if len(step.shares) else torch.ones(len(units)) / len(units)
            tensors.append((torch.stack(column) * shares.to(column[0])).sum() / (shares[0] if len(step.shares) else 1))
            continue
        rows = [column[at : at + num_slices] for at in range(0, len(column), num_slices)]
        tensors.append(torch.cat([torch.cat(row, 1) if row[0].dim() > 1 else row[0] for row in rows]))
    return unpack(tensors, form)


def _check(args: Sequence[Any], named: dict[str, Any], takes: Takes) -> None:
    value = named.get(takes.name, args[takes.place] if takes.place < len(args) else None)
    if takes.counted and value is not None:
        refuse_packed(value, takes.name, BY_SLICES)
    if takes.shifts and not takes.passes_on and named.get("labels") is not None:
        raise BatchError(
            "the model shifts labels itself, and slices divide its sequences: the last label of a slice is in the next",
            expected="a target that was shifted before: the next token of each",
            fix="leave out labels=, pass loss_fn= to Pipeline, and that target= to step",
        )


def _without_mask(named: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by name without a mask that leaves out no token, as tokenizers return it; refuse others."""
    mask = named.get(_MASK)
    if not isinstance(mask, Tensor):
        return named
    if mask.dim() != 2 or not bool(mask.all()):
        raise BatchError(
            f"{_MASK} leaves out tokens, and slices divide the sequences",
            expected="sequences without padding: masks are made for only a part of the sequence",
            fix=f"leave {_MASK} out if padding is on the right, where no token sees it, and give its labels -100; else"
            " use slices=1",
        )
    return {name: value for name, value in named.items() if name != _MASK}


def _refuse_target(target: Any, rows: int, length: int) -> None:
    shapes = [tuple(tensor.shape) for tensor in pack(target)[0]]
    if shapes and not any(shape[1:2] == (length,) and shape[0] in (1, rows) for shape in shapes):
        raise BatchError(
            f"the target has the shape {' and '.join(map(str, shapes))}, and slices divide {length} tokens of each row",
            expected=f"a target for each token, of the shape ({rows}, {length})",
            fix="pass the next token of each as target=, or use slices=1",
        )


class _Cut:
    """Cuts tensors into units: those with a whole sequence in rows and slices, others in rows alone."""

    def __init__(self, rows: Sequence[int], parts: Sequence[int], num_rows: int, length: int) -> None:
        self._rows, self._parts, self._num_rows, self._length = rows, parts, num_rows, length

    def each(self, values: Any) -> Any:
        return mapped(values, self._units) if pack(values)[0] else values

    def _units(self, tensor: Tensor) -> Any:
        if tensor.dim() < 2 or tensor.shape[1] != self._length:
            if tensor.dim() and tensor.shape[0] == self._num_rows:
                return Microbatches(part for part in torch.split(tensor, list(self._rows)) for _ in self._parts)
            return tensor
        rows = tensor.expand(self._num_rows, *tensor.shape[1:]) if tensor.shape[0] == 1 else tensor
        if rows.shape[0] != self._num_rows:
            raise BatchError(
                f"a tensor of the shape {tuple(tensor.shape)} has sequences, and the batch {self._num_rows} rows",
                expected="as many rows, or one for all of them",
            )
        return Microbatches(
            part.contiguous()
            for row in torch.split(rows, list(self._rows))
            for part in torch.split(row, list(self._parts), dim=1)
        )
