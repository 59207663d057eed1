"""How a batch is cut: rows of a microbatch and microbatches in the pipe, from what stages were measured to take.

A stage takes `fixed + each x rows` seconds, fitted to its last microbatches of the same shape. Two bounds follow from
the budget, the seconds that a microbatch may spend between entering the first stage and leaving the last:

    window x slowest(rows) <= share of budget  so many microbatches in the pipe queue no longer than that
    window = 2 per stage where that fits       one that computes and one that waits: then no stage runs dry

The share is 0.85, as long as no more than one microbatch of a hundred spends nearly the whole budget. Some take much
longer than the average on a machine that others use too. Then the share falls until it is one of a hundred again.

Within them, M follows from the queue. While more waits behind a batch, the pipe stays full whatever M is, and few large
microbatches waste least. If nothing waits, the batch is alone in the pipe, and M makes its own way short:

    sum of stages(rows / M) + (M - 1) x slowest(rows / M)      each with what a message takes, measured too
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import ceil, inf

from drumline.serve.front.tickets import Signature

_FADE = 0.97  # weight of the past with every new microbatch
_MOST_SHAPES = 256
_LARGEST_SHARE = 0.85  # of the budget: what is left is for messages, and for microbatches that take longer than others
_LEAST_SHARE = 0.5
_LATE = 0.95  # of the budget: a microbatch that takes longer counts as late
_STEP = 0.05  # by which each late microbatch lowers the share; one that is in time raises it by a hundredth of that
_ROUNDING = 1e-9
_MOST_CUTS = 64
_ANY_NUMBER = 2**62


@dataclass(slots=True)
class RowFit:
    """Seconds over rows: a fading least-squares fit, through the origin as long as rows do not vary."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    fitted: tuple[float, float] = (0.0, 0.0)  # the seconds of a microbatch without rows, and those of each row

    def add(self, rows: int, seconds: float) -> None:
        """Take in a measurement."""
        for name, value in (("weight", 1.0), ("x", rows), ("y", seconds), ("xx", rows * rows), ("xy", rows * seconds)):
            setattr(self, name, getattr(self, name) * _FADE + value)
        self.fitted = self._fit()

    def seconds(self, rows: float) -> float:
        """Return the expected seconds.

        >>> line = RowFit()
        >>> for rows in (1, 2, 4): line.add(rows, 0.25 + rows)
        >>> round(line.seconds(8), 6)
        8.25
        """
        fixed, each = self.fitted
        return fixed + each * rows

    def _fit(self) -> tuple[float, float]:
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x**2
        each = max(0.0, (self.xy / self.weight - mean_x * mean_y) / spread) if spread >= 1e-3 * mean_x**2 else 0.0
        fixed = mean_y - each * mean_x
        if spread < 1e-3 * mean_x**2 or fixed < 0:
            return 0.0, mean_y / mean_x
        return fixed, each

    def most_rows(self, seconds: float) -> float:
        """Return the rows that take so many seconds; infinite if rows take none.

        >>> line = RowFit()
        >>> for rows in (1, 2, 4): line.add(rows, 0.25 + rows)
        >>> round(line.most_rows(8.25), 6)
        8.0
        """
        fixed, each = self.fitted
        return (seconds - fixed) / each if each > 0 else inf if fixed <= seconds else 0.0


@dataclass(slots=True)
class ShapeFit:
    """What was measured of microbatches of one shape: each stage's seconds, and the share of the budget to fill."""

    stages: list[RowFit]
    share: float = _LARGEST_SHARE

    def spent(self, share: float) -> None:
        """Take in which share of the budget a microbatch spent in the pipe.

        >>> fit = ShapeFit([])
        >>> fit.spent(1.2); round(fit.share, 4)
        0.8
        >>> for _ in range(99): fit.spent(0.7)
        >>> round(fit.share, 4)
        0.8495
        """
        change = -_STEP if share > _LATE else _STEP / 100
        self.share = max(_LEAST_SHARE, min(_LARGEST_SHARE, self.share + change))

    def slowest(self, rows: float) -> float:
        """Return the expected seconds of the slowest stage."""
        return max((line.seconds(rows) for line in self.stages), default=0.0)


