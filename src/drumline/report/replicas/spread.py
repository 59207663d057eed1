"""How much durations vary: for every op a table of factors, each as likely as the others, with mean 1.

Factors are measured (an action's seconds over the median of its stage and op, in a recorded step) or log-normal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist, median

import numpy as np

from drumline.core.action import Op
from drumline.core.errors import CostsError
from drumline.core.graph import CODE, OPS, Columns, Floats, Ints, Number
from drumline.core.timeline.timeline import Timeline

SIZE = 1024  # factors of an op: a draw is a number of ten bits


@dataclass(frozen=True, eq=False)
class Spread:
    """Factors of the seconds of each op, and of links: of their latency, and of gradient exchanges over them.

    >>> spread = Spread.log_normal(0.1)
    >>> round(float(spread.ops[Op.FORWARD].mean()), 9), round(float(spread.links.std()), 2)
    (1.0, 0.1)
    """

    ops: Mapping[Op, Floats]
    links: Floats

    @staticmethod
    def log_normal(share: float, links: float | None = None) -> Spread:
        """Return log-normal factors with this relative standard deviation; `links` is that of links, if another."""
        factors, of_links = _log_normal(share), _log_normal(share if links is None else links)
        return Spread(dict.fromkeys(OPS, factors), of_links)

    @staticmethod
    def measured(timelines: Iterable[Timeline], links: float = 0.0) -> Spread:
        """Return the factors of measured steps; those of links, which no step measures, are log-normal.

        An op that no step contains varies as all ops together.
        """
        by_op = defaultdict[Op, list[float]](list)
        for timeline in timelines:
            for (_, op), seconds in timeline.action_seconds().items():
                middle = median(seconds)
                by_op[op] += [each / middle for each in seconds] if middle > 0 else []
        if not any(by_op.values()):
            raise CostsError("the measured steps contain no action that took time", expected="a recorded run")
        others = _quantiles([factor for factors in by_op.values() for factor in factors])
        return Spread({op: _quantiles(by_op[op]) if by_op.get(op) else others for op in OPS}, _log_normal(links))

    def table(self) -> Floats:
        """Return the factors of all ops, one row for each."""
        return np.stack([self.ops[op] for op in OPS])


class FactorDraws:
    """FactorDraws a factor for every action of a program, the same for the same seed."""

    def __init__(self, spread: Spread, work: Columns, seed: int) -> None:
        self._table = spread.table().ravel()
        self._first: Ints = work.code * Number(SIZE)
        self._links, self._rng = spread.links, np.random.default_rng(seed)
        self._varies = len(np.unique(spread.table()[[CODE[op] for op in work.ops]])) > 1

    def actions(self) -> Floats | None:
        """Return a factor for each action; None if none varies."""
        if not self._varies:
            return None
        place = self._rng.integers(0, SIZE, len(self._first), dtype=np.uint16)
        return self._table.take(self._first + place)

    def links(self, count: int) -> Floats:
        """Return a factor for each link."""
        return self._links[self._rng.integers(0, SIZE, count)]


def _quantiles(factors: list[float]) -> Floats:
    shares = (np.arange(SIZE) + 0.5) / SIZE
    return _with_mean_one(np.quantile(np.array(factors), shares))


def _log_normal(share: float) -> Floats:
    if not 0 <= share <= 10:
        raise CostsError(f"the spread is {share:g}", expected="a relative standard deviation from 0 to 10, like 0.1")
    sigma = math.sqrt(math.log1p(share**2))
    normal = NormalDist()
    table = np.exp(sigma * np.array([normal.inv_cdf((at + 0.5) / SIZE) for at in range(SIZE)]))
    return _with_mean_one(table)


def _with_mean_one(table: Floats) -> Floats:
    scaled: Floats = table / table.mean()
    return scaled
