"""Weight microbatches by what a user's loss function averages over.

Drumline watches the function while it runs on each new kind of microbatch. If it consists of torch's losses, means and
sums, microbatches are weighted by what these count. Otherwise they are weighted by their rows, and the first step's
loss is compared with the function's loss of the whole batch.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from drumline.core.errors import ModelError
from drumline.runtime.loss.counts import Across, Count, Counts, Weighing, labels_counted, mixed_by, watched, weighed
from drumline.runtime.loss.terms import Walk
from drumline.runtime.step import Step
from drumline.runtime.values import joined, pack, unpack

_IGNORED = -100  # the label that torch's losses ignore by default
_AFFORDABLE = 2**26  # most bytes of outputs kept to compare the first step's loss
_NEAR = {torch.float64: 1e-6, torch.float32: 1e-4}
LossFunction = Callable[..., Tensor]


def labels_weight(loss_fn: Any) -> Callable[[Any], Tensor] | None:
    """Return a function that weights a target, if the loss is one of torch's losses over labels (function or module).

    >>> weight = labels_weight(nn.CrossEntropyLoss(ignore_index=0))
    >>> weight(torch.tensor([3, 0, 2]))
    tensor(2)
    """
    given: dict[str, Any] = {}
    while isinstance(loss_fn, functools.partial):
        if loss_fn.args:
            return None
        given = {**loss_fn.keywords, **given}
        loss_fn = loss_fn.func
    if type(loss_fn) in (nn.CrossEntropyLoss, nn.NLLLoss):
        given = {"ignore_index": loss_fn.ignore_index, "weight": loss_fn.weight, "reduction": loss_fn.reduction}
    elif loss_fn not in (functional.cross_entropy, functional.nll_loss):
        return None
    if given.get("reduction", "mean") != "mean":
        return None
    ignored, weight = given.get("ignore_index", _IGNORED), given.get("weight")

    def counted(target: Any) -> Tensor:
        if not isinstance(target, Tensor) or target.is_floating_point():  # chances of classes: every place counts
            return torch.tensor(target.numel() if isinstance(target, Tensor) else len(target))
        return labels_counted(target, ignored, weight)

    return counted


@dataclass(slots=True)
class _Seen:
    """What was seen of the function for one kind of output and target."""

    counts: Counts | None
    num_outputs: int
    walk: Walk
    size: int  # elements of the target

    def is_proportional(self, other: _Seen) -> bool:
        """Whether means are over as many elements for each of the target's as in another kind."""
        pairs = zip(self.walk.terms, other.walk.terms, strict=False)
        means = [(one.num_bytes, two.num_bytes) for one, two in pairs if one.labels is None and one.divided is None]
        return all(one is None or two is None or one * other.size == two * self.size for one, two in means)


class FnWeight:
    """Weights the microbatches of a step by what a loss function was seen to count."""

    def __init__(self, loss_fn: LossFunction) -> None:
        self.loss_fn = loss_fn
        self.across: Across | None = None  # what all lines of a mesh count together
        self.direct = labels_weight(loss_fn)
        self._seen: dict[Any, _Seen] = {}
        self._by_target: dict[Any, _Seen] = {}
        # Whether the count it averages over does not grow with the target, so that other lengths need other weights.
        self.is_uneven = False
        # Whether the function may not work row by row, so that the first step's loss must be compared.
        self.is_doubted = False
        self._warned = False

    def __call__(
        self, targets: Sequence[Any], rows: Sequence[int], sizes: Sequence[int] | None = None
    ) -> Weighing | None:
        """Return the microbatches' shares; None if the function must first be watched on one of them.

        `sizes` are the elements of each target, if microbatches have different lengths.
        """
        if len(targets) == 1 and self.across is None:
            return Weighing([1.0])
        if self.direct is not None:
            return weighed([[_quiet(self.direct(one))] for one in targets], rows, across=self.across)
        seen = [self._by_target.get(_kind(one)) for one in targets]
        found = [one for one in seen if one is not None]
        if not found:
            return None
        # A kind that was not watched differs only in its number of rows, and counts in the same way.
        each = [one or found[0] for one in seen]
        counts = [self._count(one, target, row) for one, target, row in zip(each, targets, sizes or rows, strict=True)]
        if any(one is None for one in counts):
            if sizes is not None and all(one.counts is not None for one in found):
                raise uneven("takes shapes as numbers, and what it counts of another length is not known")
            return weighed([[float(one)] for one in rows], rows, across=self.across)
        made = weighed([one for one in counts if one is not None], rows, across=self.across)
        if made.factors:
            raise ModelError(
                "loss_fn adds means over different counts, and these differ between microbatches",
                expected="means over one count, or a sum",
                fix="pass loss_weight=, a function from a target to its weight, or compute the loss inside the model",
            )
        return made

    def watch(self, loss_fn: LossFunction, output: Any, target: Any) -> Tensor:
        """Call the function, or a copy of it, on a microbatch, and record what it counts."""
        kind = (_kind(output), _kind(target))
        if self.direct is not None or kind in self._seen:
            return loss_fn(output, target)
        loss, graph, num_outputs = watched(loss_fn, output, target)
        if not isinstance(loss, Tensor) or loss.dim() > 0:
            return loss
        walk = Walk(graph, graph.outputs[0], graph.inputs[num_outputs:])
        is_plain = bool(walk.terms) and not walk.others
        self.is_doubted |= not is_plain or bool(mixed_by(walk))
        seen = _Seen(Counts(walk) if is_plain else None, num_outputs, walk, size_of(target))
        self.is_uneven |= any(not seen.is_proportional(one) for one in [*self._seen.values()][:1])
        self._seen[kind] = self._by_target[kind[1]] = seen
        if walk.others and not self._warned:
            self._warn(walk, target)
        return loss

    @property
    def counts_targets(self) -> bool:
        """Whether other targets of the same shapes may have other shares."""
        terms = [term for seen in self._seen.values() for term in seen.walk.terms]
        return not terms or self.direct is not None or any(one.labels or one.divided is not None for one in terms)

    def _count(self, seen: _Seen, target: Any, rows: int) -> list[Count | None] | None:
        if seen.counts is None:
            return None
        tensors = pack(target)[0]
        places = [torch.empty(0)] * seen.num_outputs
        try:
            counted = seen.counts.of([*places, *tensors])
        except (RuntimeError, TypeError, IndexError):
            return None
        return [float(rows) if isinstance(one, int) else one for one in counted]  # rows have equal numbers of elements

    def _warn(self, walk: Walk, target: Any) -> None:
        self._warned = True
        ignores = any(
            not one.is_floating_point() and one.dim() and bool((one == _IGNORED).any()) for one in pack(target)[0]
        )
        if ignores or walk.terms:
            warnings.warn(
                f"loss_fn uses {', '.join(dict.fromkeys(walk.others))}, so Drumline cannot tell what it averages over."
                " It weights microbatches by their rows. Pass loss_weight= if loss_fn ignores some targets",
                stacklevel=2,
            )


