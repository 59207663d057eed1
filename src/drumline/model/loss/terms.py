"""The parts of a loss, found from the calls that compute it: a sum of means and sums.

    cross_entropy(logits, labels) ──► 7 ──┐
                                          add ──► 12 ──► the loss        two means, over different things
    mse_loss(scores, wanted) ──► 9 ── mul ┘

The mean over a batch is the mean of its microbatches' means, each weighted by what it counts. So from the loss back
through sums and constant factors, every part must end in a call that says what it is a mean or a sum of. Such calls are
torch's losses, `mean`, `sum`, or a sum divided by a count of the inputs. Anything else that is found is named.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.nn import functional

from drumline.model.graph.graph import Call, CallGraph
from drumline.model.loss.calls import BY_LABEL, Elements, Labels, Ref, Tally, arguments_of, bound, labels_in, name_of

_PASSED_ON = {
    "to", "float", "double", "half", "bfloat16", "type", "type_as", "clone", "contiguous", "squeeze", "view", "reshape",
    "detach", "neg", "__neg__", "cpu", "cuda",
}  # fmt: skip
_SUMS = {
    "add", "__add__", "__radd__", "add_", "__iadd__", "sub", "__sub__", "__rsub__", "rsub", "sub_", "__isub__", "stack",
    "cat",
}  # fmt: skip
_PRODUCTS = {"mul", "__mul__", "__rmul__", "mul_", "__imul__", "multiply"}
_QUOTIENTS = {"div", "__truediv__", "true_divide", "div_", "__itruediv__", "divide"}
_LINEAR = {
    "flatten",
    "masked_fill",
    "__getitem__",
    "masked_select",
    "sum",
    "transpose",
    "permute",
    "unsqueeze",
    "where",
}
_COUNTS = _PASSED_ON | _PRODUCTS | {"add", "__add__", "__radd__", "clamp", "clamp_min", "maximum", "max", "clip"}
_POWERS = {"sub", "__sub__", "rsub", "__rsub__", "pow", "__pow__", "square", "abs"}
_SCALAR = 8  # most bytes of one number
_BY_ELEMENT = (
    functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss,
    functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits, functional.kl_div,
    functional.soft_margin_loss, functional.gaussian_nll_loss, functional.poisson_nll_loss,
    functional.hinge_embedding_loss, functional.margin_ranking_loss, functional.cosine_embedding_loss,
    functional.triplet_margin_loss, functional.multi_margin_loss, functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss, functional.ctc_loss,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Term:
    """One part of a loss: the call that computes it, and what it is a mean over; a sum if nothing."""

    call: int
    labels: Labels | None = None
    divided: int | Elements | None = None  # the count by which a sum is divided
    num_bytes: int | None = None  # of the elements that it averages
    data: tuple[int, ...] = ()  # the values from which it is computed
    factor: float = 1.0  # the product of the numbers that it is multiplied by on the way to the loss
    is_uneven: bool = False  # whether it averages over rows that a mask picks, so that `num_bytes` is none of theirs

    @property
    def tally(self) -> Tally | None:
        """What it says that it is a mean over, unless that is elements."""
        return self.divided if self.labels is None else self.labels

    @property
    def is_sum(self) -> bool:
        """Whether the microbatches' values are simply added."""
        return self.tally is None and self.num_bytes is None


