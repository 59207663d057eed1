"""Batches of evaluations, of which a pipeline runs several at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Ahead:
    """A loader of evaluation batches that runs a group of them before it yields them one by one."""

    def __init__(self, loader: Any, size: int, run: Callable[[list[Any]], None]) -> None:
        self._loader, self._size, self._run = loader, size, run

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        says_end = hasattr(self._loader, "end_of_dataloader")
        batches, ended = iter(self._loader), False
        while not ended:
            group: list[Any] = []
            while len(group) < self._size and not ended:
                group += [batch for batch in [next(batches, None)] if batch is not None]
                ended = self._loader.end_of_dataloader if says_end else len(group) < self._size
            if group:
                self._run(group)
            for at, batch in enumerate(group):
                if says_end:  # as it was when this batch was read
                    self._loader.end_of_dataloader = ended and at == len(group) - 1
                yield batch
        next(batches, None)
