"""Measure the blocks of a model for a forecast: one of each kind, with no more memory than these few need.

    all blocks ──► kinds ──► a few blocks, with memory ──► seconds, bytes kept, bytes while they run ──► all blocks

On a host, large products are computed once for each shape (`profile/once.py`). Weights of models on the meta device are
stand-ins (`stand_ins.py`): nothing is read from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import UsageError
from drumline.model.block import Block
from drumline.model.precision import Precision, casts_kept
from drumline.model.quantised.packed import parts_of
from drumline.model.quantised.placing import to_device
from drumline.model.randomness import Randomness
from drumline.model.values import pack
from drumline.plan.device.blocks import Profile
from drumline.profile.blocks import profile, tied
from drumline.profile.keys_and_values import keys_and_values
from drumline.profile.kinds import Kinds, kinds_of
from drumline.profile.once import Once, OwedClock
from drumline.profile.working import Working, working
from drumline.runtime.stage import Stage
from drumline.train.memory.host_room import check_room, rooms_fix
from drumline.train.memory.stand_ins import is_on_meta, stand_ins

Tell = Callable[[str], None]
_RUNS, _SECONDS = 3, 2.0  # for the simulated step; bytes are the same in every run


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """What the blocks of a model take; `cast` are bytes of weights that autocast casts once for all microbatches.

    `keys` are the bytes of a microbatch's keys and values by block, where sequences run in slices.
    """

    profile: Profile
    working: tuple[Working, ...]
    cast: Mapping[str, int]
    keys: Mapping[str, int]


def silent(text: str) -> None:
    """Tell nobody."""


def measured(
    blocks: Sequence[Block], microbatch: Any, *, device: torch.device, precision: Precision, split: bool,
    sliced: bool = False, root: nn.Module | None = None, by_kind: bool = True, tell: Tell = silent, **how: Any,
) -> MeasuredMemory:  # fmt: skip
    """Measure blocks with one microbatch; `how` is the target and the loss that the last one includes.

    Where sequences are `sliced`, keys and values are counted too.
    """
    ties, is_meta = tied(blocks), is_on_meta(blocks)
    # A cast that blocks share would be counted for the first of them alone.
    uncached = precision.uncached() if is_meta else precision.autocast
    once: Any = Once() if by_kind and device.type == "cpu" else nullcontext()
    runs: dict[str, Any] = {"num_runs": _RUNS, "max_seconds": _SECONDS}
    with stand_ins(blocks, root, device) if is_meta else nullcontext(), _refusing(device):
        with uncached, once:
            kinds = _kinds(blocks, microbatch, device, by_kind=by_kind, tell=tell)
        check_room(kinds.held_bytes, device)
        if isinstance(once, Once) and once.is_used:
            runs = {"quick": True, "clock": OwedClock(once)}
        else:
            once = nullcontext()
        chain = kinds.measured
        tell(f"measuring {len(chain)} of {len(blocks)} blocks, one or two of each kind ...")
        with uncached, once:
            sizes = profile(chain, microbatch, **runs, **how)
        with once:
            sizes, cast = _without_casts(sizes, chain, microbatch, precision)
            keys = keys_and_values(chain, microbatch, precision=precision) if sliced else {}
        tell("measuring what each needs while it runs ...")
        with precision.autocast, once:
            needs = working(chain, microbatch, device=device, split=split, **how)
    sizes = kinds.profile(sizes)
    layers = tuple(replace(layer, tied=own_ties) for layer, own_ties in zip(sizes.layers, ties, strict=True))
    of_all = replace(sizes, layers=layers)
    return MeasuredMemory(of_all, tuple(kinds.working(needs)), kinds.by_name(cast), kinds.by_name(keys))


def _kinds(blocks: Sequence[Block], microbatch: Any, device: torch.device, *, by_kind: bool, tell: Tell) -> Kinds:
    """Return the kinds of blocks, with those that are measured on the device."""

    def before(block: Block, held_bytes: int) -> None:
        check_room(held_bytes, device)
        tell(f"looking at {block.name} ...")
        to_device(block.module, device)

    if by_kind:
        return kinds_of(blocks, microbatch, device, before=before)
    for block in blocks:
        to_device(block.module, device)
    return Kinds.each(blocks)


@contextmanager
def _refusing(device: torch.device) -> Iterator[None]:
    """Refuse in one line what does not fit on an accelerator."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"this machine's {device.type} ran out of memory while blocks were measured", fix=rooms_fix(device)
        ) from error


def _without_casts(
    sizes: Profile, blocks: Sequence[Block], microbatch: Any, precision: Precision
) -> tuple[Profile, dict[str, int]]:
    """Return the profile without weights that autocast has cast, and these by block: microbatches share them."""
    if precision.dtype is None:
        return sizes, {}
    shared = dict(_shared(blocks, microbatch, precision))
    layers = (replace(p, activation_bytes=max(p.activation_bytes - shared.get(p.name, 0), 0)) for p in sizes.layers)
    return replace(sizes, layers=tuple(layers)), shared


def _shared(blocks: Sequence[Block], microbatch: Any, precision: Precision) -> Iterator[tuple[str, int]]:
    """Yield the bytes of each block that two microbatches keep in common for their backwards."""
    value, device = microbatch, next((tensor.device for tensor in pack(microbatch)[0]), torch.device("cpu"))
    randomness = Randomness(0, device)
    with randomness.kept_aside(), casts_kept():
        for index, block in enumerate(blocks):
            stage = Stage(index, [block], randomness, precision=precision)
            stage.begin()
            (first, outputs), (second, _) = (_saved(stage, number, value) for number in (0, 1))
            tensors = (*block.module.parameters(), *block.module.buffers(), *pack(value)[0])
            own_places = {part.untyped_storage().data_ptr() for tensor in tensors for part in parts_of(tensor).values()}
            yield block.name, sum(size for place, size in first.items() if place in second and place not in own_places)
            value = outputs


def _saved(stage: Stage, microbatch: int, value: Any) -> tuple[dict[int, int], Any]:
    """Return the bytes of every storage that autograd keeps of a forward, by its place, and what it made."""
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = stage.forward(microbatch, value)
    return sizes, output
