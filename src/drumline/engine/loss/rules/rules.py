"""How microbatches count in a part of a loss: the rules that may be true of it, and those that a comparison leaves.

    sum                1 each
    mean over rows     rows / all rows
    mean over labels   counted labels / all counted labels

A rule is a count and a power of rows: `cross_entropy(...) * len(t)` is a mean over labels times the rows, so that its
microbatches count labels / all labels * all rows / rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from drumline.engine.loss.rules.compare import LossComparison
from drumline.engine.loss.rules.sides import LossShare, Side, own_terms
from drumline.engine.loss.rules.tallies import counted_in, place_of, tallies_of
from drumline.engine.loss.rules.watching import shapes_by_values
from drumline.model.loss.calls import Tally, name_of
from drumline.model.loss.terms import Term, Walk

ROWS, SIZE = "rows", "size"
_SELECTS = {
    "masked_select", "index_select", "take", "nonzero", "topk", "sort", "kthvalue", "unique", "compress", "msort",
}  # fmt: skip
_SAME = 1e-6  # largest relative difference of counts that are equal


@dataclass(frozen=True, slots=True)
class LossRule:
    """A rule: microbatches count by a tally, if any, times a power of their rows or of their elements."""

    tally: int | None = None
    power: int = 0
    of: str = ROWS  # what is taken to the power

    @property
    def adds_to_one(self) -> bool:
        """Whether the microbatches' shares add up to one."""
        return (self.tally is None) == (self.power == 1) and self.power in (0, 1)

    def shares(self, counts: Sequence[float], rows: Sequence[float], total: float, num_rows: float) -> list[float]:
        """Return every microbatch's share, from its count and its rows."""
        by_count = [1.0] * len(rows) if self.tally is None else [count / total if total else 0.0 for count in counts]
        return [value * (each / num_rows) ** self.power for value, each in zip(by_count, rows, strict=True)]


SUM, MEAN, BY_ROWS = LossRule(), LossRule(None, 1, SIZE), LossRule(None, 1, ROWS)


@dataclass(frozen=True, slots=True)
class FittingRules:
    """What a comparison found: the rules that fit each part of a loss, and the rest of it.

    A loss that is not taken apart has no parts, only a rest. Without rules for the rest, that is a constant.
    """

    parts: tuple[tuple[LossRule, ...], ...]
    rest: tuple[LossRule, ...] | None
    has_rest: bool  # whether there is any
    trusted: bool  # whether the calls of the loss say all that, and the comparison agreed
    num_tallies: int

    @property
    def subjects(self) -> list[tuple[LossRule, ...]]:
        """The rules of all parts, and of the rest."""
        return [*self.parts, *([] if self.rest is None else [self.rest])]

    @property
    def is_plain(self) -> bool:
        """Whether its calls say all, and shares are the same whatever is in the targets."""
        entry = self.parts[0][:1] if self.parts else ()
        alike = self.trusted and all(each[:1] == entry and each[0].tally is None for each in self.subjects)
        return alike and (not self.has_rest or self.parts[0][0].adds_to_one)

    @property
    def fits(self) -> bool:
        """Whether there is a rule for everything."""
        return all(self.subjects)

    def within(self, other: FittingRules) -> FittingRules:
        """Return the rules that are also left in another comparison of the same loss."""
        for rules in (other, self):
            if not rules.fits:
                return rules
        if len(self.parts) != len(other.parts):  # the one that could not be taken apart
            return self if not self.parts else other if not other.parts else FittingRules((), (), True, False, 0)
        if (self.rest is None) != (other.rest is None):  # where what is beside the parts is no constant
            return other if self.rest is None else self
        parts = tuple(_both(part, two) for part, two in zip(self.parts, other.parts, strict=True))
        rest = None if self.rest is None or other.rest is None else _both(self.rest, other.rest)
        return FittingRules(
            parts, rest, self.has_rest or other.has_rest, self.trusted and other.trusted, self.num_tallies
        )

    @property
    def chosen(self) -> tuple[LossRule, ...]:
        """The likeliest rule of each part, and of the rest."""
        return tuple(subject[0] for subject in self.subjects)


def _both(row: Sequence[LossRule], other: Sequence[LossRule]) -> tuple[LossRule, ...]:
    return tuple(rule for rule in row if rule in other)


