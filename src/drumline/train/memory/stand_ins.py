"""Memory for a model on the meta device while its blocks are measured: as much as its largest blocks need, not all.

    blocks.0.up.weight ─┐
    blocks.1.up.weight ─┼──► one tensor with memory, and one gradient
    blocks.2.up.weight ─┘

Parameters of one shape, each the same number of its shape in its block, share one that has memory. A block holds as
many as before, so it computes as long and keeps as much for its backward. Values are drawn at random: they change
neither.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from drumline.model.block import Block
from drumline.model.catalogue import Catalogue, Entry, places_in, with_memory
from drumline.model.quantised.packed import kind_of, parts_of, settle
from drumline.model.weights.initialise import initialise

_DEVIATION = 0.02
_LARGE = 2**24  # elements


def is_on_meta(blocks: Sequence[Block]) -> bool:
    """Whether any tensor of the blocks has no memory."""
    return any(param.is_meta for block in blocks for param in (*block.module.parameters(), *block.module.buffers()))


@contextmanager
def stand_ins(blocks: Sequence[Block], root: nn.Module | None, device: torch.device) -> Iterator[None]:
    """Let blocks on the meta device have memory inside, and none afterwards; others stay as they are.

    >>> with torch.device("meta"):
    ...     model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> blocks = [Block(name, module) for name, module in model.named_children()]
    >>> with stand_ins(blocks, model, torch.device("cpu")):
    ...     model[0].weight is model[1].weight, model(torch.ones(1, 4)).shape
    (True, torch.Size([1, 4]))
    >>> model[0].weight is model[1].weight, model[0].weight.device
    (False, device(type='meta'))
    """
    settle(module for block in blocks for module in block.module.modules())
    catalogue = Catalogue(blocks, root)
    before = [(entry, entry.tensor) for entry in catalogue.of(blocks) if entry.tensor.is_meta]
    parameters = {id(entry): entry for entry, tensor in before if isinstance(tensor, nn.Parameter)}
    buffers = [entry for entry, _ in before if id(entry) not in parameters]
    try:
        for entry in buffers:
            entry.put(with_memory(entry.tensor, device))
        initialise(catalogue, buffers, seed=0, device=device)
        _share(blocks, list(parameters.values()), device)
        yield
    finally:
        settle(catalogue.modules)
        for entry, tensor in before:
            entry.put(tensor)
        settle(catalogue.modules)


def _share(blocks: Sequence[Block], entries: Sequence[Entry], device: torch.device) -> None:
    owners = {id(entry.tensor): entry for entry in entries}
    uses = Counter(number for block in blocks for number in {id(place.tensor) for place in places_in(block)})
    tensors: dict[Any, Tensor] = {}
    generator = torch.Generator(device).manual_seed(0)
    for block in blocks:
        seen_counts: Counter[Any] = Counter()
        for at in dict.fromkeys(id(place.tensor) for place in places_in(block)):
            entry = owners.pop(at, None)
            if entry is None:
                continue
            tensor = entry.tensor
            kind = (tensor.shape, kind_of(tensor), tensor.requires_grad)
            seen_counts[kind] += 1
            key = at if uses[at] > 1 else (*kind, seen_counts[kind])  # what several blocks hold stays theirs alone
            if key not in tensors:
                tensors[key] = with_memory(tensor, device)
                with torch.no_grad():
                    for part in parts_of(tensors[key]).values():
                        _fill(part, generator)
            entry.put(tensors[key])


def _fill(tensor: Tensor, generator: torch.Generator) -> None:
    """Draw values; codes of quantised weights are zero, and large tensors on a host stay as they are: in no page."""
    if tensor.device.type == "cpu" and tensor.numel() >= _LARGE:
        return
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize > 1:
        tensor.normal_(0.0, _DEVIATION, generator=generator)
    else:
        tensor.zero_()
