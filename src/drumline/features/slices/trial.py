"""Try whether stages compute the same in slices, before a pipeline takes up a program in slices.

    forwards of a step, whole       a stage's output for the first microbatch is kept
    the same in slices              each slice's output is compared with its part of that

A rank that failed in the middle of its row would end the run. So whatever goes wrong in slices is noted here, and the
stage passes on what it would of whole sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate
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


def near(result: Tensor, wanted: Tensor) -> bool:
    """Whether two results differ by no more than rounding explains, in the dtype in which they are computed.

    >>> near(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0001])), near(torch.tensor([1.0]), torch.tensor([1.1]))
    (True, False)
    """
    if result.shape != wanted.shape:
        return False
    if not result.is_floating_point():
        return bool(torch.equal(result, wanted))
    kind, device = result.dtype, result.device.type
    if torch.is_autocast_enabled(device):
        kind = max(kind, torch.get_autocast_dtype(device), key=lambda dtype: torch.finfo(dtype).eps)
    bound = min(10.0 * torch.finfo(kind).eps ** 0.5, _MOST)
    error, size = (torch.linalg.vector_norm(tensor.double()) for tensor in (result - wanted, wanted))
    return bool(error <= bound * size)


class StageTrials:
    """What the stages of a process pass on of whole sequences of so many tokens, and why slices are not like it."""

    def __init__(self, calls: SliceCalls, length: int, num_slices: int) -> None:
        self.reason = ""  # why slices do not compute the same here; empty if they do so far
        self._calls, self._length = calls, length
        self._num_slices = num_slices
        self._wholes: dict[Segment, Any] = {}  # outputs for the first microbatch

    @contextmanager
    def on(self, stages: Sequence[Stage]) -> Iterator[None]:
        """Have these stages tried inside; a loss that fails is 0 there."""
        runs = [(vars(segment), "run", self._trying(segment)) for stage in stages for segment in stage.segments]
        losses = [(vars(stage), "loss", self._guarded(stage.loss)) for stage in stages if stage.loss is not None]
        with put_in([*runs, *losses]):
            yield

    def note(self, what: Callable[[], Any], where: str = "") -> list[Any]:
        """Do something and return its result in a list; if it fails, note why and return nothing."""
        try:
            return [what()]
        except Exception as error:  # whatever it is, training does not depend on slices
            said = error.error if isinstance(error, DrumlineError) else f"{type(error).__name__}: {error}"
            self.reason = self.reason or f"{where}{said}"
            return []

    def _trying(self, segment: Segment) -> Callable[..., Any]:
        run, names = segment.run, ", ".join(name for name, _ in segment.blocks)

        def tried(value: Any, microbatch: int, *more: Any) -> Any:
            if self._calls.division.num_slices == 1:
                output = run(value, microbatch, *more)
                if microbatch == 0:
                    self._wholes[segment] = mapped(output, Tensor.clone)  # the next block may change it
                return output
            part = partial(mapped, self._wholes[segment], self._part_of(microbatch % self._num_slices))
            outputs = self.note(lambda: run(value, microbatch, *more), f"{names} in slices: ")
            if outputs and microbatch < self._num_slices and not self._are_near(outputs[0], part()):
                self.reason = self.reason or (
                    f"{names} compute something else in slices: other tokens count, beside attention"
                )
            return outputs[0] if outputs else part()

        return tried

    def _guarded(self, loss: Callable[[Any, Any], Tensor | None]) -> Callable[[Any, Any], Tensor | None]:
        def guarded(output: Any, target: Any) -> Tensor | None:
            results = self.note(lambda: loss(output, target), "the loss of slices: ")
            return results[0] if results else torch.zeros((), device=pack(output)[0][0].device)

        return guarded

    def _part_of(self, number: int) -> Callable[[Tensor], Tensor]:
        """Return what cuts a slice out of a tensor that has sequences."""
        ends = [0, *accumulate(SliceLengths(self._num_slices).parts(self._length))]

        def part(tensor: Tensor) -> Tensor:
            has_sequences = tensor.dim() > 1 and tensor.shape[1] == self._length
            return tensor[:, ends[number] : ends[number + 1]] if has_sequences else tensor

        return part

    @staticmethod
    def _are_near(output: Any, whole: Any) -> bool:
        """Whether each tensor of an output is in another one, in any order; a loss is weighed, and compared as one."""
        wanted = [tensor for tensor in pack(whole)[0] if tensor.dim()]
        return all(any(near(tensor, known) for known in wanted) for tensor in pack(output)[0] if tensor.dim())
