"""What stages measured of a microbatch, as the text behind its answer."""

from __future__ import annotations

from typing import NamedTuple


class Times(NamedTuple):
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
    def parse(text: str) -> Times:
        """Read what `str` wrote.

        >>> Times.parse("0,1,2,3,4,5,6").end
        3
        """
        return Times(*map(int, text.split(",")))


def times_of(text: str) -> list[Times]:
    """Return what stages measured, from the text behind an answer.

    >>> [one.stage for one in times_of("1,1,2,3,4,5,6;0,1,2,3,4,5,6")]
    [0, 1]
    """
    return sorted((Times.parse(one) for one in text.split(";") if one), key=lambda one: one.stage)
