"""What a row is made of: equal blocks of all text, or pieces of documents. Each gives inputs, and targets one ahead."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import numpy as np

from drumline.train.data.items.documents import Documents
from drumline.train.data.items.fingerprint import Part
from drumline.train.data.items.order import Indices
from drumline.train.models.built import IGNORED


class Samples(ABC):
    """Runs of tokens of at most `sequence`, numbered; those in which nothing is trained on are left out."""

    def __init__(self, documents: Documents, sequence: int) -> None:
        self.documents = documents
        self.sequence = sequence
        self._kept_indices = None if documents.counted is None else self._with_targets()

    @property
    @abstractmethod
    def _num_all(self) -> int: ...

    @property
    @abstractmethod
    def _num_places(self) -> int: ...

    @abstractmethod
    def _all_lengths(self, indices: Indices) -> Indices: ...

    @abstractmethod
    def _read(self, index: int) -> tuple[Indices, Indices]: ...

    @property
    def contents(self) -> list[Part]:
        """What tells these samples from others."""
        return self.documents.contents

    @cached_property
    def num(self) -> int:
        """How many there are."""
        return self._num_all if self._kept_indices is None else len(self._kept_indices)

    def lengths(self, indices: Indices) -> Indices:
        """Return how many inputs each of these has."""
        return self._all_lengths(indices if self._kept_indices is None else self._kept_indices[indices])

    def read(self, index: int) -> tuple[Indices, Indices]:
        """Return inputs and targets; targets that do not count are IGNORED."""
        return self._read(index if self._kept_indices is None else int(self._kept_indices[index]))

    @cached_property
    def num_targets(self) -> int:
        """How many targets count, in all of them."""
        if self._kept_indices is None:
            return self._num_places
        return sum(int((self.read(at)[1] != IGNORED).sum()) for at in range(self.num))

    def _with_targets(self) -> Indices:
        indices = [at for at in range(self._num_all) if (self._read(at)[1] != IGNORED).any()]
        return np.array(indices, dtype=np.int64)


class Pieces(Samples):
    """Documents, those longer than `sequence` in several pieces.

    >>> value = Pieces(Documents.of([[1, 2, 3, 4, 5, 6], [7, 8]]), 3)
    >>> [tuple(part.tolist() for part in value.read(at)) for at in range(value.num)]
    [([1, 2, 3], [2, 3, 4]), ([4, 5], [5, 6]), ([7], [8])]
    """

    @cached_property
    def _last(self) -> Indices:
        """How many pieces there are up to the end of each document."""
        return np.cumsum(-(-(self.documents.lengths - 1) // self.sequence))

    @property
    def _num_all(self) -> int:
        return int(self._last[-1]) if len(self._last) else 0

    @property
    def _num_places(self) -> int:
        return self.documents.num_tokens - len(self.documents)

    def _where(self, indices: Any) -> tuple[Any, Any]:
        """Return the documents of pieces, and where in them the pieces begin."""
        documents = np.searchsorted(self._last, indices, side="right")
        before = np.where(documents > 0, self._last[documents - 1], 0)
        return documents, (indices - before) * self.sequence

    def _all_lengths(self, indices: Indices) -> Indices:
        documents, starts = self._where(indices)
        all_lengths: Indices = np.minimum(self.documents.lengths[documents] - 1 - starts, self.sequence)
        return all_lengths

    def _read(self, index: int) -> tuple[Indices, Indices]:
        document, start = (int(place) for place in self._where(index))
        stop = min(start + self.sequence + 1, int(self.documents.lengths[document]))
        tokens = self.documents.read(document, start, stop)
        counts = self.documents.counts(document, start, stop)
        return tokens[:-1], np.where(counts[1:], tokens[1:], IGNORED)


class Blocks(Samples):
    """All documents one after another, cut into blocks of `sequence`; the last one may be shorter.

    >>> value = Blocks(Documents.of([[1, 2, 3, 4], [7, 8]]), 3)
    >>> [tuple(part.tolist() for part in value.read(at)) for at in range(value.num)]
    [([1, 2, 3], [2, 3, 4]), ([4, 7], [7, 8])]
    """

    @cached_property
    def _last(self) -> Indices:
        return np.cumsum(self.documents.lengths)

    @property
    def _num_all(self) -> int:
        return -(-max(self.documents.num_tokens - 1, 0) // self.sequence)

    @property
    def _num_places(self) -> int:
        return max(self.documents.num_tokens - 1, 0)

    def _all_lengths(self, indices: Indices) -> Indices:
        all_lengths: Indices = np.minimum(self.documents.num_tokens - 1 - indices * self.sequence, self.sequence)
        return all_lengths

    def _read(self, index: int) -> tuple[Indices, Indices]:
        start = index * self.sequence
        stop = min(start + self.sequence + 1, self.documents.num_tokens)
        tokens, counts = [], []
        while start < stop:
            document = int(np.searchsorted(self._last, start, side="right"))
            before = int(self._last[document - 1]) if document else 0
            until = min(stop, int(self._last[document]))
            tokens.append(self.documents.read(document, start - before, until - before))
            counts.append(self.documents.counts(document, start - before, until - before))
            start = until
        joined = np.concatenate(tokens)
        return joined[:-1], np.where(np.concatenate(counts)[1:], joined[1:], IGNORED)
