"""The seconds of any work, from those that were measured.

::

    measured seconds / ideal seconds        the factor of a measured point; 1.4 for example
    factors of the nearest points           a plane through their logarithms, over the logarithms of the sizes
    ideal seconds x factor                  the seconds of a work in between

The ideal has the shape of the law: operations at the best measured rate, or bytes at the best measured rate, and the
start of a kernel. So a factor changes slowly between points, and points far apart are enough.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from statistics import median
from typing import NamedTuple

import numpy as np

from drumline.core.errors import PlanError
from drumline.plan.calibrated.calibration import Calibration, MeasuredWork
from drumline.plan.calibrated.setting import WIDTHS
from drumline.plan.calibrated.step_tape import Work

_NEAREST = 14  # points that a plane goes through
_CLOSE = 0.15  # in octaves: points nearer than this count the same
_BEYOND = 1.5  # octaves outside of the points up to which a plane is followed
_LARGE = 16  # works of at least this part of the largest's bytes say how fast memory is
_MUON_STEPS = 5


class Demand(NamedTuple):
    """What a work cannot do without: operations, and bytes read and written."""

    flops: float
    bytes: float


class Price(NamedTuple):
    """Seconds, and the relative error to expect of them."""

    seconds: float
    error: float


# Bytes read and written for each number of a work on single numbers, in numbers of its format.
_PASSES = {"add": 3, "mul": 3, "scale": 2, "neg": 2, "cat": 2, "silu": 2, "silu-backward": 3, "copy": 2, "fill": 1}
_PASSES |= {"repeat": 2, "repeat-backward": 2, "exp": 2, "times": 2, "cast-up": 3, "cast-down": 3}
_PASSES |= {"adamw": 7, "adamw-foreach": 20, "adamw-loop": 25}
_ROWS = {"norm": 2, "norm-backward": 4, "softmax": 2, "softmax-backward": 3, "nll": 0, "nll-backward": 1}


def demand(work: Work) -> Demand:
    """Return what a work cannot do without.

    >>> demand(Work("product", "fp32", (10, 20, 30)))
    Demand(flops=12000.0, bytes=4400.0)
    >>> demand(Work("add", "bf16", (100,))).bytes
    600.0
    """
    width, shape = WIDTHS.get(work.dtype, 1), work.shape
    if work.kind.startswith("product"):
        rows, columns, depth = shape
        return Demand(2.0 * rows * columns * depth, float(width * (rows * columns + rows * depth + columns * depth)))
    if work.kind.startswith("attention"):
        rows, length, heads, keys, head = shape
        flops = 2.0 * rows * heads * length * length * head  # half of both products: the rest is masked
        backward = work.kind == "attention-backward"
        size = width * rows * length * head * 2 * (heads + keys)
        return Demand(flops * (2.5 if backward else 1.0), float(size * (2 if backward else 1)))
    if work.kind == "muon":
        long, short = shape
        flops = _MUON_STEPS * 2.0 * (2 * long * short**2 + short**3)
        return Demand(flops, float(30 * width * long * short))
    if work.kind.startswith("embedding"):
        tokens, hidden, vocabulary = shape
        return Demand(0.0, float(width * hidden * (2 * tokens + (vocabulary if "backward" in work.kind else 0))))
    if work.kind in _ROWS:
        return Demand(0.0, float(width * shape[0] * (shape[1] * _ROWS[work.kind] + 1)))
    return Demand(0.0, float(width * math.prod(shape) * _PASSES[work.kind]))


class Prices:
    """The prices of works on a calibrated device."""

    def __init__(self, calibration: Calibration) -> None:
        self._points: dict[tuple[str, str], list[MeasuredWork]] = defaultdict(list)
        for entry in calibration.works:
            self._points[entry.work.kind, entry.work.dtype].append(entry)
        self._known: dict[Work, Price] = {}
        self._device = calibration.device
        self._errors: dict[tuple[str, str], float] = {}

    @cached_property
    def start(self) -> float:
        """The least seconds of any work that was measured: a kernel's start."""
        return min(entry.seconds for points in self._points.values() for entry in points)

    @cached_property
    def _bytes_per_second(self) -> float:
        """Return the best rate of large works; small ones stay in caches."""
        passes = [(demand(entry.work), entry.seconds) for points in self._points.values() for entry in points]
        sizes = [need.bytes for need, _ in passes if not need.flops]
        least = max(sizes, default=0.0) / _LARGE
        return max((need.bytes / took for need, took in passes if not need.flops and need.bytes >= least), default=1e9)

    def _flops_per_second(self, kind: str, dtype: str) -> float:
        rates = (demand(entry.work).flops / entry.seconds for entry in self._points[kind, dtype])
        return max(rates, default=0.0) or 1.0

    def ideal(self, work: Work) -> float:
        """Return the seconds of a work at the best rates that were measured."""
        need = demand(work)
        seconds = need.bytes / self._bytes_per_second
        if need.flops:
            seconds = max(seconds, need.flops / self._flops_per_second(work.kind, work.dtype))
        return self.start + seconds

    def of(self, work: Work) -> Price:
        """Return the price of a work; an error names a kind that was not measured."""
        if work not in self._known:
            points = self._points.get((work.kind, work.dtype))
            if not points:
                raise PlanError(
                    f"the calibration has no {work.kind} in {work.dtype}",
                    expected="measurements of everything that the step launches",
                    fix=f"calibrate again, with {work.dtype} among --dtypes and more --seconds",
                )
            self._known[work] = Price(self._seconds(work, points), self._error(work.kind, work.dtype))
        return self._known[work]

    def _seconds(self, work: Work, points: Sequence[MeasuredWork]) -> float:
        return self.ideal(work) * math.exp(_plane(_place(work), [(_place(e.work), self._factor(e)) for e in points]))

    def _factor(self, entry: MeasuredWork) -> float:
        return math.log(entry.seconds / self.ideal(entry.work))

    def _error(self, kind: str, dtype: str) -> float:
        """Return the median error of points that are left out, each forecast from the others."""
        key = (kind, dtype)
        if key not in self._errors:
            points = self._points[key]
            inner = points if len(points) > 2 else []
            errors = [
                abs(math.log(self._seconds(entry.work, [other for other in points if other is not entry]))
                    - math.log(entry.seconds))
                for entry in inner[:: max(len(inner) // 24, 1)]
            ]  # fmt: skip
            self._errors[key] = median(errors) if errors else 0.25
        return self._errors[key]

    def workspace(self, work: Work) -> float:
        """Return the bytes that a work needs while it runs, by those of the nearest point and its bytes."""
        points = self._points.get((work.kind, work.dtype))
        if not points:
            return 0.0
        place = _place(work)
        nearest = min(points, key=lambda entry: _distance(place, _place(entry.work)))
        return nearest.workspace * demand(work).bytes / max(demand(nearest.work).bytes, 1.0)


def _place(work: Work) -> tuple[float, ...]:
    return tuple(math.log2(size) for size in work.shape)


def _distance(place: Sequence[float], other: Sequence[float]) -> float:
    return math.dist(place, other)


def _plane(place: Sequence[float], points: Sequence[tuple[Sequence[float], float]]) -> float:
    """Return the value at a place of a plane through the nearest points, near ones counting more.

    A point at the place itself decides alone. Far outside of the points, the plane is followed only some way.

    >>> line = [((x,), 2.0 * x) for x in (0.0, 1.0, 2.0, 4.0)]
    >>> _plane((1.0,), line), round(_plane((3.0,), line), 3)
    (2.0, 6.0)
    """
    ranked = sorted(((_distance(place, where), where, value) for where, value in points), key=lambda each: each[0])
    if ranked[0][0] < 1e-9:
        return ranked[0][2]
    near = ranked[:_NEAREST]
    low = np.min([where for _, where, _ in near], axis=0) - _BEYOND
    high = np.max([where for _, where, _ in near], axis=0) + _BEYOND
    target = np.clip(np.array(place), low, high)
    weights = np.array([1.0 / (distance**2 + _CLOSE**2) for distance, _, _ in near])
    offsets = np.array([where for _, where, _ in near]) - target
    values = np.array([value for _, _, value in near])
    design = np.hstack([np.ones((len(near), 1)), offsets])
    # A little is taken off slopes, so that few points on a line still determine a plane.
    ridge = np.diag([0.0] + [1e-3 * weights.sum()] * offsets.shape[1])
    solved = np.linalg.solve(design.T @ (weights[:, None] * design) + ridge, design.T @ (weights * values))
    return float(np.clip(solved[0], values.min() - 0.3, values.max() + 0.3))
