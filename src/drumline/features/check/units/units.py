"""Which units of a step form a microbatch, and what these made of it together.

    microbatches     0            1                  the model by itself runs these
    units            0  1  2  3   4  5  6  7         the step runs these: 4 slices of each

Without slices a microbatch is its own unit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drumline.model.loss.factors import Factors
from drumline.model.values import pack
from drumline.runtime.step import Step


@dataclass(frozen=True, slots=True)
class Units:
    """So many units, from `first` on, which are one microbatch.

    >>> list(Units(8, 4).numbers), Units(3).are_several
    ([8, 9, 10, 11], False)
    """

    first: int
    count: int = 1

    @property
    def numbers(self) -> range:
        """The numbers of the units."""
        return range(self.first, self.first + self.count)

    @property
    def are_several(self) -> bool:
        """Whether the microbatch runs in more than one unit."""
        return self.count > 1

    def share(self, step: Step) -> float:
        """Return what part of the batch's loss they are together: at most all of it, which a sum is in every unit."""
        total = sum(float(step.shares[number]) for number in self.numbers)
        return min(total, 1.0) if self.are_several else total

    def loss(self, step: Step) -> Tensor:
        """Return the microbatch's loss in the step, on the host."""
        first = step.losses[self.first].detach().cpu()
        share = self.share(step)
        if not self.are_several or not share:
            return first
        parts = [(float(step.shares[number]), step.losses[number]) for number in self.numbers]
        total = sum(part * float(loss.detach()) for part, loss in parts if part)  # the mean over nothing is NaN
        return torch.tensor(total / share, dtype=first.dtype)

    def factors(self, step: Step, factors_of: Mapping[int, Factors]) -> Factors:
        """Return the factors of the parts of a model's own loss, if one share is not enough for all of them.

        A unit without factors counts every part as its share says.
        """
        most = max((len(each) for each in factors_of.values()), default=0)
        if not self.are_several or not most:
            return factors_of.get(self.first, ())
        sums = [0.0] * most
        for number in self.numbers:
            own_share = float(step.shares[number])
            for at, factor in enumerate(factors_of.get(number) or [1.0] * most):
                sums[at] += own_share * float(factor)
        share = self.share(step)
        return [part / share for part in sums] if share else ()

    def outputs(self, outputs: Mapping[int, Any], whole: Any) -> tuple[Any, Any]:
        """Return of the units' outputs and of the microbatch's what must be equal: tensors with a place for each token.

        Of a microbatch with fewer tokens, these are the first.

        >>> parts = {0: torch.zeros(2, 3, 5), 1: torch.ones(2, 1, 5)}
        >>> [each[0].shape for each in Units(0, 2).outputs(parts, torch.zeros(2, 4, 5))]
        [torch.Size([2, 4, 5]), torch.Size([2, 4, 5])]
        """
        if not self.are_several:
            return outputs.get(self.first), whole
        if any(number not in outputs for number in self.numbers):
            return None, None
        each = [pack(outputs[number])[0] for number in self.numbers]
        lengths = [next((tensor.shape[1] for tensor in tensors if tensor.dim() > 2), 0) for tensors in each]
        joined, wanted = [], []
        for tensors, other in zip(zip(*each, strict=False), pack(whole)[0], strict=False):
            if _are_parts(tensors, lengths):
                joined.append(torch.cat(tensors, 1)[:, : other.shape[1]])
                wanted.append(other)
        return tuple(joined), tuple(wanted)


def _are_parts(tensors: Sequence[Tensor], lengths: Collection[int]) -> bool:
    """Whether tensors of consecutive units have a place for each token of theirs."""
    return all(tensor.dim() > 1 and tensor.shape[1] == length for tensor, length in zip(tensors, lengths, strict=True))
