"""Documents as token numbers, wherever they lie: in memory, or in files that are mapped and read where needed.

A document is a span of one part. Some are followed by the token that ends a document, which need not be in the part.

    part 0 (a file's bytes)   ├── document 0 ──┤ ├─ document 1 ─┤
    part 1                    ├────────── document 2 ───────────┤
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from drumline.train.data.items.fingerprint import Part
from drumline.train.data.items.order import Indices


class MappedNumbers:
    """Numbers in a file, mapped; other processes map the file again instead of getting its contents."""

    def __init__(self, path: str, dtype: str, offset: int = 0) -> None:
        self.path, self.dtype, self.offset = path, dtype, offset
        self.numbers: NDArray[Any] = np.memmap(path, dtype=dtype, mode="r", offset=offset)

    def __reduce__(self) -> tuple[Any, ...]:
        return MappedNumbers, (self.path, self.dtype, self.offset)


@dataclass(frozen=True)
class Documents:
    """Spans of parts; `end` is the token behind those that have `ends`, and `counted` says which tokens are trained on.

    >>> value = Documents.of([[1, 2, 3], [4]], end=9)
    >>> value.lengths.tolist(), value.read(0, 1, 4).tolist(), value.num_tokens
    ([4, 2], [2, 3, 9], 6)
    """

    parts: tuple[MappedNumbers | NDArray[Any], ...]
    which: NDArray[np.int32]
    starts: Indices
    stops: Indices
    ends: NDArray[np.bool_]
    end: int = 0
    counted: tuple[NDArray[np.bool_], ...] | None = None  # beside every part

    @classmethod
    def of(cls, documents: Sequence[Sequence[int]], *, end: int | None = None) -> Documents:
        """Return documents that are in memory already."""
        part = np.concatenate([np.asarray(document, dtype=np.int32) for document in documents])
        return cls.spans((part,), [np.cumsum([0, *map(len, documents)], dtype=np.int64)], end=end)

    @classmethod
    def spans(
        cls,
        parts: Sequence[MappedNumbers | NDArray[Any]],
        bounds: Sequence[Indices],
        *,
        end: int | None = None,
        counted: tuple[NDArray[np.bool_], ...] | None = None,
    ) -> Documents:
        """Return the documents between the bounds of each part."""
        return cls.between(parts, [(bound[:-1], bound[1:]) for bound in bounds], end=end, counted=counted)

    @classmethod
    def between(
        cls,
        parts: Sequence[MappedNumbers | NDArray[Any]],
        bounds: Sequence[tuple[Indices, Indices]],
        *,
        end: int | None = None,
        counted: tuple[NDArray[np.bool_], ...] | None = None,
    ) -> Documents:
        """Return the documents from the starts to the stops of each part; empty ones are left out."""
        starts = np.concatenate([array for array, _ in bounds])
        stops = np.concatenate([array for _, array in bounds])
        which = np.concatenate([np.full(len(array), at, dtype=np.int32) for at, (array, _) in enumerate(bounds)])
        filled = stops > starts
        ends = np.full(len(starts), end is not None)
        documents = cls(tuple(parts), which, starts, stops, ends, 0 if end is None else end, counted)
        return documents.chosen(np.flatnonzero(filled))

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def contents(self) -> list[Part]:
        """What tells these documents from others: the numbers of all parts, and which of them make documents."""
        names = [part.path if isinstance(part, MappedNumbers) else "the text" for part in self.parts]
        numbers = [part.numbers if isinstance(part, MappedNumbers) else part for part in self.parts]
        parts = [Part(name, number) for name, number in zip(names, numbers, strict=True)]
        parts += [Part("what is trained on", array) for array in self.counted or ()]
        return [*parts, *(Part("the list of documents", array) for array in (self.starts, self.stops))]

    @cached_property
    def lengths(self) -> Indices:
        """How many tokens each document has, its end included."""
        return self.stops - self.starts + self.ends

    @cached_property
    def num_tokens(self) -> int:
        """How many tokens all of them have."""
        return int(self.lengths.sum())

    def chosen(self, indices: Indices) -> Documents:
        """Return some of the documents."""
        names = ("which", "starts", "stops", "ends")
        return replace(self, **{name: getattr(self, name)[indices] for name in names})

    def read(self, at: int, start: int, stop: int) -> Indices:
        """Return the tokens of a document from `start` to before `stop`."""
        part = self.parts[self.which[at]]
        numbers = part.numbers if isinstance(part, MappedNumbers) else part
        first, last = int(self.starts[at]), int(self.stops[at])
        tokens = np.asarray(numbers[first + start : min(first + stop, last)]).astype(np.int64)
        return np.append(tokens, self.end) if first + stop > last and self.ends[at] else tokens

    def counts(self, at: int, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which tokens of a document, from `start` to before `stop`, are trained on."""
        if self.counted is None:
            return np.ones(stop - start, dtype=bool)
        first = int(self.starts[at])
        counts: NDArray[np.bool_] = self.counted[self.which[at]][first + start : first + stop]
        return counts

    def split(self, share: float) -> tuple[Documents, Documents]:
        """Return the documents to train on and those held out: every so many, or the end of the last if there are few.

        >>> train, held_out = Documents.of([[1, 2], [3, 4], [5, 6], [7, 8]]).split(0.25)
        >>> len(train), held_out.read(0, 0, 2).tolist()
        (3, [7, 8])
        >>> train, held_out = Documents.of([list(range(100))]).split(0.05)
        >>> train.num_tokens, held_out.read(0, 0, 5).tolist()
        (95, [95, 96, 97, 98, 99])
        """
        exact = Fraction(share).limit_denominator(10**6)
        numbers = np.arange(len(self) + 1, dtype=object) * exact.numerator // exact.denominator
        is_held = np.diff(numbers.astype(np.int64)) > 0
        if is_held.any() or not share:
            return self.chosen(np.flatnonzero(~is_held)), self.chosen(np.flatnonzero(is_held))
        length = min(int(self.num_tokens * share), int(self.lengths[-1]) - 2)
        if length < 2:
            return self, self.chosen(np.flatnonzero(is_held))
        last = np.arange(len(self)) == len(self) - 1
        cut = self.stops[-1] + self.ends[-1] - length
        train = replace(self, stops=np.where(last, cut, self.stops), ends=self.ends & ~last)
        held_out = self.chosen(np.flatnonzero(last))
        return train, replace(held_out, starts=np.array([cut], dtype=np.int64))
