"""Try on a stage whether its blocks compute the same in slices, before a pipeline takes up a program in slices.

    the stage's input ──► whole sequences ──► its output, which goes on
                     └──► in slices ────────► compared with it, and dropped

A rank that failed in the middle of its row would end the run. So whatever goes wrong in slices is noted here, and the
stage goes on with whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from drumline.core.errors import DrumlineError
from drumline.core.slices.division import SliceLengths
from drumline.features.slices.calls import SliceCalls
from drumline.model.patches import put_in
from drumline.model.values import mapped, pack
from drumline.runtime.segment import Segment
from drumline.runtime.stage import Stage

_MOST = 0.1  # however rough the dtype is: another model differs by more


def near(one: Tensor, other: Tensor) -> bool:
    """Whether two results differ by no more than rounding explains, in the dtype in which they are computed.

    >>> near(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001])), near(torch.tensor([1.0]), torch.tensor([1.1]))
    (True, False)
    """
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
        return bool(torch.equal(one, other))
    kind, device = one.dtype, one.device.type
    if torch.is_autocast_enabled(device):
        kind = max(kind, torch.get_autocast_dtype(device), key=lambda dtype: torch.finfo(dtype).eps)
    bound = min(10.0 * torch.finfo(kind).eps ** 0.5, _MOST)
    apart, size = (torch.linalg.vector_norm(tensor.double()) for tensor in (one - other, other))
    return bool(apart <= bound * size)


class StageTrials:
    """Runs the stages of a process on whole sequences of so many tokens, and beside that in slices."""

    def __init__(self, calls: SliceCalls, length: int, num_slices: int) -> None:
        self.reason = ""  # why slices do not compute the same here; empty if they do so far
        self._calls, self._length = calls, length
        self._division = SliceLengths(num_slices)

    @contextmanager
    def on(self, stages: Sequence[Stage]) -> Iterator[None]:
        """Have these stages tried inside; a loss that fails is 0 there."""
        runs = [(vars(segment), "run", self._trying(segment)) for stage in stages for segment in stage.segments]
        losses = [(vars(stage), "loss", self._guarded(stage.loss)) for stage in stages if stage.loss is not None]
        with put_in([*runs, *losses]):
            yield

    def note(self, what: Callable[[], None], where: str = "") -> bool:
        """Do something, and note why it fails, if it does; return whether it was done."""
        try:
            what()
        except Exception as error:  # whatever it is, training does not depend on slices
            said = error.error if isinstance(error, DrumlineError) else f"{type(error).__name__}: {error}"
            self.reason = self.reason or f"{where}{said}"
            return False
        return True

    def _trying(self, segment: Segment) -> Callable[..., Any]:
        run, names = segment.run, ", ".join(name for name, _ in segment.blocks)

        def tried(value: Any, microbatch: int, *more: Any) -> Any:
            if self.reason or self._calls.division.num_slices > 1:
                return run(value, microbatch, *more)
            given = mapped(value, Tensor.clone)  # a block may change its input
            whole = run(value, microbatch, *more)
            try:
                self.note(
                    lambda: self._compare(pack(whole)[0], self._in_slices(run, given, microbatch, more), names),
                    f"{names} in slices: ",
                )
            finally:
                self._calls.division = SliceLengths(1)
                self._calls.clear()
            return whole

        return tried

    def _guarded(self, loss: Callable[[Any, Any], Tensor | None]) -> Callable[[Any, Any], Tensor | None]:
        def guarded(output: Any, target: Any) -> Tensor | None:
            results: list[Tensor | None] = []
            if self.note(lambda: results.append(loss(output, target)), "the loss of slices: "):
                return results[0]
            return torch.zeros((), device=pack(output)[0][0].device)

        return guarded

    def _in_slices(
        self, run: Callable[..., Any], value: Any, microbatch: int, more: tuple[Any, ...]
    ) -> list[Sequence[Tensor]]:
        """Return what the stage passes on for each slice."""
        self._calls.division, count = self._division, self._division.num_slices
        ends = [0, *accumulate(self._division.parts(self._length))]
        parts = [mapped(value, lambda tensor, a=a, b=b: self._part(tensor, a, b)) for a, b in pairwise(ends)]
        return [pack(run(part, microbatch * count + at, *more))[0] for at, part in enumerate(parts)]

    def _part(self, tensor: Tensor, start: int, end: int) -> Tensor:
        return tensor[:, start:end].contiguous() if self._is_sequence(tensor) else tensor

    def _is_sequence(self, tensor: Tensor) -> bool:
        return tensor.dim() > 1 and tensor.shape[1] == self._length

    def _compare(self, whole: Sequence[Tensor], slices: Sequence[Sequence[Tensor]], names: str) -> None:
        if any(len(each) != len(whole) for each in slices):
            self.reason = f"{names} pass on something else in slices"
            return
        for tensor, *parts in zip(whole, *slices, strict=True):
            if not tensor.dim():
                continue  # a loss: those of slices are weighed, and compared as that of the whole batch
            if not near(torch.cat(parts, 1) if self._is_sequence(tensor) else parts[0], tensor):
                self.reason = f"{names} compute something else in slices: other tokens count, beside attention"
