"""How large the microbatches of a step are, and what each then costs: fitted to measured steps, or by size alone.

    seconds of a stage's op = a + b * places + c * places * length        places = rows * length

The first term is the cost of any call; the second is that of layers that work position by position; the third is
attention, in which each position sees its whole row.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from drumline.core.action import COMPUTE_OPS, Op
from drumline.core.costs import Costs, Edge
from drumline.core.errors import BatchError
from drumline.core.measured.costs import latencies
from drumline.core.measured.measured import Measured, stage_costs
from drumline.model.values import pack
from drumline.runtime import user_batch
from drumline.runtime.user_batch import has_microbatches

_NEAR = 1.02  # a fit with fewer terms is taken if its error is at most so many times that of one with more


class Size(NamedTuple):
    """Rows of a microbatch, and places in each."""

    rows: int
    length: int

    @property
    def terms(self) -> tuple[float, float, float]:
        """What seconds are a sum of: 1, places, and places times length."""
        places = self.rows * self.length
        return 1.0, float(places), float(places * self.length)


def sizes_of(value: Any) -> tuple[Size, ...]:
    """Return the sizes of microbatches that the user cut; nothing where they are not.

    >>> import torch
    >>> from drumline.model.microbatches import Microbatches
    >>> sizes_of({"x": Microbatches([torch.ones(2, 7), torch.ones(3, 4, 8)])})
    (Size(rows=2, length=7), Size(rows=3, length=4))
    """
    if not has_microbatches(value):
        return ()
    shapes = [() if tensor is None else tuple(tensor.shape) for tensor in user_batch.lead_of(*pack(value))]
    return tuple(Size(*(*shape[:2], 1, 1)[:2]) for shape in shapes)


def sizes_given(sizes: Iterable[Any]) -> tuple[Size, ...]:
    """Return sizes that a user spells as lengths, or as rows and length.

    >>> sizes_given([7, (2, 5)])
    (Size(rows=1, length=7), Size(rows=2, length=5))
    """
    shapes = []
    for number in sizes:
        pair = (1, number) if isinstance(number, int) else number
        if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(n, int) and n >= 1 for n in pair):
            raise BatchError(f"{number!r:.60} is given as a size", expected="a length, or (rows, length), of 1 or more")
        shapes.append(Size(*pair))
    return tuple(shapes)


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """Seconds of every stage's op by the size of the microbatch; without any measured, sizes are what they cost."""

    num_stages: int
    terms: Mapping[tuple[int, Op], tuple[float, float, float]] = field(default_factory=dict)
    edges: Mapping[tuple[int, int], Edge] = field(default_factory=dict)

    @property
    def is_measured(self) -> bool:
        """Whether these are seconds."""
        return bool(self.terms)

    def weights(self, sizes: Sequence[Size]) -> tuple[float, ...]:
        """Return what each microbatch costs, all stages and ops together.

        >>> SizeCosts(2).weights([Size(2, 7), Size(1, 4)])
        (14.0, 4.0)
        """
        sums = [sum(each) for each in zip(*self.terms.values(), strict=True)] if self.terms else [0.0, 1.0, 0.0]
        return tuple(float(np.dot(sums, size.terms)) for size in sizes)

    def of(self, sizes: Sequence[Size]) -> Costs:
        """Return the costs of a step with microbatches of these sizes: those of the mean one, and factors.

        >>> SizeCosts(1).of([Size(1, 6), Size(1, 2)]).microbatch_factor
        (1.5, 0.5)
        """
        weights = self.weights(sizes)
        mean = sum(weights) / len(weights)
        factors = tuple(weight / mean for weight in weights)
        if not self.terms:
            return Costs(forward=1.0, backward_input=1.0, backward_weight=1.0, microbatch_factor=factors)
        middle = np.mean([size.terms for size in sizes], axis=0)
        seconds = {key: float(np.dot(terms, middle)) for key, terms in self.terms.items()}
        return Costs(**stage_costs(seconds, self.num_stages), edges=dict(self.edges), microbatch_factor=factors)


def fitted(steps: Sequence[tuple[Measured, Sequence[Size]]], num_stages: int) -> SizeCosts:
    """Return what microbatches cost by their size, as steps were measured; by size alone if there are none.

    >>> fitted([], 2).is_measured
    False
    """
    samples: dict[tuple[int, Op], dict[Size, list[float]]] = defaultdict(lambda: defaultdict(list))
    for measured, sizes in steps:
        for track in measured.tracks:
            for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
                if action.op in COMPUTE_OPS and not action.parts and action.microbatch is not None:
                    samples[action.stage, action.op][sizes[action.microbatch]].append(end - start)
    terms = {}
    for key, by_size in sorted(samples.items()):
        known = {size: median(seconds) for size, seconds in by_size.items()}
        terms[key] = fit(list(known), list(known.values()))
    if {stage for stage, _ in terms} != set(range(num_stages)):
        return SizeCosts(num_stages)  # overlapped pairs were not measured apart
    return SizeCosts(num_stages, terms, latencies([step for step, _ in steps], quickest=True))


def fit(sizes: Sequence[Size], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return a, b and c, none below 0: as few of them as explain the seconds as well as more would.

    >>> [round(value, 6) for value in fit([Size(1, 2), Size(1, 4), Size(2, 4)], [5.0, 7.0, 11.0])]
    [3.0, 1.0, 0.0]
    """
    table, wanted = np.array([size.terms for size in sizes]), np.array(seconds)
    scale = np.maximum(wanted, wanted.max() * 1e-3)  # errors are counted as parts of what is measured
    tried: list[tuple[float, tuple[float, float, float]]] = []
    for chosen in [(1,), (0, 1), (1, 2), (0, 1, 2), (0,), (2,), (0, 2)]:
        columns = table[:, chosen] / scale[:, None]
        factors = np.linalg.lstsq(columns, wanted / scale, rcond=None)[0]
        if (factors < 0).any():
            continue
        terms = [0.0, 0.0, 0.0]
        for at, value in zip(chosen, factors, strict=True):
            terms[at] = float(value)
        error = float(np.abs(table @ terms - wanted).__truediv__(scale).mean())
        tried.append((error, (terms[0], terms[1], terms[2])))
    least = min(error for error, _ in tried)
    return next(terms for error, terms in tried if error <= least * _NEAR + 1e-9)
