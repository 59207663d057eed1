"""Measure a model by slice length: steps of one rank, whole and in slices, each action timed by the pipeline itself.

    all blocks in one stage           what slices of the model take
    every block in a stage            what slices of each block take, with the call of a stage; one kind has one median

Blocks of a kind have the same code, and parameters of the same names and shapes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.action import Op
from drumline.core.errors import BatchError
from drumline.engine.model.blocks import blocks_for
from drumline.pipeline.pipeline import Pipeline
from drumline.plan.device.slice_profile import SliceProfile, TimedSlice
from drumline.plan.slices.lengths_search import FAMILIES
from drumline.profile.keys_and_values import AttentionCalls
from drumline.runtime.sequences import Divider, positions_of, sequences_in

_WARM_UPS = 2
_DIVIDER = Divider("slices divide", "no slices")


def profile_slices(
    model: nn.Module,
    batch: Mapping[str, Any],
    target: Tensor,
    *,
    loss_fn: Callable[..., Tensor],
    slices: Sequence[int] = (2, 4, 8),
    num_runs: int = 5,
    device: torch.device | str | None = None,
) -> SliceProfile:
    """Return what slices of sequences take: F and B of the model and of its blocks, for equal slices of these numbers.

    `batch` is one microbatch of whole sequences, as a step takes it by name, with one row for each. Whole sequences are
    measured too.
    """
    lead = next(iter(sequences_in(*batch.values())), None)
    if lead is None:
        raise BatchError("the batch has no sequences", expected="a tensor with rows of tokens")
    rows, length = int(lead.shape[0]), int(lead.shape[1])
    timed: list[TimedSlice] = []
    place = positions_of(model, _DIVIDER)
    batch = {place.name: torch.arange(length, device=lead.device)[None].expand(rows, -1), **batch}
    with AttentionCalls() as attention, torch.no_grad():
        model(**batch)
    run = _Timing(model, batch, target, loss_fn, length, num_runs, device)
    blocks = run.kinds()
    by_kind: list[list[TimedSlice]] = [[] for _ in range(max(blocks) + 1)]
    for count in dict.fromkeys([1, *slices]):
        if length % count == 0 and length >= 2 * count:
            timed += run.timed(count, [0])[0]
            for at, known in enumerate(run.timed(count, blocks)):
                by_kind[at] += known
    return SliceProfile(rows, length, tuple(timed), float(attention.num_bytes), blocks, tuple(map(tuple, by_kind)))


@dataclass(frozen=True)
class _Timing:
    """Steps of one model on one batch."""

    model: nn.Module
    batch: Mapping[str, Any]
    target: Tensor
    loss_fn: Callable[..., Tensor]
    length: int
    num_runs: int
    device: torch.device | str | None

    @cached_property
    def example(self) -> dict[str, Any]:
        """The batch twice, as two microbatches."""
        return {name: _twice(value) for name, value in self.batch.items()}

    def kinds(self) -> tuple[int, ...]:
        """Return the kind of each block; the last has the loss, and is of a kind of its own."""
        device = torch.device("cpu" if self.device is None else self.device)
        blocks = blocks_for(self.model, self.example, device, num_microbatches=2)
        numbers: dict[Any, int] = {}
        each = []
        for at, block in enumerate(blocks):
            module, is_last = block.module, at == len(blocks) - 1
            layers = tuple(type(layer) for layer in module.modules())
            sizes = tuple(param.shape for param in module.parameters())
            each.append(numbers.setdefault((is_last, layers, sizes), len(numbers)))
        return tuple(each)

    def timed(self, count: int, stages: Sequence[int]) -> list[list[TimedSlice]]:
        """Return the medians of so many equal slices by the kind of stage; a step has stages of these kinds."""
        seconds: dict[tuple[Op, int, int], list[float]] = defaultdict(list)
        with Pipeline(
            self.model,
            loss_fn=self.loss_fn,
            schedule=FAMILIES["loop" if len(stages) > 1 else "linear"],
            num_microbatches=2,
            num_ranks=1,
            stages_per_rank=len(stages),
            transport="in-process",
            slices=count,
            balance="even",
            device=self.device,
            example=self.example,
        ) as pipe:
            for turn in range(_WARM_UPS + self.num_runs):
                pipe.step(target=_twice(self.target), **self.example)
                if turn >= _WARM_UPS:
                    (track,) = pipe.timeline().tracks
                    for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
                        number = (action.microbatch or 0) - count
                        if number >= 0:  # of the second microbatch: a step's first action takes longer
                            seconds[action.op, stages[action.stage], number].append(end - start)
                pipe.settle()
                pipe.zero_grad()
        each = self.length // count
        return [
            [
                TimedSlice(
                    number * each,
                    (number + 1) * each,
                    median(seconds[Op.FORWARD, kind, number]),
                    median(seconds[Op.BACKWARD, kind, number]),
                )
                for number in range(count)
            ]
            for kind in range(max(stages) + 1)
        ]


def _twice(value: Any) -> Any:
    return torch.cat([value, value]) if sequences_in(value) else value
