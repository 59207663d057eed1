"""Interleaved timing: peers take turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import gc
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """Seconds of one contestant over all rounds."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        """The middle of all rounds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, over the median."""
        quartiles = statistics.quantiles(self.seconds, n=4)
        return (quartiles[2] - quartiles[0]) / 2 / self.median


def interleaved(contestants: dict[str, Callable[[], object]], *, rounds: int) -> dict[str, Timing]:
    """Run all contestants in turn, `rounds` times after one round of warming up."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, contestant in contestants.items():
            gc.collect()
            start = time.perf_counter()
            contestant()
            if turn:
                taken[name].append(time.perf_counter() - start)
    return {name: Timing(tuple(seconds)) for name, seconds in taken.items()}


def machine() -> str:
    """Return what the numbers were taken on."""
    return f"{platform.machine()}, Python {platform.python_version()}, one core"
