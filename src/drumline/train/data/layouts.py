"""How samples become rows, microbatches and steps: one class for each of `lengths.how`.

Samples of an epoch come shuffled, in windows. A layout makes units of a window, and a step takes `per_step` of them:

    blocks, packed    a unit is a row                        a step has sequences of them
    padded            a unit is a microbatch                 a step has num_microbatches of each data-parallel rank
    buckets           a unit is a step, rows of one length

Steps continue over the ends of windows and epochs, so nothing is left out. A window of buckets may leave over too few
rows of a length to fill a step. These go into the next window; at the end of an epoch neighbours in length share steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from drumline.train.data.items.batch import Bucket
from drumline.train.data.items.order import Indices
from drumline.train.data.packing import alike, packed

_CHUNK = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many rows there are: of a microbatch, microbatches of a rank's step, and data-parallel ranks."""

    microbatch: int
    num_microbatches: int
    size: int = 1
    counts: tuple[int, ...] = ()  # numbers of microbatches that steps may have, the least first; none: this one alone

    @property
    def possible(self) -> tuple[int, ...]:
        """The numbers of microbatches that steps may have."""
        return self.counts or (self.num_microbatches,)

    def bucket(self, length: int, places: float) -> Bucket:
        """Return the steps of rows of one length, if microbatches should have so many places.

        No microbatch has more, unless a single row has. A step has as many places as one of all microbatches, or at
        least half as many microbatches, so that ranks do not wait for most of it.

        >>> shape = StepShape(4, 8, counts=tuple(range(1, 17)))
        >>> [(size.rows, size.num_microbatches) for size in (shape.bucket(length, 512) for length in (60, 300, 1024))]
        [(8, 9), (1, 14), (1, 4)]
        """
        if not self.counts:
            return Bucket(length, max(round(places / length), 1), self.num_microbatches)
        rows = max(int(places / length), 1)
        wanted = max(self.num_microbatches * places / (rows * length), self.num_microbatches / 2)
        return Bucket(length, rows, min(self.counts, key=lambda count: (abs(count - wanted), count)))

    @property
    def rows(self) -> int:
        """Rows that one rank's step has."""
        return self.microbatch * self.num_microbatches

    @property
    def all_rows(self) -> int:
        """Rows that a step has on all ranks together."""
        return self.rows * self.size


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows of samples, all filled up to `width`."""

    rows: tuple[tuple[int, ...], ...]
    width: int
    num_microbatches: int = 1  # that a unit which is a step has on each rank


class Sized(Protocol):
    """Samples by their number, with their lengths."""

    @property
    def num(self) -> int:
        """How many there are."""
        ...

    def lengths(self, indices: Indices) -> Indices:
        """Return the lengths of some."""
        ...


def all_lengths(samples: Sized) -> Iterator[Indices]:
    """Yield the lengths of all samples, so many at a time that they take little memory."""
    for start in range(0, samples.num, _CHUNK):
        yield samples.lengths(np.arange(start, min(start + _CHUNK, samples.num), dtype=np.int64))


class RowLayout:
    """Rows of one sample each, all of `width`: blocks, and points."""

    carries = False

    def __init__(self, samples: Sized, shape: StepShape, width: int) -> None:
        self.samples, self.shape, self.width = samples, shape, width
        self.per_step = shape.all_rows

    @property
    def window(self) -> int:
        """How many samples are looked at together."""
        return 4096

    def count_rows(self) -> int:
        """Return how many rows an epoch has, of those that are packed at least."""
        return self.samples.num

    def units(self, samples: Indices, *, last: bool) -> tuple[list[Unit], Indices]:
        """Return the units of a window, and the samples that are carried into the next."""
        return [Unit(((int(sample),),), self.width) for sample in samples], samples[:0]

    def share(self, units: Sequence[Unit], rank: int) -> list[list[Unit]]:
        """Return what a rank takes of a step's units: its microbatches, each of one or more units."""
        mine, each = units[rank * self.shape.rows : (rank + 1) * self.shape.rows], self.shape.microbatch
        return [list(mine[start : start + each]) for start in range(0, len(mine), each)]

    def beside(self, samples: Sized) -> RowLayout:
        """Return the same for other samples."""
        return type(self)(samples, self.shape, self.width)

    def short_step(self) -> list[Unit] | None:
        """Return a step of all samples, too few to fill it; None unless every microbatch gets one.

        Rows without samples fill it up. Units are dealt to microbatches in turn, as `share` takes them.
        """
        units, _ = self.units(np.arange(self.samples.num, dtype=np.int64), last=True)
        return self._dealt(units, Unit(((),), self.width))

    def _dealt(self, items: Sequence[T], empty: T) -> list[T] | None:
        count = self.shape.num_microbatches * self.shape.size
        return dealt(items, count, self.shape.microbatch, empty) if len(items) >= count else None

    def described(self) -> dict[str, Any]:
        """Return what a saved position depends on."""
        return {"how": type(self).__name__, "width": self.width, "num_samples": self.samples.num}


class Packed(RowLayout):
    """Rows of several samples, side by side."""

    def count_rows(self) -> int:
        """Return how many rows all tokens fill."""
        return -(-sum(int(length.sum()) for length in all_lengths(self.samples)) // self.width)

    def units(self, samples: Indices, *, last: bool) -> tuple[list[Unit], Indices]:
        """Return full rows; only the last few of a window have room left."""
        rows = packed(self.samples.lengths(samples).tolist(), self.width)
        return [Unit((tuple(int(samples[at]) for at in row),), self.width) for row in rows], samples[:0]


class Padded(RowLayout):
    """Microbatches of samples of about the same length, each padded to its own longest."""

    def __init__(self, samples: Sized, shape: StepShape, width: int) -> None:
        super().__init__(samples, shape, width)
        self.per_step = shape.num_microbatches * shape.size

    @property
    def window(self) -> int:
        """As many samples as it takes for neighbours in length to be alike."""
        return 256 * self.shape.microbatch

    def units(self, samples: Indices, *, last: bool) -> tuple[list[Unit], Indices]:
        """Return microbatches that cost alike: many short samples, or few long ones."""
        return self._grouped(samples, max(round(len(samples) / self.shape.microbatch), 1)), samples[:0]

    def _grouped(self, samples: Indices, count: int) -> list[Unit]:
        lengths = self.samples.lengths(samples)
        groups = alike(lengths.tolist(), count)
        return [Unit(tuple((int(samples[at]),) for at in group), int(lengths[group].max())) for group in groups]

    def short_step(self) -> list[Unit] | None:
        """Return a step of all samples, in as many microbatches as it must have."""
        if self.samples.num < self.per_step:
            return None
        return self._grouped(np.arange(self.samples.num, dtype=np.int64), self.per_step)

    def share(self, units: Sequence[Unit], rank: int) -> list[list[Unit]]:
        """Return a rank's microbatches."""
        each = self.shape.num_microbatches
        return [[unit] for unit in units[rank * each : (rank + 1) * each]]

    def described(self) -> dict[str, Any]:
        """Return what a saved position depends on."""
        return {**super().described(), "microbatch": self.shape.microbatch}


def dealt(items: Sequence[T], slots: int, each: int, empty: T) -> list[T]:
    """Return what is given, dealt in turn to slots that hold `each`, slot by slot; empty ones fill them up.

    >>> dealt("abcde", 3, 2, "-")
    ['a', 'd', 'b', 'e', 'c', '-']
    """
    hands = [items[at::slots] for at in range(slots)]
    return [value for hand in hands for value in [*hand, *[empty] * (each - len(hand))]]
