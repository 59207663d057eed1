"""Lines of a mesh agree on the rules of a loss function, whatever each could compare.

    line 0   labels that count     told: a mean over labels, or over rows
    line 1   no label counts       told nothing: its loss is NaN, so that it takes what line 0 found
    line 2   labels that count     told: a mean over labels
    all      a mean over labels

All lines exchange numbers in the same order, those that were told nothing too: else some would wait for others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from drumline.core.errors import MismatchError
from drumline.engine.loss.rules.rules import FittingRules, LossRule, universe
from drumline.model.loss.counts import Across

_LATER = 2.0**-20  # so small that lines' numbers of places never add up to a line
_AT_ONCE = 12  # numbers that lines exchange


class LineAgreement(NamedTuple):
    """What lines agree on: the rules that are left on all of them, and whether any line was told them."""

    rules: FittingRules
    is_told: bool
    reads: bool  # whether the loss was seen to read targets on the host, on any line


def agreed(across: Across, found_rules: FittingRules, *, is_told: bool, reads: bool) -> LineAgreement:
    """Return the rules that are left on all lines, in one order; all lines call it alike.

    >>> both = FittingRules(((LossRule(), LossRule(None, 1)),), None, False, True, 0)
    >>> rules = agreed(lambda counts: [2 * count for count in counts], both, is_told=True, reads=False)
    >>> rules.rules == both, rules.is_told
    (True, True)
    """
    say = float(is_told)
    form = [float(len(found_rules.parts)), float(found_rules.rest is None), float(found_rules.num_tallies)]
    numbers = [say * value for value in (*form, float(found_rules.trusted), float(found_rules.has_rest))]
    lines, said, read, *sums = map(float, across([1.0, say, float(reads), *numbers]))
    trusted, has_rest = found_rules.trusted, found_rules.has_rest
    if is_told and sums[:3] != [value * said for value in form]:
        raise _mismatch()
    if said:  # else nothing counts on any line
        *form, trusted, has_rest = *(total / said for total in sums[:3]), sums[3] == said, sums[4] > 0
    num_parts, has_no_rest, num_tallies = int(form[0]), bool(form[1]), int(form[2])
    if num_tallies > found_rules.num_tallies:  # this line could not count what others do
        raise _mismatch()
    rules = universe(num_tallies)
    subjects: Sequence[Sequence[LossRule]] = found_rules.subjects
    if said and not is_told:
        subjects = [rules] * (num_parts + (not has_no_rest))
    flags = [_flag(rule, each, is_told or not said) for each in subjects for rule in rules]
    counts = [float(value) for at in range(0, len(flags), _AT_ONCE) for value in across([*flags[at : at + _AT_ONCE]])]
    left = [_left_of(rules, counts[at : at + len(rules)], lines) for at in range(0, len(counts), len(rules))]
    new_rules = FittingRules(tuple(left[:num_parts]), None if has_no_rest else left[-1], has_rest, trusted, num_tallies)
    return LineAgreement(new_rules, said > 0, read > 0)


def _flag(rule: LossRule, left: Sequence[LossRule], is_ordered: bool) -> float:
    """Return what a line tells of a rule: 0 if it does not fit, else 1 and a little more the later it comes."""
    return 0.0 if rule not in left else 1.0 + (left.index(rule) * _LATER if is_ordered else 0.0)


def _left_of(rules: Sequence[LossRule], sums: Sequence[float], lines: float) -> tuple[LossRule, ...]:
    """Return the rules that fit on all lines, those first that came first there.

    >>> _left_of([LossRule(), LossRule(0)], [2.0 + 3 * _LATER, 2.0 + _LATER], 2.0)[0]
    LossRule(tally=0, power=0, of='rows')
    """
    counted_rules = [(total, rule) for rule, total in zip(rules, sums, strict=True) if total >= lines]
    return tuple(rule for _, rule in sorted(counted_rules, key=lambda pair: pair[0]))


def _mismatch() -> MismatchError:
    return MismatchError(
        "the lines' losses have different parts", expected="the same kind of batch on every line of the mesh"
    )
