"""How samples become rows, microbatches and steps: one class for each of `lengths.how`.

Samples of an epoch come shuffled, in windows. A layout makes units of a window, and a step takes `per_step` of them:

    blocks, packed    a unit is a row                        a step has sequences of them
    padded            a unit is a microbatch                 a step has num_microbatches of each data-parallel rank
    buckets           a unit is a step, rows of one length

Steps go on over the ends of windows and epochs, so nothing is left out. What a window of buckets leaves over, too few
rows of a length to fill a step, is carried into the next; at the end of an epoch it joins longer ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from drumline.core.errors import UsageError, nearest
from drumline.train.data.order import Indices
from drumline.train.data.packing import alike, chosen_buckets, packed

HOWS = ("blocks", "packed", "padded", "buckets")
MOST_BUCKETS = 8
_CHUNK = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StepShape:
    """How many rows there are: of a microbatch, microbatches of a rank's step, and data-parallel ranks."""

    microbatch: int
    num_microbatches: int
    size: int = 1

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


class Sized(Protocol):
    """Samples by their number, with their lengths."""

    @property
    def num(self) -> int:
        """How many there are."""
        ...

    def lengths(self, indices: Indices) -> Indices:
        """Return the lengths of some."""
        ...


class Layout:
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
        return [Unit(((int(one),),), self.width) for one in samples], samples[:0]

    def share(self, units: Sequence[Unit], rank: int) -> list[list[Unit]]:
        """Return what a rank takes of a step's units: its microbatches, each of one or more units."""
        mine, each = units[rank * self.shape.rows : (rank + 1) * self.shape.rows], self.shape.microbatch
        return [list(mine[start : start + each]) for start in range(0, len(mine), each)]

    def short_step(self) -> list[Unit] | None:
        """Return a step of all samples, too few to fill it; None unless every microbatch gets one.

        Rows without samples fill it up. Units are dealt to microbatches in turn, as `share` takes them.
        """
        units, _ = self.units(np.arange(self.samples.num, dtype=np.int64), last=True)
        return self._dealt(units, Unit(((),), self.width))

    def _dealt(self, given: Sequence[T], empty: T) -> list[T] | None:
        count, each = self.shape.num_microbatches * self.shape.size, self.shape.microbatch
        if len(given) < count:
            return None
        slots = [given[at::count] for at in range(count)]
        return [one for slot in slots for one in [*slot, *[empty] * (each - len(slot))]]

    def described(self) -> dict[str, Any]:
        """Return what a saved position depends on."""
        return {"how": type(self).__name__, "width": self.width, "num_samples": self.samples.num}


