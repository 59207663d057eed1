"""Weight microbatches by what a user's loss function averages over.

Before the first backward, Drumline compares the function's loss and gradient of a microbatch's rows with those of parts
of them. This tells what each part of the loss is a mean over: rows, labels that count, a mask of the target, or nothing
where it is a sum. Steps count that in every microbatch's target. See comparing.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drumline.core.errors import ModelError
from drumline.engine.loss.agreeing import agreed
from drumline.engine.loss.comparing import Comparing, MicrobatchEvidence, not_compared, warn_of_no_comparison
from drumline.engine.loss.narrowing import (
    by_length,
    is_decided,
    joint_of,
    left_of,
    mixed,
    narrowed,
    refuse_undecided,
)
from drumline.engine.loss.rules.rows import resized
from drumline.engine.loss.rules.rules import FittingRules, said_by, undecided
from drumline.engine.loss.rules.tallies import Tallies, counted_in, tallies_of
from drumline.engine.loss.rules.watching import KnownValues, LossCall
from drumline.engine.loss.rules.weighing import MicrobatchCounts
from drumline.engine.loss.targets import elements_of, labels_weight, size_of, uneven
from drumline.model.loss.counts import Across, Count, Weighing, mixed_by, weighed
from drumline.model.loss.factors import Factors, Multiplying
from drumline.model.loss.terms import Walk
from drumline.model.values import pack

LossFunction = Callable[..., Tensor]


@dataclass(slots=True)
class _Observation:
    """What was seen of the function for one kind of output and target."""

    tallies: Tallies
    walk: Walk
    size: int  # elements of the target that it got

    def is_proportional(self, other: _Observation) -> bool:
        """Whether means are over as many elements for each of the target's as in another kind."""
        pairs = zip(self.walk.terms, other.walk.terms, strict=False)
        means = [(term.num_bytes, two.num_bytes) for term, two in pairs if term.labels is None and term.divided is None]
        return all(number is None or two is None or number * other.size == two * self.size for number, two in means)


