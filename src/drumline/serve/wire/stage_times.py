"""What stages measured of a microbatch, as the text behind its answer."""

from __future__ import annotations

from typing import NamedTuple


class StageTimes(NamedTuple):
    """What a stage measured of a microbatch: nanoseconds of its monotonic clock, and bytes in and out."""

    stage: int
    arrived: int
    start: int
    end: int
    sent: int
    bytes_in: int
    bytes_out: int

    def __str__(self) -> str:
        return ",".join(map(str, self))

    @staticmethod
    def parse(text: str) -> StageTimes:
        """Read what `str` wrote.

        >>> StageTimes.parse("0,1,2,3,4,5,6").end
        3
        """
        return StageTimes(*map(int, text.split(",")))


def times_of(text: str) -> list[StageTimes]:
    """Return what stages measured, from the text behind an answer.

    >>> [time.stage for time in times_of("1,1,2,3,4,5,6;0,1,2,3,4,5,6")]
    [0, 1]
    """
    return sorted((StageTimes.parse(name) for name in text.split(";") if name), key=lambda times: times.stage)