class Packed(Layout):
    """Rows of several samples, side by side."""

    def count_rows(self) -> int:
        """Return how many rows all tokens fill."""
        chunks = (np.arange(at, min(at + _CHUNK, self.samples.num)) for at in range(0, self.samples.num, _CHUNK))
        return -(-sum(int(self.samples.lengths(one).sum()) for one in chunks) // self.width)

    def units(self, samples: Indices, *, last: bool) -> tuple[list[Unit], Indices]:
        """Return full rows; only the last few of a window have room left."""
        rows = packed(self.samples.lengths(samples).tolist(), self.width)
        return [Unit((tuple(int(samples[at]) for at in row),), self.width) for row in rows], samples[:0]


class Padded(Layout):
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
        return [Unit(tuple((int(samples[at]),) for at in one), int(lengths[one].max())) for one in groups]

    def short_step(self) -> list[Unit] | None:
        """Return a step of all samples, in as many microbatches as it must have."""
        if self.samples.num < self.per_step:
            return None
        return self._grouped(np.arange(self.samples.num, dtype=np.int64), self.per_step)

    def share(self, units: Sequence[Unit], rank: int) -> list[list[Unit]]:
        """Return a rank's microbatches."""
        each = self.shape.num_microbatches
        return [[one] for one in units[rank * each : (rank + 1) * each]]

    def described(self) -> dict[str, Any]:
        """Return what a saved position depends on."""
        return {**super().described(), "microbatch": self.shape.microbatch}


class Buckets(Layout):
    """Steps whose rows have all the same length, one of a few."""

    carries = True

    def __init__(self, samples: Sized, shape: StepShape, width: int, buckets: Sequence[int] = ()) -> None:
        super().__init__(samples, shape, width)
        self.per_step = 1
        self.buckets = tuple(buckets) or self._chosen()

    def _chosen(self) -> tuple[int, ...]:
        counts = np.zeros(self.width + 1, dtype=np.int64)
        for start in range(0, self.samples.num, _CHUNK):
            some = np.arange(start, min(start + _CHUNK, self.samples.num), dtype=np.int64)
            counts += np.bincount(self.samples.lengths(some), minlength=len(counts))
        longest = int(np.flatnonzero(counts)[-1]) if counts.any() else self.width
        return chosen_buckets(counts[: longest + 1], MOST_BUCKETS, step=max(1, -(-longest // 64)))

    def units(self, samples: Indices, *, last: bool) -> tuple[list[Unit], Indices]:
        """Return as many steps as there are rows for; the rest is carried."""
        places = np.searchsorted(self.buckets, self.samples.lengths(samples))
        units, is_left = [], np.zeros(len(samples), dtype=bool)
        for at, bucket in enumerate(self.buckets):
            inside = np.flatnonzero(places == at)
            full = self._full(inside)
            units += [self._unit(samples[one], bucket) for one in inside[:full].reshape(-1, self.shape.all_rows)]
            is_left[inside[full:]] = True
        left = samples[is_left]
        if not last:
            return units, left
        # What was carried into this window stands first, and is not carried again.
        full = self._full(left)
        taken, left = left[:full], left[full:]
        taken = taken[np.argsort(-self.samples.lengths(taken), kind="stable")]
        for one in taken.reshape(-1, self.shape.all_rows):
            longest = int(self.samples.lengths(one[:1])[0])
            units.append(self._unit(one, next(bucket for bucket in self.buckets if bucket >= longest)))
        return units, left

    def _full(self, samples: Indices) -> int:
        """Return how many of these fill whole steps."""
        return len(samples) // self.shape.all_rows * self.shape.all_rows

    def short_step(self) -> list[Unit] | None:
        """Return a step of all samples, of the length that the longest needs."""
        every = np.arange(self.samples.num, dtype=np.int64)
        rows: list[tuple[int, ...]] = [(int(one),) for one in every]
        dealt = self._dealt(rows, ())
        if dealt is None:
            return None
        longest = int(self.samples.lengths(every).max())
        return [Unit(tuple(dealt), next(bucket for bucket in self.buckets if bucket >= longest))]

    def _unit(self, samples: Indices, bucket: int) -> Unit:
        return Unit(tuple((int(one),) for one in samples), bucket)

    def share(self, units: Sequence[Unit], rank: int) -> list[list[Unit]]:
        """Return a rank's microbatches."""
        rows, each = self.shape.rows, self.shape.microbatch
        mine = units[0].rows[rank * rows : (rank + 1) * rows]
        return [[Unit(mine[start : start + each], units[0].width)] for start in range(0, rows, each)]

    def described(self) -> dict[str, Any]:
        """Return what a saved position depends on."""
        return {**super().described(), "buckets": list(self.buckets), "rows": self.shape.all_rows}


def check_buckets(buckets: Sequence[int], sequence: int) -> None:
    """Refuse lengths that are no buckets.

    >>> check_buckets((128, 64), 256)
    Traceback (most recent call last):
    drumline.core.errors.UsageError: lengths.buckets is (128, 64); expected lengths from 1 to 256 (batch.sequence), ...
    """
    if list(buckets) != sorted(set(buckets)) or any(not 1 <= one <= sequence for one in buckets):
        expected = f"lengths from 1 to {sequence} (batch.sequence), each longer than the one before"
        raise UsageError(f"lengths.buckets is {tuple(buckets)}", expected=expected)


def layout_of(how: str, samples: Sized, shape: StepShape, width: int, buckets: Sequence[int] = ()) -> Layout:
    """Return the layout of that name."""
    if how not in HOWS:
        raise UsageError(f"lengths.how is {how!r:.60}", fix=nearest(how, HOWS))
    if how == "buckets":
        return Buckets(samples, shape, width, buckets)
    return {"blocks": Layout, "packed": Packed, "padded": Padded}[how](samples, shape, width)