class FnWeight:
    """Weights the microbatches of a step by what a loss function was found to average over."""

    def __init__(self, loss_fn: LossFunction, device: torch.device) -> None:
        self.loss_fn = loss_fn
        self.across: Across | None = None  # what all lines of a mesh count together
        self.parts = 1  # lines of a mesh that have parts of the same rows
        self.direct = labels_weight(loss_fn)
        self._comparing = Comparing(loss_fn, device)
        self._observations: dict[Any, _Observation] = {}
        self._kinds: set[Any] = set()  # of outputs and targets that were compared
        self._by_target: dict[Any, _Observation] = {}
        self._rules: FittingRules | None = None
        # What was found, the rows of microbatches and their shares, if nothing else decides on these.
        self._by_rows: tuple[FittingRules, list[int], Weighing] | None = None
        self.lent: list[nn.Parameter] = []  # parameters that it uses, whoever holds them
        # Why it must be compared again in later steps.
        self._reads = False  # it reads targets on the host, here or on another line
        self._picks = False  # it picks what counts by its outputs
        self._varied: set[int] = set()  # counts that differed between rows when it was compared
        self._is_compared = False  # whether this step's first microbatch was
        # Whether the count it averages over does not grow with the target, so that other lengths need other weights.
        self.is_uneven = False

    # ---- before a step -----------------------------------------------------------------------------------------------

    def __call__(
        self, targets: Sequence[Any], rows: Sequence[int], sizes: Sequence[int] | None = None
    ) -> Weighing | None:
        """Return the microbatches' shares; None if the function must first be compared on one of them.

        `sizes` are the elements of each target, if microbatches have different lengths.
        """
        self._is_compared = False
        if len(targets) == 1 and self.across is None:
            return Weighing([1.0])
        if self.direct is not None:
            return weighed([[_quiet(self.direct(target))] for target in targets], rows, across=self.across)
        if self._rules is None or self._reads:  # what it reads on the host, only a call of it can tell
            return None
        if self._by_rows is not None and self._by_rows[0] is self._rules and self._by_rows[1] == rows and sizes is None:
            return self._by_rows[2]
        counted = self._counted(targets, rows, self._sizes(targets, rows, sizes))
        if not self._rules.trusted and self._is_open_anywhere(counted is None or self._is_open(counted)):
            return None
        if counted is None:
            raise _uncounted(is_apart=sizes is not None)
        if self.across is None and counted.is_nothing(self._rules):  # only a call tells whether that is NaN
            return None
        weighing = counted.weighing(self._rules)
        counts_rows = all(rule.tally is None for rule in self._rules.chosen)
        if self._rules.trusted and counts_rows and sizes is None and self.across is None:
            self._by_rows = self._rules, list(rows), weighing
        return weighing

    def _counted(
        self, targets: Sequence[Any], rows: Sequence[int], sizes: Sequence[int] | None
    ) -> MicrobatchCounts | None:
        """Return what the microbatches count; None if a kind of target must be seen first."""
        assert self._rules is not None
        each: list[list[Count]] = [[] for _ in targets]
        if not self._rules.trusted or any(rule.tally is not None for rule in self._rules.chosen):
            kinds = [self._by_target.get(_kind(target)) for target in targets]
            some = next(iter(self._by_target.values()), None)
            try:
                # A kind that was not seen differs only in its number of rows, and counts in the same way.
                looked = [kind or some for kind in kinds]
                each = [[] if kind is None else kind.tallies.of(t) for kind, t in zip(looked, targets, strict=True)]
            except (RuntimeError, TypeError, IndexError, ValueError):
                return None
        return MicrobatchCounts(each, rows, sizes or rows, self.across, self.parts)

    def _counted_by_calls(
        self, output: Any, own_rows: int, targets: Sequence[Any], rows: Sequence[int], sizes: Sequence[int] | None
    ) -> MicrobatchCounts | None:
        """Return what the microbatches count, by a call for each that leaves no trace, with rows of one's output."""
        each: list[list[Count]] = []
        for target, number in zip(targets, rows, strict=True):
            call = self._comparing.dry(output if number == own_rows else resized(output, own_rows, number), target)
            if call is None:
                return None
            each.append([*counted_in(call, tallies_of(call, KnownValues.of(call.graph, call.targets)))])
        if len({len(row) for row in each}) > 1:
            return None
        return MicrobatchCounts(each, rows, sizes or rows, self.across, self.parts)

    def _is_open(self, counted: MicrobatchCounts) -> bool:
        """Whether rules that are left disagree on a step, or something that it counts differs for the first time."""
        assert self._rules is not None
        if not is_decided(self._rules, counted):
            return True
        return bool(counted.varying() - self._varied)

    def _sizes(self, targets: Sequence[Any], rows: Sequence[int], sizes: Sequence[int] | None) -> Sequence[int] | None:
        """Return the elements of the targets if they matter: other lines of a mesh may have other lengths."""
        if sizes is not None or self.across is None:
            return sizes
        return [elements_of(target, number) for target, number in zip(targets, rows, strict=True)]

    def _is_open_anywhere(self, is_open: bool) -> bool:
        """Whether this holds on any line of a mesh."""
        return is_open if self.across is None else bool(self.across([float(is_open)])[0])

    # ---- when a microbatch's output is there -------------------------------------------------------------------------

    def resolve(
        self, output: Any, microbatch: int, targets: Sequence[Any], rows: Sequence[int], sizes: Sequence[int] | None
    ) -> Weighing:
        """Compare the function on a microbatch, and return the shares of all of them."""
        target, joint = targets[microbatch], partial(joint_of, output, microbatch, targets, rows)
        answer = self._comparing.rules(output, target, rows[microbatch], joint)
        self._is_compared = True
        self._note_compared(answer, output, target, sizes)
        if answer.rules is None or answer.rules.num_tallies or sizes is not None:
            self._watch_all(output, microbatch, targets, rows)
        if answer.rules is None or answer.comparison is None:
            rules = self._by_its_calls(output, target, answer.why)
        else:
            rules, whole = answer.rules, answer.comparison.whole
            self._reads, self._picks = bool(whole.reads), bool(whole.picks)
            self.lent = _parameters(whole.call)
            self._kinds.add((_kind(output), _kind(target)))
        # Else there is no number to compare: nothing counts here, or the step will fail.
        is_told = answer.rules is not None or bool(answer.why)
        if self._rules is not None and answer.rules is not None:
            rules = left_of(self._rules.within(rules))
        self._rules, is_told_of = self._agreed(rules, is_told=is_told)
        if is_told_of and (sizes is not None or self.across is not None) and any(mixed(self._rules)):
            if is_told:
                is_needed = sizes is not None or self.parts > 1
                self._rules = by_length(self._rules, self._comparing, output, target, joint, is_needed=is_needed)
            self._rules, _ = self._agreed(self._rules, is_told=is_told)
        is_apart, sizes = sizes is not None, self._sizes(targets, rows, sizes)
        counted = self._counted(targets, rows, sizes)
        if self._reads:
            counted = self._counted_by_calls(output, rows[microbatch], targets, rows, sizes)
        if counted is None:
            raise _uncounted(is_apart=is_apart)
        if is_told_of and not self._rules.trusted:
            if is_told:
                self._rules = narrowed(self._rules, self._comparing, counted, joint, self._varied)
                self._varied |= counted.varying()
            self._rules, _ = self._agreed(self._rules)
            refuse_undecided(self._rules, counted)
        is_zero = answer.comparison is not None and answer.comparison.whole.whole.is_zero and self.across is None
        return counted.weighing(self._rules, may_be_nothing=is_zero)

    def verify(self, output: Any, target: Any, rows: int, *, is_split: bool = False) -> None:
        """Compare again a microbatch of another kind, or a function of which nobody can tell what it counts.

        Microbatches that the user cut, `is_split`, may have other lengths.
        """
        if self.direct is not None:
            return
        kind = _kind(output), _kind(target)
        is_new = kind not in self._kinds
        self._kinds.add(kind)
        if is_new and (is_split or self._rules is None or not self._rules.is_plain):
            self._watch(output, target)
        if self._rules is None:  # a batch of one microbatch, whatever it counts
            return
        again = self._picks or (self._reads and not self._is_compared)
        self._is_compared = True
        if not again and not is_new:
            return
        answer = self._comparing.rules(output, target, rows)
        if answer.rules is not None:
            left = left_of(self._rules.within(answer.rules))
            before, now = ((len(rules.parts), rules.chosen, rules.has_rest) for rules in (self._rules, left))
            if now != before:
                raise ModelError(
                    "loss_fn counts this microbatch in another way than those before",
                    expected="one way for all microbatches of a step",
                    fix="pass loss_weight=, a function from a target to its weight",
                )

    def multiplying(self, output: Any, target: Any, factors: Factors) -> AbstractContextManager[object]:
        """Multiply the parts of the loss by their factors in a microbatch."""
        if not factors:
            return nullcontext()
        self._watch(output, target)  # unless it has been seen
        return Multiplying(self._observations[_kind(output), _kind(target)].walk, factors)

    @property
    def counts_targets(self) -> bool:
        """Whether other targets of the same shapes may have other shares."""
        if self.direct is not None or self._rules is None or not self._rules.trusted:
            return True
        return any(rule.tally is not None for rule in self._rules.chosen)

    def _note_compared(self, answer: MicrobatchEvidence, output: Any, target: Any, sizes: Sequence[int] | None) -> None:
        """Note what the comparison saw, if the function makes the same calls with all rows."""
        if answer.comparison is None or answer.rules is None or sizes is not None:
            return
        has_all = _kind(answer.comparison.rows.output) == _kind(output)
        if has_all or (answer.comparison.has_same_calls and not answer.rules.num_tallies):
            self._note(answer.comparison.whole.call, output, target, answer.comparison.rows.target)

    # ---- what a comparison says --------------------------------------------------------------------------------------

    def _watch_all(self, output: Any, microbatch: int, targets: Sequence[Any], rows: Sequence[int]) -> None:
        """See the function on this microbatch, and on targets with other numbers of rows with rows of its output."""
        self._watch(output, targets[microbatch])
        for target, wanted in zip(targets, rows, strict=True):
            if wanted != rows[microbatch] and _kind(target) not in self._by_target:
                self._watch(resized(output, rows[microbatch], wanted), target)

    def _watch(self, output: Any, target: Any) -> None:
        if (_kind(output), _kind(target)) not in self._observations:
            self._note(self._comparing.dry(output, target), output, target, target)

    def _note(self, watched: LossCall | None, output: Any, target: Any, labels: Any) -> None:
        """Note what was seen of the function on this kind of output and target; `labels` is the target that it got."""
        kind = _kind(output), _kind(target)
        if kind in self._observations or watched is None or not isinstance(watched.loss, Tensor) or watched.loss.dim():
            return
        self.lent = _parameters(watched)
        walk = Walk(watched.graph, watched.graph.outputs[0], watched.targets)
        known = KnownValues.of(watched.graph, watched.targets)
        seen_observation = _Observation(Tallies(watched, known), walk, size_of(labels))
        self.is_uneven |= any(
            not seen_observation.is_proportional(observation) for observation in [*self._observations.values()][:1]
        )
        self._observations[kind] = self._by_target[kind[1]] = seen_observation

    def _by_its_calls(self, output: Any, target: Any, why: str) -> FittingRules:
        """Return what the function's calls say, if it cannot be compared; refuse it if these do not say it."""
        observation = self._observations.get((_kind(output), _kind(target)))
        if self._rules is not None:
            return self._rules
        if not why:  # its loss is no number, so that the step will fail; what it counts stays open
            return undecided(
                None if observation is None else observation.walk,
                [] if observation is None else observation.tallies.tallies,
            )
        if observation is None or not observation.walk.terms or observation.walk.others or mixed_by(observation.walk):
            raise not_compared(why)
        warn_of_no_comparison(why)
        return said_by(observation.walk, observation.tallies.tallies)

    def _agreed(self, rules: FittingRules, *, is_told: bool = True) -> tuple[FittingRules, bool]:
        """Return the rules that are left on all lines of a mesh, and whether any line was told them."""
        if self.across is None:
            return rules, is_told
        agreement = agreed(self.across, rules, is_told=is_told, reads=self._reads)
        self._reads = agreement.reads
        return left_of(agreement.rules), agreement.is_told


def _uncounted(*, is_apart: bool) -> ModelError:
    if is_apart:
        return uneven("takes shapes as numbers, and what it counts of another length is not known")
    return not_compared("its weight for a microbatch with another number of rows is unknown")


def _parameters(call: LossCall) -> list[nn.Parameter]:
    """Return the parameters that a loss was seen to use."""
    used = (value.constant for value in call.graph.values)
    return [param for param in used if isinstance(param, nn.Parameter) and param.requires_grad]


def _quiet(count: Tensor) -> Count:
    return float(count) if count.is_cpu else count


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    tensors, form = pack(value)
    return str(form), tuple((tensor.shape, tensor.dtype) for tensor in tensors)