class Walk:
    """The path back from a graph's loss: its parts, and the names of calls that are neither a mean nor a sum.

    `fixed` are inputs that are the same in all microbatches, `known` those known before the step.
    """

    def __init__(self, graph: CallGraph, loss: int, known: Collection[int], fixed: Collection[int] = ()) -> None:
        self.graph = graph
        self.known = set(known)
        self.fixed = set(fixed)
        self.changes: dict[int, list[int]] = {}
        for at, call in enumerate(graph.calls):
            for value in call.changes:
                self.changes.setdefault(value, []).append(at)
        self._changed_storages = {graph.values[value].storage for value in self.changes}
        self.has_constant = False
        self.terms: list[Term] = []
        self.others: list[str] = []
        self.has_numbers = False  # whether anything was multiplied or divided by a number, which may be that of rows
        self._factor = 1.0  # on the way from the loss to where the walk is
        self._fixed: dict[int, bool] = {}  # what was asked before
        self._known: dict[int, bool] = {}
        self._value(loss)
        if self.has_constant and any(term.is_sum for term in self.terms):
            self.others.append("a constant beside a sum")  # would be added once per microbatch

    def _value(self, value: int, factor: float = 1.0) -> None:
        before = self._factor
        self._factor *= factor * self._multiplied_in_place(value)
        self._follow(value)
        self._factor = before

    def _multiplied_in_place(self, value: int) -> float:
        calls = (self.graph.calls[at] for at in self.changes.get(value, ()))
        return math.prod(self._number_in(call) for call in calls if name_of(call) in _PRODUCTS | _QUOTIENTS)

    def _follow(self, value: int) -> None:
        for at in self.changes.get(value, ()):
            self._changed(at, value)
        if value not in self.changes and self.is_fixed(value):
            self.has_constant = True  # a penalty on parameters
            return
        maker = self.graph.made_at.get(value, -1)
        if maker >= 0:
            # Zeros to which a loss is added depend on nothing.
            if value not in self.changes or self.graph.calls[maker].takes:
                self._call(maker)
        elif self.graph.is_carried(value):
            self.others.append("an input")

    def _changed(self, at: int, value: int) -> None:
        call = self.graph.calls[at]
        if name_of(call) in _SUMS:
            for number in call.takes:
                if number != value:
                    self._value(number)
        elif name_of(call) not in _PRODUCTS | _QUOTIENTS or any(not self.is_fixed(number) for number in call.takes[1:]):
            self.others.append(name_of(call))

    def _call(self, at: int) -> None:
        call = self.graph.calls[at]
        name = name_of(call)
        term = None if call.block else self._term(at)
        if term is not None:
            inside = math.prod(self._inside(number) for number in term.data[:1])
            self.terms.append(replace(term, factor=self._factor * inside))
        elif call.block:
            self.others.append(name)
        elif name in _PASSED_ON or name in _SUMS or (name in ("mean", "sum") and self._is_of_losses(call)):
            for number in call.takes:
                self._value(number, 1 / len(self._stacked(call)) if name == "mean" else 1.0)
        elif name in _PRODUCTS | _QUOTIENTS:
            varying = [number for number in call.takes if not self.is_fixed(number)]
            if len(varying) == 1 and (name in _PRODUCTS or call.takes[0] == varying[0]):
                self._value(varying[0], self._number_in(call))
            else:
                self.others.append(name)
        else:
            self.others.append(name)

    def _number_in(self, call: Call) -> float:
        """Return the number by which a call multiplies, whatever it divides by too; 1 for one that is not known."""
        args, kwargs = arguments_of(call)
        numbers = []
        for argument in (*args, *kwargs.values()):
            if isinstance(argument, Ref):
                argument = self._number_of(argument.value)
            if isinstance(argument, int | float) and not isinstance(argument, bool) and argument:
                numbers.append(float(argument))
        self.has_numbers |= bool(numbers)
        product = math.prod(numbers)
        return 1 / product if name_of(call) in _QUOTIENTS else product

    def _inside(self, value: int) -> float:
        """Return the number that all elements are multiplied by before a part adds them up."""
        factor = 1.0
        while (maker := self.graph.made_at.get(value, -1)) >= 0 and value not in self.changes:
            call = self.graph.calls[maker]
            name = name_of(call)
            varying = [number for number in call.takes if not self.is_known(number) and not self.is_fixed(number)]
            if len(varying) != 1 or name not in _PASSED_ON | _PRODUCTS | _QUOTIENTS | _LINEAR:
                break
            if name in _PRODUCTS | _QUOTIENTS:
                factor *= self._number_in(call)
            value = varying[0]
        return factor

    def numbers(self, term: Term) -> list[float]:
        """Return the numbers by which elements are multiplied on the way to a part."""
        calls = sorted(set(self.data_calls(term)))
        named = [self.graph.calls[at] for at in calls]
        return [self._number_in(call) for call in named if name_of(call) in _PRODUCTS | _QUOTIENTS]

    def _number_of(self, value: int) -> Any:
        """Return the number that was made a tensor of: torch.tensor(len(labels))."""
        maker = self.graph.made_at.get(value, -1)
        if maker < 0 or self.graph.calls[maker].takes or value in self.changes:
            return None
        return next((at for at in arguments_of(self.graph.calls[maker])[0] if isinstance(at, int | float)), None)

    def _stacked(self, call: Call) -> tuple[int, ...]:
        """Return the losses over which a mean is taken."""
        return self.graph.calls[self.graph.made_at[call.takes[0]]].takes

    def _term(self, at: int) -> Term | None:
        """Return the term that a call computes, if it says what it is a mean or a sum of."""
        call = self.graph.calls[at]
        name = name_of(call)
        if call.function in BY_LABEL or call.function in _BY_ELEMENT:
            return self._of_torch(at, call)
        if name in ("mean", "sum") and call.takes and not self._is_of_losses(call):
            data = (call.takes[0],)
            if name == "sum":
                return Term(at, data=data)
            return self._by_element(Term(at, num_bytes=self.graph.values[call.takes[0]].num_bytes, data=data), call)
        if name in _QUOTIENTS and len(call.takes) == 2 and not self.is_fixed(call.takes[1]):
            return self._quotient(at, call)
        return None

    def _is_of_losses(self, call: Call) -> bool:
        """Whether a mean or sum is taken over a few losses that were combined."""
        maker = self.graph.made_at.get(call.takes[0], -1) if call.takes else -1
        if maker < 0 or name_of(self.graph.calls[maker]) not in ("stack", "cat"):
            return False
        return all(self.graph.values[number].num_bytes <= _SCALAR for number in self.graph.calls[maker].takes)

    def _quotient(self, at: int, call: Call) -> Term | None:
        """Return the term of a sum divided by a sum over the inputs: a mean over what that counts."""
        top, bottom = call.takes
        count = self._count(bottom) if self.is_known(bottom) else None
        if count is None:
            return None
        above = Walk(self.graph, top, self.known, self.fixed)
        if above.others or not above.terms or not all(term.is_sum for term in above.terms):
            return None
        return Term(at, divided=count, data=tuple(value for term in above.terms for value in term.data))

    def _count(self, value: int) -> int | None:
        """Return the sum that a value is, up to factors and a minimum; None if it is not a sum."""
        maker = self.graph.made_at.get(value, -1)
        if maker < 0 or value in self.changes:
            return None
        call = self.graph.calls[maker]
        if name_of(call) in ("sum", "count_nonzero"):
            return value
        varying = [number for number in call.takes if not self.is_fixed(number)]
        return self._count(varying[0]) if name_of(call) in _COUNTS and len(varying) == 1 else None

    def _of_torch(self, at: int, call: Call) -> Term | None:
        """Return the term of one of torch's losses."""
        arguments = bound(call)
        if arguments is None or arguments.get("size_average") is not None or arguments.get("reduce") is not None:
            return None
        data = tuple(number for number in call.takes if not self.is_known(number) and not self.is_fixed(number))
        reduction = arguments.get("reduction", "mean")
        if reduction == "sum":
            return Term(at, data=data)
        if reduction not in ("mean", "batchmean"):
            return None
        first = call.takes[0]
        by_element = Term(at, num_bytes=self.graph.values[first].num_bytes, data=data)
        if call.function in _BY_ELEMENT:
            return self._by_element(by_element, call)
        labels = labels_in(call, self.is_known, self.is_fixed)
        if labels is None:
            return None
        return replace(by_element, labels=labels, is_uneven=self.graph.values[first].is_uneven)

    def _by_element(self, term: Term, call: Call) -> Term | None:
        """Return the term of a mean over elements; None if a mask picks these, and nothing says how many they are."""
        if not self.graph.values[call.takes[0]].is_uneven:
            return term
        count = self._picked(call.takes)
        return None if count is None else replace(term, divided=count, is_uneven=True)

    def _picked(self, values: Collection[int]) -> int | Elements | None:
        """Return what tells how many rows a mask picks: the mask, or known values that are picked alike."""
        uneven = [value for value in values if self.graph.values[value].is_uneven]
        for value in uneven:
            if self.is_known(value):
                return Elements(value)
        for value in uneven:
            maker = self.graph.made_at.get(value, -1)
            if maker < 0 or value in self.changes:
                continue
            call = self.graph.calls[maker]
            name, masks = name_of(call), call.takes[1:]
            if name in ("__getitem__", "masked_select") and not self.graph.values[call.takes[0]].is_uneven:
                return masks[0] if len(masks) == 1 and self.is_known(masks[0]) else None
            if name in _PASSED_ON | _PRODUCTS | _QUOTIENTS | _POWERS:
                return self._picked(call.takes)
        return None

    def is_fixed(self, value: int) -> bool:
        """Whether a value is the same in all microbatches: a constant, a parameter, or computed from fixed inputs."""
        if value not in self._fixed:
            self._fixed[value] = self._comes_from(value, self.fixed)
        return self._fixed[value]

    def is_known(self, value: int) -> bool:
        """Whether plain functions compute a value from inputs that are known before the step runs."""
        if value not in self._known:
            self._known[value] = self._comes_from(value, self.known | self.fixed)
        return self._known[value]

    def _comes_from(self, value: int, allowed: Collection[int]) -> bool:
        if not self.graph.is_carried(value):
            return True
        inputs, calls = self.graph.origins([value])
        if not inputs <= set(allowed):
            return False
        seen_values = {value, *inputs, *(number for at in calls for _, number in self.graph.calls[at].makes)}
        if any(self.graph.values[number].storage in self._changed_storages for number in seen_values):
            return False
        return all(self.graph.calls[at].is_plain for at in calls)

    def data_calls(self, term: Term) -> Iterator[int]:
        """Yield the calls between a term and the results of blocks or unknown inputs."""
        todo, seen_values = list(term.data), set()
        while todo:
            value = todo.pop()
            if value in seen_values or not self.graph.is_carried(value) or self.is_known(value):
                continue
            seen_values.add(value)
            maker = self.graph.made_at.get(value, -1)
            if maker >= 0 and not self.graph.calls[maker].block:
                yield maker
                todo += self.graph.calls[maker].takes
            yield from self.changes.get(value, ())
