"""A simplified instance that bounds can reason about: its optimum is no larger than the real one.

Every microbatch costs and holds as much as the cheapest. If I takes 2 and W takes 4, a whole backward of 5 becomes an I
of 2 with a W of 3 after it. Splitting takes longer, and not splitting passes the gradient on later.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from drumline.plan.search.bounds.instance import F, I, Instance, W

_OPS = (F, I, W)

Key = tuple[int, int]  # (stage, op)


class Relaxation:
    """The simplified instance: seconds per (stage, op), the same for all microbatches."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.linked = not instance.placement.mirrored
        forward, first, second, whole = np.moveaxis(instance.times, 2, 0)
        early = np.minimum(first, whole)
        late = np.maximum(0.0, np.minimum(first + second, whole) - early)
        # The seconds of every pair, by stage and microbatch.
        self.exact: list[list[float]] = (forward + early + late).tolist()
        self.seconds: dict[Key, float] = {}
        for op, table in zip(_OPS, (forward, early, late), strict=True):
            self.seconds |= {(stage, op): least for stage, least in enumerate(table.min(axis=1).tolist())}
        self._latency: list[list[float]] = instance.latencies.min(axis=1).tolist()
        self._sizes = [self._of_resource(resource.after) for resource in instance.resources]

    def _of_resource(self, after: list[float]) -> list[tuple[float, float]]:
        table = np.array(after).reshape(self.instance.shape)
        full = table[..., F].min(axis=1)
        return list(zip(full.tolist(), np.minimum(full, (-table[..., W]).min(axis=1)).tolist(), strict=True))

    def sizes(self, stage: int, resource: int) -> tuple[float, float]:
        """Return what the smallest microbatch holds from F on, and at least from I on."""
        return self._sizes[resource][stage]

    def latency(self, stage: int, op: int) -> float:
        """Return the least latency of the output of (stage, op)."""
        return self._latency[stage][op]

    @cached_property
    def way_down(self) -> list[float]:
        """Per stage, the least time from the start of a microbatch to the start of its F there."""
        seconds = [0.0]
        for stage in range(self.instance.num_stages - 1):
            seconds.append(seconds[-1] + self.seconds[stage, F] + self.latency(stage, F))
        return seconds

    @cached_property
    def way_back(self) -> list[float]:
        """Per stage, the least time from the start of F there to the end of I there."""
        last = self.instance.num_stages - 1
        seconds = [self.seconds[last, F] + self.seconds[last, I]]
        for stage in reversed(range(last)):
            between = self.latency(stage, F) + self.latency(stage + 1, I)
            seconds.append(seconds[-1] + self.seconds[stage, F] + self.seconds[stage, I] + between)
        return seconds[::-1]

    @cached_property
    def way_out(self) -> list[float]:
        """Per stage, the least time from the end of I there to the very end: I of earlier stages, and one W."""
        seconds = [self.seconds[0, W]]
        for stage in range(1, self.instance.num_stages):
            after = self.latency(stage, I) + self.seconds[stage - 1, I] + seconds[-1]
            seconds.append(max(after, self.seconds[stage, W]))
        return seconds

    @cached_property
    def to_first(self) -> list[float]:
        """Per stage, the least time from the end of I there to the end of the rank of stage 0."""
        seconds = [self.seconds[0, W]]
        for stage in range(1, self.instance.num_stages):
            seconds.append(self.latency(stage, I) + self.seconds[stage - 1, I] + seconds[-1])
        return seconds
