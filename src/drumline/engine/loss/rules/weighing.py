"""Every microbatch's share of a loss, and factors for its parts, by the rules that were found for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from drumline.core.errors import BatchError
from drumline.engine.loss.rules.rules import ROWS, FittingRules, LossRule
from drumline.model.loss.counts import Across, Count, Weighing, alike, joined

_MOST_ORDERS = 3


@dataclass(frozen=True, slots=True)
class MicrobatchCounts:
    """What is known of a step's microbatches before it runs: their counts, their rows and their elements."""

    counts: Sequence[Sequence[Count]]
    rows: Sequence[int]
    sizes: Sequence[int]
    across: Across | None = None  # what all lines of a mesh count together
    parts: int = 1  # lines that have parts of the same rows

    def is_nothing(self, rules: FittingRules) -> bool:
        """Whether nothing of what counts is in any microbatch, as far as the host knows."""
        used = {rule.tally for rule in rules.chosen if rule.tally is not None}
        columns = [[each[at] for each in self.counts] for at in used]
        return any(all(isinstance(value, float) and not value for value in column) for column in columns)

    def weighing(self, rules: FittingRules, *, may_be_nothing: bool = False) -> Weighing:
        """Return the shares, and factors where one share is not right for all parts.

        With `may_be_nothing`, the function was seen to return 0, not NaN, where nothing counts.
        """
        chosen = rules.chosen
        used = sorted({rule.tally for rule in chosen if rule.tally is not None})
        columns = {at: [each[at] for each in self.counts] for at in used}
        totals: list[Count] = [sum(column[1:], start=column[0]) for column in columns.values()]
        totals += [float(sum(self.rows)), float(sum(self.sizes))]
        if self.across is not None:
            totals = self.across(totals)
        *sums, rows, sizes = totals
        total = dict(zip(used, sums, strict=True))
        ends = float(rows) / self.parts, float(sizes)
        only = chosen[0] if len(chosen) == 1 else None
        if only is not None and only.tally is not None and not only.power and not _needs_one(rules, self.parts):
            chosen_column = columns[only.tally]
            if any(isinstance(value, Tensor) for value in chosen_column):  # no request waits for it
                return Weighing([value / total[only.tally] for value in chosen_column])
        plain = {at: [float(value) for value in column] for at, column in columns.items()}
        for at, column in plain.items():
            if not float(total[at]) > 0 and not may_be_nothing:
                raise BatchError(
                    f"the microbatches' loss weights are {column}", expected="numbers of at least 0, not all of them 0"
                )

        def shares(rule: LossRule) -> list[float]:
            by, end = (self.rows, ends[0]) if rule.of == ROWS else (self.sizes, ends[1])
            counts = [] if rule.tally is None else plain[rule.tally]
            whole = 0.0 if rule.tally is None else float(total[rule.tally])
            return rule.shares(counts, [float(number) for number in by], whole, end)

        base = [row / float(rows) for row in self.rows] if rules.rest is None else shares(chosen[-1])
        others = rules.rest is not None or _needs_one(rules, self.parts)
        return joined([shares(rule) for rule in chosen[: len(rules.parts)]], base, others=others)

    def are_alike(self, rules: Sequence[LossRule]) -> bool:
        """Whether several rules give these microbatches the same shares, among themselves."""
        shares = []
        for rule in rules:
            by = [float(row) for row in (self.rows if rule.of == ROWS else self.sizes)]
            counts = [] if rule.tally is None else [float(each[rule.tally]) for each in self.counts]
            if rule.tally is not None and not sum(counts) > 0:
                continue
            total = sum(by) / (self.parts if rule.of == ROWS else 1)
            shares.append(rule.shares(counts, by, sum(counts), total))
        return all(alike(shares[0], row, 1e-6) for row in shares[1:])

    def varying(self) -> set[int]:
        """Return the counts that do not grow with the rows alone."""
        varying = set()
        for at in range(len(self.counts[0]) if self.counts else 0):
            column = [float(each[at]) for each in self.counts]
            whole, rows = sum(column), sum(self.rows)
            if not alike([value * rows for value in column], [whole * row for row in self.rows], 1e-6):
                varying.add(at)
        return varying

    def orders(self, varying: Collection[int]) -> list[list[int]]:
        """Return orders of the microbatches in which the first ones count less than the last ones, for each count."""
        orders = [
            sorted(range(len(self.rows)), key=lambda at: float(self.counts[at][number]) / self.rows[at])
            for number in sorted(varying)
        ]
        return [list(item) for item in dict.fromkeys(map(tuple, orders))][:_MOST_ORDERS] or [
            list(range(len(self.rows)))
        ]


def _needs_one(rules: FittingRules, lines: int) -> bool:
    """Whether a constant beside the parts must be counted once, which their own shares would not do."""
    if rules.rest is not None or not rules.has_rest:
        return False
    first = rules.chosen[0]
    return not first.adds_to_one or (lines > 1 and first.of == ROWS)
