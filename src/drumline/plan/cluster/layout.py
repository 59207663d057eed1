"""A layout: how a cluster's devices divide one training step among themselves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Degrees of parallelism and everything else that decides what a device does and holds.

    `tensor * pipeline * data * context` is the number of devices; `expert` divides `data * context`. `batch` and
    `microbatch` count sequences; a data-parallel rank runs `batch / (data * microbatch)` microbatches.
    """

    batch: int
    microbatch: int = 1
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    context: int = 1
    expert: int = 1
    stages_per_rank: int = 1
    schedule: str = "1f1b"
    zero: int = 0
    sequence_parallel: bool = False
    recompute: str = "none"
    counts: tuple[int, ...] = ()

    @property
    def num_devices(self) -> int:
        """Return how many devices it takes."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def num_microbatches(self) -> int:
        """Return how many microbatches go through a pipeline in a step.

        >>> Layout(batch=2304, tensor=8, pipeline=8, data=24).num_microbatches
        96
        """
        return self.batch // (self.data * self.microbatch)
