"""One pipeline step's worth of data, and the streams that give it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Batch:
    """What one pipeline step gets: `pipe.step(**inputs, target=target)`.

    Values are tensors, or `Microbatches` where microbatches differ in length. `num_tokens` counts targets that are not
    ignored, `num_padded` every place that is computed. `bucket` is the length that all rows have, 0 if they differ.
    `num_microbatches` is 0 where the step has as many as the run's own program.
    """

    inputs: dict[str, Any]
    target: Any
    num_tokens: int
    num_padded: int
    bucket: int = 0
    num_microbatches: int = 0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Steps whose rows all have one length: so many rows in each of so many microbatches."""

    length: int
    rows: int
    num_microbatches: int

    @property
    def places(self) -> int:
        """How many places a microbatch has.

        >>> Bucket(128, rows=4, num_microbatches=8).places
        512
        """
        return self.rows * self.length


class BatchStream(Protocol):
    """Batches without end, the same on every rank that has the same place in data parallelism."""

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches from where the stream is; epochs follow each other."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return where the stream is: the next batch yielded after `load_state_dict` is the one that would follow."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a position."""
        ...


@dataclass(frozen=True, slots=True)
class Data:
    """The training stream, and held-out batches that are the same every time."""

    training: BatchStream
    validation: tuple[Batch, ...]
    num_tokens: int  # of one epoch; 0 where nobody knows
    buckets: tuple[Bucket, ...] = ()  # lengths that steps have, if each has one
    counts: tuple[int, ...] = ()  # numbers of microbatches that steps have beside the run's own

    def close(self) -> None:
        """End what reads ahead."""
        close = getattr(self.training, "close", None)
        if close is not None:
            close()
