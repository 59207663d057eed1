"""Measure a model by slice length: steps of one rank, whole and in slices, each action timed by the pipeline itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from drumline.core.action import Op
from drumline.core.errors import BatchError
from drumline.pipeline.pipeline import Pipeline
from drumline.plan.device.slice_profile import SliceProfile, TimedSlice
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
    """Return what slices of sequences take: F and B of the whole model, for equal slices of these numbers.

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
    with _KeysAndValues() as attention, torch.no_grad():
        model(**batch)
    for count in dict.fromkeys([1, *slices]):
        if length % count == 0 and length >= 2 * count:
            timed += _timed(model, batch, target, loss_fn, count, length, num_runs, device)
    return SliceProfile(rows, length, tuple(timed), float(attention.num_bytes))


def _timed(
    model: nn.Module,
    batch: Mapping[str, Any],
    target: Tensor,
    loss_fn: Callable[..., Tensor],
    count: int,
    length: int,
    num_runs: int,
    device: torch.device | str | None,
) -> list[TimedSlice]:
    """Return the medians of the slices of so many equal ones."""

    def twice(value: Any) -> Any:
        return torch.cat([value, value]) if sequences_in(value) else value

    with Pipeline(
        model,
        loss_fn=loss_fn,
        schedule="1f1b",
        num_microbatches=2,
        num_ranks=1,
        transport="in-process",
        slices=count,
        balance="even",
        device=device,
        example={name: twice(value) for name, value in batch.items()},
    ) as pipe:
        seconds: dict[tuple[Op, int], list[float]] = {}  # of the second microbatch: a step's first action takes longer
        for turn in range(_WARM_UPS + num_runs):
            pipe.step(target=twice(target), **{name: twice(value) for name, value in batch.items()})
            if turn >= _WARM_UPS:
                (track,) = pipe.timeline().tracks
                for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
                    seconds.setdefault((action.op, (action.microbatch or 0) - count), []).append(end - start)
            pipe.settle()
            pipe.zero_grad()
    each = length // count
    return [
        TimedSlice(
            number * each,
            (number + 1) * each,
            median(seconds[Op.FORWARD, number]),
            median(seconds[Op.BACKWARD, number]),
        )
        for number in range(count)
    ]


class _KeysAndValues(TorchFunctionMode):
    """Counts the bytes of keys and values that attention gets."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is functional.scaled_dot_product_attention:
            named = dict(zip(("query", "key", "value"), args, strict=False)) | (kwargs or {})
            self.num_bytes += named["key"].nbytes + named["value"].nbytes
        return function(*args, **(kwargs or {}))
