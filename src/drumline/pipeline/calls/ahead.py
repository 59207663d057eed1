"""Batches of evaluations that are read one by one, and of which a pipeline runs several at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

_END: Any = object()  # no batch


class Ahead:
    """A loader of batches that reads a group of them before it yields them one by one.

    A loader that says by `end_of_dataloader` which batch is its last, as those of accelerate do, goes on saying so.

    >>> rows = [[3], [4], [5]]
    >>> groups = []
    >>> def run(batches):
    ...     groups.append(batches)
    ...     return [sum(batch) for batch in batches]
    >>> ahead = Ahead(rows, 2)
    >>> [ahead.outcome_of(row, run) for row in ahead], groups
    ([3, 4, 5], [[[3], [4]], [[5]]])
    """

    def __init__(self, loader: Any, size: int) -> None:
        self._loader, self._size = loader, size
        self._group: list[Any] = []
        self._outcomes: deque[tuple[Any, Any]] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def outcome_of(self, batch: Any, run: Callable[[list[Any]], list[Any]]) -> Any:
        """Return what `run` returns for a batch; it gets those that were read with it as well.

        Outcomes of the others are stored until they are asked for, in their order. `run` gets another batch alone.
        """
        if not self._outcomes or self._outcomes[0][0] is not batch:
            places = [at for at, each in enumerate(self._group) if each is batch]
            batches = self._group[places[0] :] if places else [batch]
            self._outcomes = deque(zip(batches, run(batches), strict=True))
        return self._outcomes.popleft()[1]

    def __iter__(self) -> Iterator[Any]:
        says_end = hasattr(self._loader, "end_of_dataloader")
        batches, ended = iter(self._loader), False
        while not ended:
            group: list[Any] = []
            while len(group) < self._size and not ended:
                batch = next(batches, _END)
                group += [] if batch is _END else [batch]
                ended = batch is _END or (says_end and self._loader.end_of_dataloader)
            self._group = group
            for at, batch in enumerate(group):
                if says_end:  # as it was when this batch was read
                    self._loader.end_of_dataloader = ended and at == len(group) - 1
                yield batch
        self._group = []
        next(batches, _END)  # some loaders end only when they are asked for more
