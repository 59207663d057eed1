"""A simplified instance that bounds can reason about: its optimum is no larger than the real one.

Every microbatch costs and holds as much as the cheapest. If I takes 2 and W takes 4, a whole backward of 5 becomes an I
of 2 with a W of 3 after it. Splitting takes longer, and not splitting passes the gradient on later.
"""

from __future__ import annotations

from functools import cached_property

from drumline.plan.search.bounds.instance import F, I, Instance, W

_OPS = (F, I, W)

Key = tuple[int, int]  # (stage, op)


class Relaxation:
    """The simplified instance: seconds per (stage, op), the same for all microbatches."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.linked = not instance.placement.mirrored
        self.seconds: dict[Key, float] = {}
        self.exact: dict[Key, float] = {}
        for stage in range(instance.num_stages):
            halves = [self._halves(stage, m) for m in range(instance.num_microbatches)]
            for op, column in zip(_OPS, zip(*halves, strict=True), strict=True):
                self.seconds[stage, op] = min(column)
            for m, parts in enumerate(halves):
                self.exact[stage, m] = sum(parts)

    def _halves(self, stage: int, m: int) -> tuple[float, float, float]:
        number = self.instance.number(stage, F, m)
        forward, first, second, whole = self.instance.seconds[number : number + 4]
        early = min(first, whole)
        return forward, early, max(0.0, min(first + second, whole) - early)

    def sizes(self, stage: int, resource: int) -> tuple[float, float]:
        """Return what the smallest microbatch holds from F on, and at least from I on."""
        device = self.instance.resources[resource]
        numbers = [self.instance.number(stage, F, m) for m in range(self.instance.num_microbatches)]
        full = min(device.after[n] for n in numbers)
        return full, min(full, *(-device.after[n + W] for n in numbers))

    def latency(self, stage: int, op: int) -> float:
        """Return the least latency of the output of (stage, op)."""
        count = self.instance.num_microbatches
        return min(self.instance.latency[self.instance.number(stage, op, m)] for m in range(count))

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
