"""The blocks of a model as a chain of stages in one process: a microbatch goes through all of them and back.

    F of block 0, 1, ..., n-1      B (or I) of block n-1, ..., 1, 0      W of block 0, ..., n-1

Each action may be timed, or weighed while it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from drumline.core.prove.frozen import needed
from drumline.core.rules import Backward
from drumline.model.block import Block
from drumline.model.randomness import Randomness
from drumline.model.values import pack
from drumline.runtime.draft import Clock, Draft
from drumline.runtime.stage import Loss, Stage
from drumline.runtime.stash import Scale

_NANO = 1e-9
_MICROBATCH = 0

Gradients = tuple[Tensor | None, ...]
Ops = list[list[float]]  # seconds, by op and stage
Around = Callable[[int, int, Callable[[], Any]], Any]  # runs an action: its op, its stage, the call


class Chain:
    """Stages that make up the model, all in this process."""

    def __init__(
        self,
        stages: Sequence[Sequence[Block]],
        randomness: Randomness,
        loss_fn: Loss | None,
        *,
        split: bool,
        checkpointed: Collection[str] = (),
    ) -> None:
        self.split = split
        last = len(stages) - 1
        kinds = needed([any(block.trains for block in blocks) for blocks in stages])
        self.stages = [
            Stage(
                index,
                blocks,
                randomness,
                checkpointed=checkpointed,
                loss=loss_fn if index == last else None,
                split=(_MICROBATCH,) if split else (),
                kind=kind,
                trained_below=index > kinds.count(Backward.NONE),
            )
            for index, (blocks, kind) in enumerate(zip(stages, kinds, strict=True))
        ]

    def timed(self, value: Any, target: Any, clock: Clock) -> Ops:
        """Take a microbatch through and back; return the seconds of each op, stage by stage."""
        draft = Draft(0)
        table: Ops = [[0.0] * len(self.stages) for _ in range(3 if self.split else 2)]
        order: list[tuple[int, int]] = []
        clock.begin(draft)

        def timed(op: int, index: int, call: Callable[[], Any]) -> Any:
            order.append((op, index))
            draft.starts.append(clock.mark())
            result = call()
            draft.ends.append(clock.mark())
            return result

        self.run(value, target, timed)
        clock.settle(draft, wait=True)
        for (op, index), start, end in zip(order, draft.starts, draft.ends, strict=True):
            table[op][index] = (end - start) * _NANO
        return table

    def run(self, value: Any, target: Any, around: Around) -> None:
        """Take a microbatch through and back, with `around` each action: 0 for F, 1 for B or I, 2 for W."""
        for stage in self.stages:
            stage.begin()
        for stage in self.stages:
            value = around(0, stage.index, partial(stage.forward, _MICROBATCH, value, target))
        gradients = _seed(value)
        for stage in self.passed():
            call = stage.backward_input if self.split else stage.backward
            gradients = around(1, stage.index, partial(call, _MICROBATCH, gradients))
        if self.split:
            for stage in self.trained():
                around(2, stage.index, partial(stage.backward_weight, _MICROBATCH))

    def passed(self) -> list[Stage]:
        """Return the stages that a gradient passes through, the last first."""
        return [stage for stage in reversed(self.stages) if stage.kind is not Backward.NONE]

    def trained(self) -> list[Stage]:
        """Return the stages that have weight gradients."""
        return [stage for stage in self.stages if stage.kind is Backward.WHOLE]

    def weigh(self, value: Any, target: Any) -> list[tuple[int, int, int, int]]:
        """Return each block's bytes: kept from F, kept from I to W, received if a stage begins here, and sent."""
        scales = [Scale([stage]) for stage in self.stages]
        values = [value]  # keep all alive, so that no address is reused
        for stage, scale in zip(self.stages, scales, strict=True):
            scale.ignore(values[0], target)
            with scale.watching():
                values.append(stage.forward(_MICROBATCH, values[-1], target))
        full = _newly([scale.kept_bytes() for scale in scales])
        inputs = [_storages(item) for item in values[:-1]]
        received = [
            sum(size for place, size in taken.items() if place not in new and place not in inputs[0])
            for taken, new in zip(inputs, full, strict=True)
        ]
        gradients = _seed(values[-1])
        for stage in self.passed():
            gradients = stage.backward_input(_MICROBATCH, gradients)
        until = _newly([scale.kept_bytes() for scale in scales])
        for stage in self.trained():
            stage.backward_weight(_MICROBATCH)
        handed_on = [sum(tensor.nbytes for tensor in pack(value)[0]) for value in values[1:]]
        kept_storages, later = ([sum(entry.values()) for entry in each] for each in (full, until))
        return list(zip(kept_storages, later, received, handed_on, strict=True))

    def leaves(
        self, value: Any, target: Any, sizes: Sequence[tuple[int, int, int, int]]
    ) -> tuple[list[int], list[int]]:
        """Return what each recomputed block keeps besides its input, and how much more it holds in B than otherwise.

        `sizes` is the result of `weigh`. Only the last block, which includes the loss, holds more.
        """
        measured, first, scales = [], value, [Scale([stage]) for stage in self.stages]
        for stage, scale in zip(self.stages, scales, strict=True):
            scale.begin(first, target)
            with scale.watching():
                value = stage.forward(_MICROBATCH, value, target)
            measured.append(scale.weigh())
        more, last, scale = [0] * len(self.stages), self.stages[-1], scales[-1]
        if last.kind is Backward.WHOLE:
            scale.begin(first, target)
            with scale.watching():
                last.backward(_MICROBATCH, _seed(value))
            kept_bytes, _, start, _ = sizes[-1]
            received = sizes[-2][3] if len(sizes) > 1 else 0
            more[-1] = max(scale.peak + received - kept_bytes - start, 0)
        for stage in self.stages:
            stage.begin()
        return measured, more


def _newly(kept_storages: Sequence[dict[int, int]]) -> list[dict[int, int]]:
    """Return, for each block, the storages that no earlier block keeps."""
    seen_places: set[int] = set()
    new_storages = []
    for entry in kept_storages:
        new_storages.append({place: size for place, size in entry.items() if place not in seen_places})
        seen_places.update(entry)
    return new_storages


def _storages(value: Any) -> dict[int, int]:
    """Return the bytes of each storage inside a value, by address."""
    storages = (tensor.untyped_storage() for tensor in pack(value)[0])
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def _seed(output: Any) -> Gradients:
    """Return a gradient for everything that the last block returns."""
    return tuple(torch.ones_like(tensor) if tensor.is_floating_point() else None for tensor in pack(output)[0])
