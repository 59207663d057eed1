"""Compare a loss function again where several rules are left that disagree, until they agree.

::

    labels per row        0 0 0 | 1 1 1 1 1      a sum and a mean over labels: both fit, the first part is nothing
    other way around      1 1 1 | 1 1 0 0 0      only one of them fits
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from drumline.core.errors import ModelError
from drumline.engine.loss.comparing import Comparing, Joint, not_compared
from drumline.engine.loss.rules.lengths import NOTHING, alike, lengths_of
from drumline.engine.loss.rules.rows import with_all
from drumline.engine.loss.rules.rules import ROWS, SIZE, FittingRules, universe
from drumline.engine.loss.rules.weighing import MicrobatchCounts
from drumline.engine.loss.targets import uneven


def left_of(rules: FittingRules) -> FittingRules:
    """Return the rules that are left; raise if there are none for some part."""
    if not rules.fits:
        raise ModelError(
            "loss_fn of this microbatch and of earlier ones averages over different things",
            expected="a mean or sum over rows, over labels or over a mask of the target",
            fix="pass loss_weight=, a function from a target to its weight",
        )
    return rules


def is_decided(rules: FittingRules, counted: MicrobatchCounts) -> bool:
    """Whether all rules that are left give the microbatches the same shares."""
    return all(counted.are_alike(each) for each in rules.subjects)


def refuse_undecided(rules: FittingRules, counted: MicrobatchCounts) -> None:
    """Refuse a loss whose rules disagree after all comparisons, unless it is zero: then weights do not matter."""
    every = len(universe(rules.num_tallies))
    loss_rules = [each for each in rules.subjects if len(each) < every]
    if not all(counted.are_alike(each) for each in loss_rules):
        raise not_compared("its microbatches count differently, and their targets together do not tell how")


def narrowed(
    rules: FittingRules,
    comparing: Comparing,
    counted: MicrobatchCounts,
    joint: Callable[[Sequence[int]], Joint | None],
    varied: Collection[int],
) -> FittingRules:
    """Return the rules that other microbatches' targets leave, with rows of one's output.

    `joint` returns both for an order of the microbatches. `varied` are the counts that differed before.
    """
    varying = counted.varying()
    orders = counted.orders(varying)
    is_new = bool(varying - set(varied))
    # The first ones may count nothing at all, which tells too little: then the last ones come first.
    for order in [*orders, *(row[::-1] for row in orders)]:
        if not is_new and is_decided(rules, counted):
            break
        is_new = is_new and order is not orders[-1]
        joint_call = joint(order)
        answer = None if joint_call is None else comparing.rules_of(joint_call)
        if answer is not None and answer.rules is not None:
            rules = left_of(rules.within(answer.rules))
    return rules


def mixed(rules: FittingRules) -> list[bool]:
    """Whether rules by rows and by elements are left, for each part."""
    return [{rule.of for rule in rules if rule.power} == {ROWS, SIZE} for rules in rules.subjects]


def by_length(
    found_rules: FittingRules,
    comparing: Comparing,
    output: Any,
    target: Any,
    joint: Callable[[], Joint | None],
    *,
    is_needed: bool,
) -> FittingRules:
    """Return the rules that other lengths leave, which are needed if microbatches have different lengths.

    `joint` returns rows of all microbatches, for one that counts nothing.
    """
    are_mixed = mixed(found_rules)
    each, changed = _told_by_lengths(found_rules, comparing, output, target)
    if NOTHING in each and (joint_call := joint()) is not None:
        each, changed = _told_by_lengths(
            found_rules, comparing, *joint_call[:2]
        )  # others may count what this one does not
    kept_rules = []
    for rules, is_mixed, by in zip(found_rules.subjects, are_mixed, each, strict=True):
        if is_mixed and not by and is_needed:
            raise uneven("takes shapes as numbers, and what it counts of another length is not known")
        is_open = not is_mixed or by in ("", NOTHING)  # a step in which nothing counts leaves it to a later one
        left = [rule for rule in rules if is_open or not rule.power or rule.of == by]
        if by == ROWS:  # the length does not matter, so neither does what changes with it
            left = [rule for rule in left if rule.tally not in changed]
        kept_rules.append(tuple(left))
    rest = None if found_rules.rest is None else kept_rules[-1]
    return left_of(replace(found_rules, parts=tuple(kept_rules[: len(found_rules.parts)]), rest=rest))


def _told_by_lengths(
    rules: FittingRules, comparing: Comparing, output: Any, target: Any
) -> tuple[list[str], frozenset[int]]:
    """Return what other lengths tell of each part, and which tallies they change."""
    count = len(rules.subjects)
    try:
        length = lengths_of(comparing.loss_fn, output, target, comparing.device)
    except Exception:
        length = None
    if length is None:
        return [""] * count, frozenset()
    return ([*length.parts, length.rest][:count] if rules.parts else [length.rest]), length.changed


def joint_of(
    output: Any, microbatch: int, targets: Sequence[Any], rows: Sequence[int], order: Sequence[int] | None = None
) -> Joint | None:
    """Return rows of all microbatches' targets, in an order, with as many of one's output."""
    listed = range(len(targets)) if order is None else order
    output, targets = alike(output, microbatch, targets)
    return with_all(output, rows[microbatch], [targets[at] for at in listed], [rows[at] for at in listed])
