"""Bugs for the search of lengths and orders of slices: `plan/slices` and `core/slices/curve`."""

from __future__ import annotations

from planting import Bug

SLICES_SEARCH = (
    Bug(
        "slices-bound-counts-every-rank",
        "_of_slices",
        "placement.num_ranks - 1",
        "placement.num_ranks",
        "The bound counts a hop more than there are between ranks.",
    ),
    Bug(
        "slices-bound-forgets-the-way-back",
        "_of_slices",
        "(longest(forward) + longest(back))",
        "longest(forward)",
        "The bound counts only the way down.",
    ),
    Bug(
        "slices-shorter-than-shortest",
        "shortest_longest.reached",
        "curve.at(ends[-1] * multiple, middle * multiple) <= seconds",
        "curve.at(0, (middle - ends[-1]) * multiple) <= seconds",
        "Lengths count no keys of the slices before.",
    ),
    Bug(
        "slices-weights-attend",
        "SlicedWork.of",
        "min(first, part * (first + second))",
        "part * first",
        "W grows with keys.",
    ),
    Bug(
        "slices-dispatched-in-any-order",
        "_Dispatcher._may_go_back",
        "unit % self._slices == self._slices - 1 or (stage, unit + 1) in self._gone",
        "bool(stage + unit + 1)",
        "A dispatched slice goes back before the one after it.",
    ),
    Bug(
        "slices-move-past-each-other",
        "UnitRule.keeps",
        "if op == W or other_op == F:",
        "if op in (I, W) or other_op == F:",
        "Local search lets backwards of one microbatch change places.",
    ),
    Bug(
        "slices-limit-without-keys",
        "_Dispatcher._has_room",
        "stash + resource.during[action] <= resource.most",
        "bool(stash + 1)",
        "Dispatched orders count units instead of what they hold.",
    ),
    Bug(
        "slices-search-past-the-clock",
        "LengthsSearch._keep_on",
        "time.monotonic() < self._deadline",
        "self._deadline > 0",
        "A search of slices does not end with the clock.",
    ),
    Bug(
        "slices-curve-without-pairs",
        "SliceCurve.at",
        "self.per_pair * (end * end - start * start) / 2.0",
        "self.per_pair * (end - start) * (end - start) / 2.0",
        "A slice attends to no keys before it.",
    ),
    Bug(
        "slices-planned-shorter-than-measured",
        "lengths_of",
        "profile.tokens // number < profile.shortest or profile.tokens % number",
        "profile.tokens % number",
        "A plan has slices shorter than any that was measured.",
    ),
    Bug(
        "slices-planned-without-their-cost",
        "SlicedStages.costs",
        "slice_factor=self._factors(self.slices, counts),",
        "slice_factor=None,",
        "What short slices cost does not enter a plan.",
    ),
    Bug(
        "slices-planned-without-keys",
        "SlicedStages.costs",
        "[bytes_of_block * count for count in counts]",
        "[0.0 for count in counts]",
        "A plan holds no gradients of keys and values.",
    ),
    Bug(
        "slices-planned-and-forgotten",
        "Plan.pipeline_settings",
        '{"slices": self.slices} if self.slices else {}',
        "{}",
        "A pipeline runs a plan in slices with whole sequences.",
    ),
)
