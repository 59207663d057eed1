"""Parameters over the same memory, which are one where they share it and two as soon as processes copy it.

    b.weight.data = a.weight.data      two parameters, one memory: an optimizer that updates one updates the other
    head = nn.Parameter(table[:10])    they overlap
    self.row = self.weight.data[0]     an attribute, whose copy does not see updates of the weight's copy

Unlike a tied weight, which is one object, they are found by their memory. Many tensors are slices of one large memory,
such as those of a file; they share nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.core.placement import Placement
from drumline.model.block import Block
from drumline.model.catalogue import places_in, whole_name
from drumline.model.kept_state.snapshot import Snapshot
from drumline.model.kept_state.spaces import own_values
from drumline.model.quantised.packed import is_packed


def refuse_overlaps(cuts: Sequence[Sequence[Block]], placement: Placement, device: torch.device) -> None:
    """Refuse a parameter that trains and shares memory with another tensor, if different processes hold the two.

    A tensor that has yet to go to the device gets memory of its own there, in a plain loop too.

    >>> first, last = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> last.weight.data = first.weight.data
    >>> refuse_overlaps([[Block("0", first)], [Block("1", last)]], Placement.linear(2), torch.device("cpu"))
    Traceback (most recent call last):
    drumline.core.errors.ModelError: '0.weight' and '1.weight' share memory but are two tensors, and different ranks ...
    """
    names: dict[int, str] = {}
    ranks: dict[int, set[int]] = defaultdict(set)
    tensors: dict[int, Tensor] = {}
    for stage, blocks in enumerate(cuts):
        for place in (place for block in blocks for place in places_in(block)):
            tensor = place.tensor
            if tensor is not None and tensor.device.type == device.type and _has_memory(tensor):
                names.setdefault(id(tensor), place.name)
                ranks[id(tensor)].update(placement.ranks_of(stage))
                tensors[id(tensor)] = tensor
    for first, other in _overlapping(tensors.values()):
        if ranks[id(first)] != ranks[id(other)]:
            raise ModelError(
                f"{names[id(first)]!r} and {names[id(other)]!r} share memory but are two tensors, and different ranks "
                "train them",
                expected="one parameter with two names, or two with memory of their own: between processes, the update "
                "of one does not reach the other",
                fix="tie them, as in b.weight = a.weight, or clone one of them",
            )

    _refuse_apart(cuts, placement, device)


class Alias(NamedTuple):
    """A tensor in an attribute of a block, and the parameter whose memory it uses."""

    attribute: str
    block: str
    parameter: str

    @property
    def named(self) -> str:
        """What to call it in an error."""
        return f"the attribute {self.attribute!r} of block {self.block!r} has the memory of {self.parameter!r}"


Trained = dict[int, list[tuple[str, Tensor]]]


def trained_in(blocks: Iterable[Block]) -> Trained:
    """Return the parameters that train, with their names, by their memory."""
    trained: Trained = defaultdict(list)
    for place in (place for block in blocks for place in places_in(block)):
        tensor = place.tensor
        if tensor is not None and _trains(tensor) and _has_memory(tensor):
            trained[tensor.untyped_storage().data_ptr()].append((place.name, tensor))
    return trained


def aliases_in(block: Block, trained: Trained) -> Iterator[Alias]:
    """Yield what a block holds in attributes over the memory of parameters that train.

    >>> layer = nn.Linear(2, 2); layer.row = layer.weight.data[0]
    >>> [alias.named for alias in aliases_in(Block("1", layer), trained_in([Block("1", layer)]))]
    ["the attribute 'row' of block '1' has the memory of '1.weight'"]
    """
    for path, module in block.module.named_modules():
        for key, value in own_values(vars(module)).items():
            for tensor, _ in Snapshot([value], most_bytes=-1).tensors.values():
                if tensor.requires_grad or not _has_memory(tensor):
                    continue
                for name, parameter in trained.get(tensor.untyped_storage().data_ptr(), ()):
                    if _has_common(tensor.detach(), parameter.detach()):
                        yield Alias(whole_name(path, key), block.name, name)


def _refuse_apart(cuts: Sequence[Sequence[Block]], placement: Placement, device: torch.device) -> None:
    for ranks in {placement.ranks_of(stage) for stage in range(len(cuts))}:
        others = [block for stage, blocks in enumerate(cuts) if placement.ranks_of(stage) != ranks for block in blocks]
        trained = trained_in(others) if device.type == "cpu" else {}
        for stage, blocks in enumerate(cuts):
            for alias in (each for block in blocks for each in aliases_in(block, trained)):
                if placement.ranks_of(stage) == ranks:
                    raise ModelError(
                        f"{alias.named}, which another rank trains",
                        expected="attributes with memory of their own: between processes, updates do not reach them",
                        fix="use the parameter itself as an input of the block, tie it, or clone it",
                    )


def _has_memory(tensor: Tensor) -> bool:
    return not (is_packed(tensor) or tensor.is_meta or tensor.layout is not torch.strided or not tensor.numel())


def _overlapping(tensors: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors with common memory, of which at least one trains."""
    by_storage: dict[int, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        by_storage[tensor.untyped_storage().data_ptr()].append(tensor)
    for sharing in by_storage.values():
        if len(sharing) < 2 or not any(map(_trains, sharing)):
            continue
        ordered = sorted(sharing, key=lambda tensor: _span(tensor)[0])
        for at, first in enumerate(ordered):
            for other in ordered[at + 1 :]:
                if _span(other)[0] >= _span(first)[1]:
                    break
                if (_trains(first) or _trains(other)) and _has_common(first, other):
                    yield first, other


def _trains(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its storage, in bytes."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.itemsize
    return start, start + (int(last) + 1) * tensor.itemsize


def _has_common(first: Tensor, other: Tensor) -> bool:
    """Whether two tensors with overlapping spans have a byte in common; columns of a matrix lie between each other."""
    spans = _span(first), _span(other)
    if first.itemsize != other.itemsize:
        return True
    if all(end - start == tensor.nbytes for tensor, (start, end) in zip((first, other), spans, strict=True)):
        return True
    begin = min(start for start, _ in spans) // first.itemsize
    marks = torch.zeros(max(end for _, end in spans) // first.itemsize - begin, dtype=torch.bool)
    marks.as_strided(first.shape, first.stride(), first.storage_offset() - begin).fill_(True)
    return bool(marks.as_strided(other.shape, other.stride(), other.storage_offset() - begin).any())