class Check:
    """Compares the first step's loss with the function's loss of the whole batch, if the outputs fit in memory."""

    def __init__(self, loss_fn: LossFunction, step: Step, *, is_one_of_several: bool) -> None:
        self.loss_fn = loss_fn
        self.step = step
        self.is_one_of_several = is_one_of_several  # lines of a mesh
        self.outputs: dict[int, Any] = {}
        self.losses: dict[int, Tensor] = {}
        self.num_bytes = 0

    def add(self, microbatch: int, output: Any, loss: Tensor) -> bool:
        """Keep a microbatch's output; compare once all are here. Return whether this is done, or impossible."""
        tensors, form = pack(output)
        self.num_bytes += sum(one.nbytes for one in tensors)
        if self.num_bytes > _AFFORDABLE:
            self.outputs.clear()
            return True
        self.outputs[microbatch] = unpack([one.detach() for one in tensors], form)
        self.losses[microbatch] = loss.detach()
        if len(self.outputs) < len(self.step.targets):
            return False
        self._compare()
        return True

    def _compare(self) -> None:
        order = sorted(self.outputs)
        try:
            with torch.no_grad():
                target = joined(list(self.step.targets)) if self.step.apart else self.step.target
                whole = self.loss_fn(joined([self.outputs[one] for one in order]), target)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return  # the microbatches cannot be merged into a batch
        shares = [float(self.step.shares[one]) for one in order]
        # In a mesh, the shares of this line's microbatches add up to its share of all lines; those of a sum are 1.
        line = sum(shares) if self.is_one_of_several and any(one != 1.0 for one in shares) else 1.0
        parts = sum(float(self.losses[one]) * share / line for one, share in zip(order, shares, strict=True))
        if not abs(parts - float(whole)) <= _NEAR.get(whole.dtype, 2e-2) * max(abs(float(whole)), 1e-8):
            raise ModelError(
                f"the microbatches' losses combine to {parts:.6g}, but loss_fn of the full batch is {float(whole):.6g}",
                expected="a mean or sum over rows; a loss that compares rows with each other needs the whole batch",
                fix="pass loss_weight=, a function from a target to its weight (len, to weight by rows), or use"
                " num_microbatches=1",
            )


def uneven(why: str) -> ModelError:
    """Return the error of a loss that cannot be weighed for microbatches of different lengths."""
    return ModelError(
        f"loss_fn {why}",
        expected="a mean over the target's elements or labels, for microbatches of different lengths",
        fix="pass loss_weight=, what a microbatch's target counts",
    )


def size_of(target: Any) -> int:
    """Return how many elements a target has.

    >>> size_of((torch.ones(2, 3), torch.ones(2)))
    6
    """
    return next((one.numel() for one in pack(target)[0] if one.dim()), 1)


def _quiet(count: Tensor) -> Count:
    return float(count) if count.is_cpu else count


def _kind(value: Any) -> Any:
    tensors, form = pack(value)
    return str(form), tuple((one.shape, one.dtype) for one in tensors)
