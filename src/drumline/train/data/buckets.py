"""Steps of rows of one length, of which there are many: so nearly all rows are about as long as their bucket.

    length    56   6 rows in each of  8 microbatches        all of them have about as many places: microbatches as
    length   216   1 row  in each of 13                     batch.microbatch documents of mean length, steps as
    length   552   1 row  in each of  5                     batch.sequences of them

Every number of microbatches has its own program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from drumline.train.data.items.batch import Bucket
from drumline.train.data.items.order import Indices
from drumline.train.data.layouts import Packed, Padded, RowLayout, Sized, StepShape, Unit, all_lengths, dealt
from drumline.train.data.packing import chosen_buckets

MOST_BUCKETS = 64
_PADDING = 0.03  # fewer buckets are enough if they pad no more


class Buckets(RowLayout):
    """Steps whose rows have all the same length: see `Bucket`.

    Microbatches of all buckets have about as many places, and so have steps: those of short rows have more rows.
    """

    carries = True

    def __init__(self, samples: Sized, shape: StepShape, width: int, buckets: Sequence[int | Bucket] = ()) -> None:
        super().__init__(samples, shape, width)
        self.per_step = 1
        new_buckets = [bucket for bucket in buckets if isinstance(bucket, Bucket)]
        self.buckets = tuple(new_buckets) or self._shaped([bucket for bucket in buckets if isinstance(bucket, int)])

    def _shaped(self, lengths: Sequence[int]) -> tuple[Bucket, ...]:
        counts = np.zeros(self.width + 1, dtype=np.int64)
        for some in all_lengths(self.samples):
            counts += np.bincount(some, minlength=len(counts))
        longest = int(np.flatnonzero(counts)[-1]) if counts.any() else self.width
        mean = float(np.dot(np.arange(len(counts)), counts)) / max(self.samples.num, 1)
        if not lengths:
            step = min(max(longest // 128, 1), 8)
            lengths = chosen_buckets(counts[: longest + 1], MOST_BUCKETS, step=step, enough=_PADDING) or (self.width,)
        return tuple(self.shape.bucket(length, self.shape.microbatch * mean) for length in lengths)

    def beside(self, samples: Sized) -> Buckets:
        """Return the same for other samples, with one more bucket if these are longer than any."""
        longest, last = max((int(length.max()) for length in all_lengths(samples)), default=0), self.buckets[-1]
        longer = () if longest <= last.length else (Bucket(longest, last.rows, last.num_microbatches),)
        return Buckets(samples, self.shape, self.width, (*self.buckets, *longer))

    def units(self, samples: Indices, *, last: bool) -> tuple[list[Unit], Indices]:
        """Return as many steps as there are rows for; the rest is carried, or at the end of an epoch put together."""
        places = np.searchsorted([size_class.length for size_class in self.buckets], self.samples.lengths(samples))
        units, is_left = [], np.zeros(len(samples), dtype=bool)
        for at, bucket in enumerate(self.buckets):
            inside = np.flatnonzero(places == at)
            rows = bucket.rows * bucket.num_microbatches * self.shape.size
            full = len(inside) // rows * rows
            units += [self._unit(samples[array], bucket) for array in inside[:full].reshape(-1, rows)]
            is_left[inside[full:]] = True
        left = samples[is_left]
        return self._ended(units, left) if last else (units, left)

    def _ended(self, units: list[Unit], left: Indices) -> tuple[list[Unit], Indices]:
        """Return steps of what an epoch leaves over, the longest first; too few for the smallest step are carried."""
        left = left[np.argsort(-self.samples.lengths(left), kind="stable")]
        while len(left):
            longest = int(self.samples.lengths(left[:1])[0])
            bucket = self._smaller(next(s for s in self.buckets if s.length >= longest), len(left))
            if bucket is None:
                break
            rows = bucket.rows * bucket.num_microbatches * self.shape.size
            units.append(self._unit(left[:rows], bucket))
            left = left[rows:]
        return units, left

    def _smaller(self, bucket: Bucket, num_rows: int) -> Bucket | None:
        """Return the bucket, or where there are too few rows for it one of fewer microbatches; None if there is none.

        At most one row of each microbatch is empty, and never a whole microbatch.
        """
        size = self.shape.size
        if num_rows >= bucket.rows * bucket.num_microbatches * size:
            return bucket
        for count in self.shape.possible:
            each = -(-num_rows // (count * size))
            if each <= bucket.rows and num_rows >= count * size:
                return Bucket(bucket.length, each, count)
        return None

    def _unit(self, samples: Indices, bucket: Bucket) -> Unit:
        slots = bucket.num_microbatches * self.shape.size
        rows = dealt([(int(sample),) for sample in samples], slots, bucket.rows, ())
        return Unit(tuple(rows), bucket.length, bucket.num_microbatches)

    def share(self, units: Sequence[Unit], rank: int) -> list[list[Unit]]:
        """Return a rank's microbatches."""
        unit = units[0]
        rows = len(unit.rows) // self.shape.size
        mine, each = unit.rows[rank * rows : (rank + 1) * rows], rows // unit.num_microbatches
        return [[Unit(mine[start : start + each], unit.width)] for start in range(0, rows, each)]

    def short_step(self) -> list[Unit] | None:
        """Return nothing: the end of an epoch makes steps of few rows already."""
        return None

    def described(self) -> dict[str, Any]:
        """Return what a saved position depends on."""
        return {**super().described(), "buckets": [list(astuple(b)) for b in self.buckets], "size": self.shape.size}


def layout_of(how: str, samples: Sized, shape: StepShape, width: int, buckets: Sequence[int] = ()) -> RowLayout:
    """Return the layout of that name."""
    if how == "buckets":
        return Buckets(samples, shape, width, buckets)
    return {"blocks": RowLayout, "packed": Packed, "padded": Padded}[how](samples, shape, width)
