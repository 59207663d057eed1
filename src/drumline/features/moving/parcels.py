"""What travels with a block that moves: its tensors, their gradients, what optimizers keep of them, and plain values.

    rank 0 ── told to all: names, dtypes and shapes, groups, counts of steps, modes ──► rank 1
           ── over the channel: the tensors, one after the other ─────────────────────►

A tensor that several blocks hold travels once, and only to a rank that has none of them yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from drumline.channel.lines.slices import FlatSlice, slice_of
from drumline.channel.transfer import TensorShape
from drumline.engine.stages.chain import Chain
from drumline.engine.updates.updates import OptimizerEntry, ParameterState, Updates
from drumline.model.quantised.packed import parts_of
from drumline.model.watch.fingerprint import plain_in
from drumline.model.weights.tied import Ties

_VALUE, _GRADIENT, _MASTER, _WHOLE = "value", "gradient", "master", "whole"
Key = tuple[Any, ...]  # what a tensor is to a parameter: one of these, or an optimizer's number and its name there


@dataclass(slots=True)
class Freight:
    """What goes from one rank to another: tensors by their first names, and blocks by number."""

    names: list[str] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)


def freights(before: Ties, after: Ties, counts: Sequence[Sequence[int]]) -> dict[tuple[int, int], Freight]:
    """Return what moves, by the ranks that send and receive; `counts` are blocks per stage, before and after.

    >>> from drumline.core.placement import Placement
    >>> from drumline.model.block import Block
    >>> blocks = [Block(str(number), nn.Linear(1, 1)) for number in range(4)]
    >>> ties = Ties([blocks[:2], blocks[2:]], Placement.linear(2))
    >>> freights(ties, ties.recut([1, 3]), [[2, 2], [1, 3]])
    {(0, 1): Freight(names=['1.weight', '1.bias'], blocks=[1])}
    """
    loads: dict[tuple[int, int], Freight] = {}
    for old, new in zip(before.tensors, after.tensors, strict=True):
        for target in (rank for rank in new.ranks if rank not in old.ranks):
            loads.setdefault((old.home, target), Freight()).names.append(old.name)
    placement = before.placement
    stages = [[stage for stage, count in enumerate(each) for _ in range(count)] for each in counts]
    for number, (old_stage, new_stage) in enumerate(zip(*stages, strict=True)):
        for target in (rank for rank in placement.ranks_of(new_stage) if rank not in placement.ranks_of(old_stage)):
            loads.setdefault((placement.homes[old_stage], target), Freight()).blocks.append(number)
    return dict(sorted(loads.items()))


@dataclass(slots=True)
class Parcel:
    """What a rank tells about its freight to another: all but the tensors' values."""

    tensors: list[tuple[str, Key, TensorShape]] = field(default_factory=list)
    trains: dict[str, bool] = field(default_factory=dict)
    pieces: set[str] = field(default_factory=set)  # of parameters that lines of a mesh divide
    optimizer_states: dict[str, list[tuple[int, dict[str, Any]] | None]] = field(
        default_factory=dict
    )  # groups and plain state
    divisions: dict[str, Any] = field(default_factory=dict)  # of state that lines of a mesh divide
    attributes: dict[int, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """The size of the tensors."""
        return sum(shape.num_bytes for _, _, shape in self.tensors)


def packed(
    freight: Freight, held_tensors: Mapping[str, Tensor], chain: Chain, updates: Updates
) -> tuple[Parcel, list[Tensor]]:
    """Return what to tell about a freight, and its tensors; `held_tensors` are those here by name."""
    parcel, tensors = Parcel(), []
    parameters = [name for name in freight.names if isinstance(held_tensors[name], nn.Parameter)]
    handed = dict(
        zip(parameters, updates.handed_over([_parameter(held_tensors[name]) for name in parameters]), strict=True)
    )
    for name in freight.names:
        for key, tensor in _tensors_of(held_tensors[name], handed.get(name)):
            parcel.tensors.append((name, key, TensorShape.of(tensor)))
            tensors.append(tensor)
        if isinstance(slice_of(held_tensors[name]), FlatSlice):
            parcel.pieces.add(name)
        if name in handed:
            parcel.trains[name] = held_tensors[name].requires_grad
            parcel.optimizer_states[name] = [
                None if o is None else (o.group, _plain(o.state)) for o in handed[name].entries
            ]
            parcel.divisions[name] = handed[name].division
    for number in freight.blocks:
        parcel.attributes[number] = [plain_in(vars(module)) for module in chain.block(number).module.modules()]
    return parcel, tensors


def _parameter(tensor: Tensor) -> nn.Parameter:
    assert isinstance(tensor, nn.Parameter)
    return tensor


def _plain(state: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry for key, entry in state.items() if not isinstance(entry, Tensor)}


def _tensors_of(tensor: Tensor, handed: ParameterState | None) -> Iterator[tuple[Key, Tensor]]:
    for part, value in parts_of(tensor).items():  # one, unless it is packed
        yield (_VALUE, part), value
    if tensor.grad is not None:
        yield (_GRADIENT,), tensor.grad
    if handed is None:
        return
    if handed.master is not None:
        yield (_MASTER,), handed.master
    if handed.whole is not None:
        yield (_WHOLE,), handed.whole
    for number, entry in enumerate(handed.entries):
        for key, value in ({} if entry is None else entry.state).items():
            if isinstance(value, Tensor):
                yield (number, key), value.detach()


@dataclass(slots=True)
class TensorParcel:
    """What has come of one tensor."""

    value: dict[str, Tensor]  # its parts; of a plain tensor, one
    gradient: Tensor | None
    trains: bool | None  # None of buffers
    is_piece: bool
    handed: ParameterState


def unpacked(parcel: Parcel, tensors: Sequence[Tensor]) -> dict[str, TensorParcel]:
    """Return what has come, by name."""
    tensors_by_name: dict[str, dict[Key, Tensor]] = {}
    for (name, key, _), tensor in zip(parcel.tensors, tensors, strict=True):
        tensors_by_name.setdefault(name, {})[key] = tensor
    states = {}
    for name, each in tensors_by_name.items():
        kept_entries: list[OptimizerEntry | None] = []
        for number, plain in enumerate(parcel.optimizer_states.get(name, ())):
            state = {key[1]: tensor for key, tensor in each.items() if key[0] == number}
            kept_entries.append(None if plain is None else OptimizerEntry(plain[0], {**state, **plain[1]}))
        division = parcel.divisions.get(name)
        handed = ParameterState(each.get((_MASTER,)), kept_entries, each.get((_WHOLE,)), division)
        value = {key[1]: tensor for key, tensor in each.items() if key[0] == _VALUE}
        is_piece = name in parcel.pieces
        states[name] = TensorParcel(value, each.get((_GRADIENT,)), parcel.trains.get(name), is_piece, handed)
    return states


def put_attributes(parcel: Parcel, chain: Chain) -> None:
    """Give the modules of blocks that have come their modes and plain attributes."""
    for number, each in parcel.attributes.items():
        for module, values in zip(chain.block(number).module.modules(), each, strict=True):
            vars(module).update(values)