@dataclass(slots=True)
class Tuner:
    """Decides how batches are cut, from measurements.

    >>> tuner = Tuner(num_stages=2, budget=0.05, max_rows=64)
    >>> for rows in (1, 2, 3): tuner.add((), rows, [rows * 0.005, rows * 0.005])
    >>> tuner.sizes((), 8, behind=True), tuner.window(())
    ([2, 2, 2, 2], 4)
    >>> tuner.sizes((), 2, behind=False)
    [1, 1]
    """

    num_stages: int
    budget: float
    max_rows: int
    fixed_rows: int = 0  # so many rows a microbatch, whatever is measured
    fixed_window: int = 0
    fitting: Callable[[Signature], int] = lambda signature: _ANY_NUMBER  # rows of a shape that fit into a message
    hop: float = 0.0  # seconds that a microbatch spends between stages, per stage
    shapes: OrderedDict[Signature, ShapeFit] = field(default_factory=OrderedDict)

    def add(
        self, signature: Signature, rows: int, seconds: Sequence[float], hop: float = 0.0, inside: float = 0.0
    ) -> None:
        """Take in what each stage took for a microbatch, what a message took, and all seconds in the pipe."""
        self.hop = hop if not self.shapes else self.hop * _FADE + hop * (1 - _FADE)
        shape = self.shapes.setdefault(signature, ShapeFit([RowFit() for _ in range(self.num_stages)]))
        self.shapes.move_to_end(signature)
        while len(self.shapes) > _MOST_SHAPES:
            self.shapes.popitem(last=False)
        for line, duration in zip(shape.stages, seconds, strict=True):
            line.add(rows, duration)
        shape.spent(inside / self.budget)

    def most_rows(self, signature: Signature) -> int:
        """Return the rows of the largest microbatch within the budget, 1 if even that is over it."""
        if self.fixed_rows:
            return min(self.fixed_rows, self.fitting(signature))
        shape = self.shapes.get(signature)
        if shape is None:
            return 1  # the first one measures
        seconds = self.budget * shape.share / (2 * self.num_stages)
        most = min(self.max_rows, self.fitting(signature))
        return max(1, int(min(most, *(line.most_rows(seconds) for line in shape.stages))))

    def window(self, signature: Signature) -> int:
        """Return how many microbatches may be in the pipe: 2 a stage, or fewer where those would queue too long."""
        if self.fixed_window:
            return self.fixed_window
        shape = self.shapes.get(signature) or ShapeFit([])
        slowest = shape.slowest(self.most_rows(signature))
        fits = int(self.budget * shape.share / slowest + _ROUNDING) if slowest > 0 else 2 * self.num_stages
        return max(self.num_stages, min(2 * self.num_stages, fits))

    def sizes(self, signature: Signature, rows: int, *, behind: bool) -> list[int]:
        """Return the rows of each microbatch of a batch; `behind` says that more waits."""
        most = self.most_rows(signature)
        cuts = ceil(rows / most)
        shape = self.shapes.get(signature)
        if not behind and shape is not None and not self.fixed_rows:
            many = range(cuts, min(rows, cuts + _MOST_CUTS) + 1)
            cuts = min(many, key=lambda number: (self._alone(shape, rows / number, number), number))
        base, more = divmod(rows, cuts)
        return [base + (at < more) for at in range(cuts)]

    def _alone(self, shape: ShapeFit, rows: float, cuts: int) -> float:
        """Return how long a batch takes that has the pipe to itself."""
        slowest = shape.slowest(rows) + self.hop
        return sum(line.seconds(rows) + self.hop for line in shape.stages) + (cuts - 1) * slowest
