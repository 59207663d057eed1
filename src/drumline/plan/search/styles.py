"""A few numbers that determine every rank's policy, and hill climbing over them.

    forward, weight   penalties, in mean seconds of F and of W
    lane, back        the extra price (or discount) of F and of I on later stages of the same rank
    idle, late_idle   how long a rank may idle by choice, in mean seconds of W; tilted from the first rank to the last
    ahead, extra      how many microbatches a lane may have begun: `ahead` times the fewest with which it can flow

With `ahead` 1.5 and `joined` this is 1F1B; with 3 it starts like zb-h2 on one stage per rank, and like zb-v on two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from drumline.plan.search.bounds.instance import F, Instance, Rows, W
from drumline.plan.search.bounds.relaxed import Relaxation
from drumline.plan.search.construct import Builder, LaneRule, Policy, TimedRows


@dataclass(frozen=True, slots=True)
class Style:
    """The numbers; the module docstring gives their units."""

    forward: float = 0.5
    weight: float = 3.0
    lane: float = -0.3
    back: float = 0.0
    idle: float = 1.0
    late_idle: float = 0.0
    tilt: float = 0.0
    ahead: float = 3.0
    extra: float = 0.0
    joined: bool = False


_CHOICES: dict[str, tuple[float, ...]] = {
    "forward": (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5),
    "weight": (0.25, 0.5, 0.75, 1.0, 1.5, 3.0),
    "lane": (-0.9, -0.6, -0.3, -0.05, 0.05, 0.3),
    "back": (-0.2, -0.01, 0.01, 0.2),
    "idle": (0.0, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 50.0),
    "late_idle": (0.0, 0.0, 0.5, 1.0, 2.0, 5.0, 20.0),
    "tilt": (0.0, 0.0, -0.5, 0.5),
    "ahead": (1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 100.0),
    "extra": (0.0, 0.0, 1.0, 2.0),
}


class Styles:
    """Turns styles of one instance into programs."""

    def __init__(self, instance: Instance, *, may_join: bool) -> None:
        self.builder = Builder(instance)
        self.may_join = may_join
        pairs = len(instance.rank)
        self._forward = sum(instance.seconds[F::4]) / pairs
        self._weight = sum(instance.seconds[W::4]) / pairs or self._forward
        relaxed = Relaxation(instance)
        self._fewest = [
            [
                relaxed.way_back[lane.stage] / (sum(relaxed.exact[stage_lane.stage][0] for stage_lane in lanes) or 1.0)
                for lane in lanes
            ]
            for lanes in instance.lanes
        ]

    def build(
        self, style: Style, order: Rows | None = None, *, is_late: Callable[[], bool] = lambda: False
    ) -> TimedRows | None:
        """Return the program of a style; with an order, only W is placed."""
        return self.builder.build(self.policies(style), order, is_late=is_late)

    def policies(self, style: Style) -> list[Policy]:
        """Return every rank's policy."""
        policies, last = [], max(len(self._fewest) - 1, 1)
        for rank, fewest in enumerate(self._fewest):
            rules = tuple(
                LaneRule(
                    (style.forward + style.lane * at) * self._forward,
                    style.back * at * self._forward,
                    style.weight * self._weight,
                    max(1.0, math.ceil(style.ahead * few + style.extra)),
                    style.joined,
                )
                for at, few in enumerate(fewest)
            )
            share = 1 + style.tilt * (2 * rank / last - 1)
            policies.append(Policy(rules, style.idle * share * self._weight, style.late_idle * share * self._weight))
        return policies

    def drawn(self, rng: random.Random) -> Style:
        """Return a random style."""
        numbers: dict[str, Any] = {name: rng.choice(values) for name, values in _CHOICES.items()}
        return Style(**numbers, joined=self.may_join and rng.random() < 0.3)

    def varied(self, style: Style, rng: random.Random) -> Style:
        """Return a style with one or two of its numbers changed."""
        changed: dict[str, Any] = {}
        for name in rng.sample(list(_CHOICES), rng.choice((1, 1, 2))):
            if rng.random() < 0.5:
                changed[name] = rng.choice(_CHOICES[name])
            else:
                changed[name] = getattr(style, name) * math.exp(rng.gauss(0, 0.3))
        return replace(style, **changed)


# What works well on the published costs; hill climbing starts here and at random styles.
FIRST = (
    Style(),
    Style(forward=0.25, weight=0.5, idle=50.0, ahead=100.0),
    Style(forward=1.4, weight=2.5, idle=1.2),
    Style(forward=0.2, idle=0.0, late_idle=5.0, ahead=2.5, extra=1.0),
    Style(forward=0.8, late_idle=1.0, ahead=2.5, extra=2.0),
    Style(forward=0.1, idle=2.0, ahead=2.0),
    Style(forward=0.1, weight=1.0, idle=50.0, ahead=1.5),
)
# For W alone: how long to wait before starting one.
WOVEN = (
    Style(weight=1.0, idle=40.0, tilt=0.5),
    Style(weight=1.0, idle=20.0, tilt=-0.5),
    Style(weight=0.5, idle=40.0, tilt=0.9),
    Style(weight=0.75, idle=4.0),
    Style(weight=1.0, idle=1.0),
)
assert {field.name for field in fields(Style)} == {*_CHOICES, "joined"}


def climb(
    styles: Styles,
    value: Callable[[TimedRows], float],
    rng: random.Random,
    *,
    starts: Sequence[Style] = FIRST,
    num_drawn: int = 18,
    order: Rows | None = None,
    is_late: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[float, Style, TimedRows]]:
    """Yield values, styles and programs until it is late: first given and random styles, then variations of the best.

    With an `order`, forwards and backwards follow it, and a style only decides where W goes.

    >>> from drumline.core.costs import Costs
    >>> from drumline.core.placement import Placement
    >>> value = Styles(Instance(Costs(), Placement.linear(2), 4), may_join=False)
    >>> climbed = climb(value, lambda built: max(end for _, end in built.ends), random.Random(0))
    >>> min(next(climbed)[0] for _ in range(20))
    13.0
    """
    best: list[tuple[float, Style]] = []
    turn = 0
    while not is_late():
        if turn < len(starts):
            style = starts[turn]
        elif not best or turn < len(starts) + num_drawn or rng.random() < 0.1:
            style = styles.drawn(rng)
        else:
            style = styles.varied(rng.choice(best[:4])[1], rng)
        turn += 1
        built = styles.build(style, order, is_late=is_late)
        if built is None:
            if turn > len(starts) + num_drawn and not best:
                return  # nothing fits except one microbatch after another
            continue
        value_now = value(built)
        best = sorted([*best, (value_now, style)], key=lambda pair: pair[0])[:8]
        yield value_now, style, built
