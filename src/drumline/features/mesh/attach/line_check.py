"""The check of the first step where lines of a mesh hold parts of the model, or see parts of each sequence.

    axis   the model by itself                    the step                                 compared
    tp     runs with layers gathered              each line has a part of a gradient       that part
    ep     runs with all experts, on the line's   an expert sees tokens of all lines       the sum over lines, its part
           own microbatch
    cp     runs on whole sequences                each line sees a part of each sequence   the sum over lines

All lines call everything here alike, whatever they found by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from drumline.channel.lines.axes import Axes
from drumline.channel.lines.slices import Slice, cut_out, sharded_over, slice_of
from drumline.engine.unsplit.parts import Parts
from drumline.features.mesh import context, sequences
from drumline.features.mesh.experts.parallel import AXIS as EXPERTS
from drumline.features.mesh.experts.parallel import ExpertParallel
from drumline.features.mesh.tensor.layers import TensorParallel
from drumline.model.loss.factors import Factors
from drumline.model.precision import gradient_dtype
from drumline.model.values import mapped, pack

_ALIKE = (EXPERTS, context.AXIS)  # lines along these axes exchange within a microbatch, so all watch the same one


class LineParts(Parts):
    """What the lines of a mesh have parts of, and how to compare it with one process."""

    def __init__(self, axes: Axes, tensors: TensorParallel | None, experts: ExpertParallel | None) -> None:
        super().__init__(axes)
        self._divided = [parallel for parallel in (tensors, experts) if parallel is not None]
        self.divides_sequences = axes.size(context.AXIS) > 1

    @property
    def is_on(self) -> bool:
        """Whether lines have parts of anything."""
        return bool(self._divided) or self.divides_sequences

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Have the model as in one process inside."""
        with ExitStack() as stack:
            for parallel in self._divided:
                stack.enter_context(parallel.whole())
            yield

    def part_of(self, parameter: Tensor, whole: Tensor) -> Tensor:
        """Return of a whole tensor the part that a parameter is of its whole."""
        part = slice_of(parameter)
        return cut_out(whole, part, self.axes) if isinstance(part, Slice) else whole

    def seen_over(self, parameter: Tensor) -> tuple[str, ...]:
        """Return the axes along which each line sees a part of a parameter's gradient in the step."""
        partial: tuple[str, ...] = getattr(parameter, "partial_over", ())
        return (*partial, context.AXIS) if self.divides_sequences else partial

    def is_summed(self, parameter: Tensor) -> bool:
        """Whether tokens of several lines went through what this line holds of a parameter: an expert's."""
        return EXPERTS in sharded_over(parameter)

    def whole_gradient(self, gradient: Tensor | None, parameter: Tensor) -> Tensor:
        """Return the gradient that all lines together saw in the step, on the host."""
        own_gradient = torch.zeros(parameter.shape, dtype=parameter.dtype) if gradient is None else gradient
        return self._summed(own_gradient, parameter, self.seen_over(parameter))

    def wanted(self, whole: Tensor | None, parameter: Tensor) -> tuple[Tensor, bool]:
        """Return an expert's part of what the model gives by itself on all lines, and whether all of these ran it."""
        own_gradient = self.nothing(parameter) if whole is None else whole
        ran = self.axes.summed(torch.tensor([float(whole is not None)], device=parameter.device), EXPERTS)
        total = self._summed(own_gradient, parameter, (EXPERTS,))
        return self.part_of(parameter, total), float(ran) == self.axes.size(EXPERTS)

    def nothing(self, parameter: Tensor) -> Tensor:
        """Return zeros of the shape of all experts, of which a parameter has this line's."""
        part, shape = slice_of(parameter), list(parameter.shape)
        assert isinstance(part, Slice)
        shape[part.dim] *= self.axes.size(part.axis)
        return torch.zeros(shape, dtype=parameter.dtype)

    def _summed(self, own_tensor: Tensor, parameter: Tensor, names: Sequence[str]) -> Tensor:
        # A line without a gradient has zeros of the parameter's dtype; others may have more precise ones.
        alike = own_tensor.to(parameter.device, gradient_dtype(parameter))
        return self.axes.summed(alike, *names).to(own_tensor.device)

    def counts(self, shares: Sequence[Any], device: torch.device) -> list[float]:
        """Return on how many of the lines that exchange within it each microbatch counts."""
        counts = [float(float(share) != 0.0) for share in shares]
        if counts and self.axes.size(*_ALIKE) > 1:
            counts = self.axes.summed(torch.tensor(counts, device=device), *_ALIKE).tolist()
        return counts

    def share(self, own_share: float | Tensor, device: torch.device) -> float:
        """Return what part of the loss whole sequences are, of which each line has a part with its own share."""
        total = self.total(own_share, device)
        # Shares of means add up to at most 1. Sums are added as they are, on every line.
        return 1.0 if total == self.axes.size(context.AXIS) else total

    def factors(self, share: float, own_factors: Factors, device: torch.device) -> Factors:
        """Return the factors of a loss's parts in whole sequences, of which each line has its own in its part."""
        most, count = self.axes.most_counts, len(own_factors)
        # A line without factors, of which every part counts as its share says, does not know how many there are.
        each = [share * float(part) for part in own_factors] or [share] * most
        numbers = [share, float(bool(own_factors)), float(count), *each, *[0.0] * (most - len(each))]
        total, lines, counts, *sums = self.axes.summed(
            torch.tensor(numbers, dtype=torch.float64).to(device), context.AXIS
        ).tolist()
        return [part / total for part in sums[: int(counts / lines)]] if lines else ()

    def total(self, number: float | Tensor, device: torch.device) -> float:
        """Return the sum of a number over the lines that see parts of the same sequences."""
        tensor = torch.as_tensor(number, dtype=torch.float64).reshape(1).to(device)
        return float(self.axes.summed(tensor, context.AXIS))

    def outputs(self, output: Any, whole: Any) -> tuple[Any, Any]:
        """Return of an output and of the whole one what must be equal: this line's part of every sequence.

        A number of a part, such as a model's own loss, is none of the whole; losses are compared by themselves.
        """
        if not self.divides_sequences:
            return output, whole
        own_output = next((tensor for tensor in pack(output)[0] if tensor.dim() > 1), None)
        length = 0 if own_output is None else own_output.shape[1] * self.axes.size(context.AXIS)
        part = sequences.own_part(whole, {length}, self.axes)
        return tuple(
            mapped(each, lambda tensor: tensor if tensor.dim() else torch.zeros(())) for each in (output, part)
        )
