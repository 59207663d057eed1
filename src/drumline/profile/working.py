"""The memory that an action needs only while it runs: logits, a weight that is unpacked for one product, workspaces.

    bytes          ┌──┐
                 ┌─┘  └──┐              the most that is there, above what was there before
    ─────────────┘       └─────         what stays afterwards
             F begins   F ends

An accelerator's allocator knows it. On a host, every tensor that an operation returns counts while it lives; what a
kernel takes and gives back by itself is not seen there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from drumline.model.block import Block
from drumline.model.randomness import Randomness
from drumline.profile.blocks import left_as_it_was
from drumline.profile.chain import Chain
from drumline.runtime.stage import Loss


@dataclass(frozen=True, slots=True)
class Working:
    """The most bytes of each op of a block, above what was there when it began."""

    forward: int = 0
    backward: int = 0
    backward_input: int = 0
    backward_weight: int = 0


def working(
    blocks: Sequence[Block], microbatch: Any, *, device: torch.device, target: Any = None, loss_fn: Loss | None = None,
    split: bool = False, seed: int = 0,
) -> list[Working]:  # fmt: skip
    """Measure every block with one microbatch; with `split`, its halves I and W too. The last includes the loss.

    Gradients are there already, as in all but the first microbatch of a step.

    >>> from torch import nn
    >>> block = Block("up", nn.Linear(4, 1000))
    >>> (found,) = working([block], torch.ones(2, 4), device=torch.device("cpu"), loss_fn=lambda y, _: (y * y).sum())
    >>> found.forward
    16004
    """
    meter = _Allocator() if device.type != "cpu" and _has_counts(device) else _Count()
    randomness = Randomness(seed, device)
    most = [[0, 0, 0, 0] for _ in blocks]
    with left_as_it_was(blocks, randomness):
        for halves in (False, True) if split else (False,):
            chain = Chain([[block] for block in blocks], randomness, loss_fn, split=halves)

            def metered(op: int, index: int, call: Callable[[], Any], first: int = int(halves)) -> Any:
                before = meter.begin()
                result = call()
                if op or not first:  # F of a split backward gives back what the last W left
                    most[index][op + first] = meter.most - before
                return result

            for _ in range(2):  # gradients and workspaces are there in the second
                with meter.watching():
                    chain.run(microbatch, target, metered)
    return [Working(*each) for each in most]


def _has_counts(device: torch.device) -> bool:
    try:
        torch.accelerator.reset_peak_memory_stats(device)
    except RuntimeError:  # its allocator keeps no counts
        return False
    return True


class _Allocator:
    """Asks the accelerator's allocator."""

    watching = nullcontext

    def begin(self) -> int:
        """Forget the most so far; return the bytes that are there now."""
        torch.accelerator.reset_peak_memory_stats()
        return int(torch.accelerator.memory_allocated())

    @property
    def most(self) -> int:
        """The most bytes that were there since."""
        return int(torch.accelerator.max_memory_allocated())


class _Count(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make while it watches, and that are still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0

    def watching(self) -> _Count:
        """Return what counts, as a context."""
        return self

    def begin(self) -> int:
        """Forget the most so far; return the bytes that are there now."""
        self.most = self.now
        return self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # its own operations are counted
        result = func(*args, **(kwargs or {}))
        there = {_place(tensor) for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout is torch.strided and _place(tensor) not in there:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, size)

    def _free(self, size: int) -> None:
        self.now -= size


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else 0