def found_in(comparison: LossComparison) -> FittingRules:
    """Return the rules that a comparison leaves; those of each part, or if these leave none, of the loss as one."""
    whole = comparison.whole
    tallies, counts = _tallied(comparison)
    hidden = bool(whole.reads)
    terms = own_terms(whole.walk) if comparison.tells_apart else []
    row = universe(len(tallies))
    if terms:
        parts, trusted = [], not (hidden or whole.picks or shapes_by_values(whole.call))
        for at, term in enumerate(terms):
            first = _said(term, tallies)
            selects = _selects(whole.walk, term)
            sure = not hidden and not (selects and first is MEAN) and comparison.shares(at)[0].norm > 0
            order = [*(row[3:] if selects else ()), first, *row]
            fitting = _fitting(comparison, comparison.shares(at), order, counts)
            if sure and first in fitting:
                fitting = (first,)
            trusted &= sure and fitting == (first,)
            parts.append(fitting)
        rest = comparison.shares(None, rest=True)
        is_constant = comparison.is_constant(rest)
        has_rest = any(abs(each.value) > 10 * comparison.near * max(comparison.whole.size, 1e-30) for each in rest)
        rules = FittingRules(
            tuple(parts),
            None if is_constant else _fitting(comparison, rest, row, counts),
            has_rest,
            trusted and is_constant,
            len(tallies),
        )
        if rules.fits:
            return rules
    return FittingRules((), _fitting(comparison, comparison.shares(None), row, counts), True, False, len(tallies))


def said_by(walk: Walk, tallies: Sequence[Tally]) -> FittingRules:
    """Return the rules that the calls of a loss say by themselves, without any comparison."""
    rules = tuple((_said(term, tallies),) for term in own_terms(walk))
    return FittingRules(rules, None, bool(walk.has_constant), True, len(tallies))


def undecided(walk: Walk | None, tallies: Sequence[Tally]) -> FittingRules:
    """Return all rules for every part, those first that the calls of a loss say."""
    every = tuple(universe(len(tallies)))
    if walk is None or walk.others or not own_terms(walk):
        return FittingRules((), every, True, False, len(tallies))
    rules = tuple(tuple(dict.fromkeys((_said(term, tallies), *every))) for term in own_terms(walk))
    return FittingRules(rules, None, walk.has_constant, False, len(tallies))


def _fitting(
    comparison: LossComparison,
    shares: Sequence[LossShare],
    order: Sequence[LossRule],
    counts: Sequence[Sequence[float]],
) -> tuple[LossRule, ...]:
    if all(share.is_zero for share in shares):  # sums of nothing tell no rule
        return tuple(dict.fromkeys(order))
    rows = [float(size) for size in comparison.sizes]
    rules = []
    for rule in dict.fromkeys(order):
        each = [] if rule.tally is None else counts[rule.tally]
        if rule.tally is not None and sum(each) <= 0:
            continue
        if comparison.fits(shares, rule.shares(each, rows, sum(each), sum(rows))):
            rules.append(rule)
    return tuple(rules)


def _tallied(comparison: LossComparison) -> tuple[list[Tally], list[list[float]]]:
    """Return what is counted of all rows, and how much of it in each part; only what adds up."""
    sides: list[Side] = [comparison.whole, *comparison.parts]
    each = [tallies_of(side.call, side.known) for side in sides]
    if len({len(row) for row in each}) > 1:
        return [], []
    counts = [counted_in(side.call, tallies) for side, tallies in zip(sides, each, strict=True)]
    columns = []
    for whole, *parts in zip(*counts, strict=True):
        adds_up = abs(whole - sum(parts)) <= _SAME * abs(whole) and min(parts) >= 0
        columns.append(parts if adds_up else [0.0] * len(parts))
    return each[0], columns


def universe(num_tallies: int) -> list[LossRule]:
    """Return all rules that are tried."""
    return [MEAN, BY_ROWS, SUM, *(LossRule(at, power) for power in (0, -1, 1) for at in range(num_tallies))]


def _said(term: Term, tallies: Sequence[Tally]) -> LossRule:
    """Return the rule that the call of a part says by itself."""
    place = place_of(term, tallies)
    return LossRule(place) if place is not None else SUM if term.is_sum else MEAN


def _selects(walk: Walk, term: Term) -> bool:
    """Whether a part picks what it is a mean over."""
    for at in walk.data_calls(term):
        call = walk.graph.calls[at]
        name = name_of(call)
        if name in _SELECTS or (name == "__getitem__" and len(call.takes) > 1):
            return True
    return False
