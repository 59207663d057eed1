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
from statistics import median
from typing import NamedTuple

import numpy as np

from drumline.core.errors import PlanError
from drumline.plan.calibrated.calibration import Calibration, MeasuredWork
from drumline.plan.calibrated.setting import WIDTHS
from drumline.plan.calibrated.step_tape import UNALIGNED, Work

_NEAREST = 14  # points that a plane goes through
_CLOSE = 0.15  # in octaves: points nearer than this count the same
_BEYOND = 1.5  # octaves outside of the points up to which a plane is followed
_OVER = 0.3  # how far a plane may leave the range of its points
_UNKNOWN = 0.25  # error of a price from one or two points
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


class _Points(NamedTuple):
    """The measured works of a kind and a format: where they are, and the logarithms of their factors."""

    places: np.ndarray
    factors: np.ndarray
    entries: list[MeasuredWork]


class Prices:
    """The prices of works on a calibrated device."""

    def __init__(self, calibration: Calibration) -> None:
        groups: dict[tuple[str, str], list[MeasuredWork]] = defaultdict(list)
        for entry in calibration.works:
            groups[entry.work.kind, entry.work.dtype].append(entry)
        self.start = min(entry.seconds for entry in calibration.works)  # of a kernel
        self._bytes_per_second = _bytes_rate(calibration)
        self._flops_per_second = {
            key: max(demand(entry.work).flops / entry.seconds for entry in entries) for key, entries in groups.items()
        }
        self._points = {key: self._located(entries) for key, entries in groups.items()}
        self._known: dict[Work, Price] = {}
        self._errors: dict[tuple[str, str], float] = {}

    def _located(self, entries: list[MeasuredWork]) -> _Points:
        factors = [math.log(entry.seconds / self.ideal(entry.work)) for entry in entries]
        return _Points(np.array([_place(entry.work) for entry in entries]), np.array(factors), entries)

    def ideal(self, work: Work) -> float:
        """Return the seconds of a work at the best rates that were measured."""
        need = demand(work)
        seconds = need.bytes / self._bytes_per_second
        if need.flops:
            seconds = max(seconds, need.flops / self._flops_per_second[work.kind, work.dtype])
        return self.start + seconds

    def of(self, work: Work) -> Price:
        """Return the price of a work; an error names a kind that was not measured."""
        if work not in self._known:
            key = work.kind, work.dtype
            if key not in self._points:
                if work.kind.endswith(UNALIGNED):
                    sizes = " x ".join(map(str, work.shape))
                    raise PlanError(
                        f"the calibration has no products like {sizes} in {work.dtype}, whose rows are no multiple of "
                        "16 bytes",
                        expected="sizes that are multiples of 8, for which products are much faster",
                        fix="pad the vocabulary and the widths to such sizes, or calibrate again",
                    )
                raise PlanError(
                    f"the calibration has no {work.kind} in {work.dtype}",
                    expected="measurements of everything that the step launches",
                    fix=f"calibrate again, with {work.dtype} among --dtypes and more --seconds",
                )
            places, factors, _ = self._points[key]
            seconds = self.ideal(work) * math.exp(plane(_place(work), places, factors))
            self._known[work] = Price(seconds, self._error(key))
        return self._known[work]

    def _error(self, key: tuple[str, str]) -> float:
        """Return the median error of points that are left out, each forecast from the others."""
        if key not in self._errors:
            places, factors, entries = self._points[key]
            errors = [
                abs(plane(places[at], np.delete(places, at, 0), np.delete(factors, at)) - factors[at])
                for at in range(0, len(entries), max(len(entries) // 24, 1))
                if len(entries) > 2
            ]
            self._errors[key] = float(median(errors)) if errors else _UNKNOWN
        return self._errors[key]

    def workspace(self, work: Work) -> float:
        """Return the bytes that a work needs while it runs, by those of the nearest point and its bytes."""
        points = self._points.get((work.kind, work.dtype))
        if points is None:
            return 0.0
        nearest = points.entries[int(np.argmin(((points.places - _place(work)) ** 2).sum(1)))]
        return nearest.workspace * demand(work).bytes / max(demand(nearest.work).bytes, 1.0)


def _bytes_rate(calibration: Calibration) -> float:
    """Return the best rate of large works; small ones stay in caches."""
    passes = [(demand(entry.work), entry.seconds) for entry in calibration.works]
    passes = [(need, took) for need, took in passes if not need.flops]
    least = max((need.bytes for need, _ in passes), default=0.0) / _LARGE
    return max((need.bytes / took for need, took in passes if need.bytes >= least), default=1e9)


def _place(work: Work) -> np.ndarray:
    place: np.ndarray = np.log2(np.array(work.shape, dtype=float))
    return place


def plane(place: np.ndarray, places: np.ndarray, values: np.ndarray) -> float:
    """Return the value at a place of a plane through the nearest points, near ones counting more.

    A point at the place itself decides alone. Far outside of the points, the plane is followed only some way.

    >>> places = np.array([[0.0], [1.0], [2.0], [4.0]])
    >>> [round(plane(np.array([at]), places, 2 * places[:, 0]), 2) for at in (1.0, 3.0, 9.0)]
    [2.0, 6.0, 8.3]
    """
    squares = ((places - place) ** 2).sum(1)
    near = np.argsort(squares, kind="stable")[:_NEAREST]
    if squares[near[0]] < 1e-18:
        return float(values[near[0]])
    inside = np.clip(place, places[near].min(0) - _BEYOND, places[near].max(0) + _BEYOND)
    weights = 1.0 / (squares[near] + _CLOSE**2) ** 2
    design = np.hstack([np.ones((len(near), 1)), places[near] - inside])
    # A little is taken off slopes, so that few points on a line still determine a plane.
    ridge = np.diag([0.0] + [1e-6 * weights.sum()] * places.shape[1])
    solved = np.linalg.solve(design.T @ (weights[:, None] * design) + ridge, design.T @ (weights * values[near]))
    return float(np.clip(solved[0], values[near].min() - _OVER, values[near].max() + _OVER))
