"""Interleaved timing: peers take turns, so that what disturbs the machine disturbs all of them."""

from __future__ import annotations

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


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


def interleaved(
    contestants: dict[str, Callable[[], object]], *, rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, Timing]:
    """Run all contestants in turn, `rounds` times after one round of warming up."""
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(rounds + 1):
        for name, contestant in contestants.items():
            gc.collect()
            start = clock()
            contestant()
            if turn:
                taken[name].append(clock() - start)
    return {name: Timing(tuple(seconds)) for name, seconds in taken.items()}


def machine(cores: int = 1) -> str:
    """Return what the numbers were taken on."""
    return f"{platform.machine()}, Python {platform.python_version()}, {'one core' if cores == 1 else f'{cores} cores'}"


class Stolen:
    """What others took of the cores' time since this was made: other machines on the host, and other processes here.

    0 where the system does not say. Of processes that this one started, those count that have ended.
    """

    def __init__(self) -> None:
        self._began, self._used = self._counts(), self._own()

    @staticmethod
    def _counts() -> list[int]:
        try:
            return [int(name) for name in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return [0] * 8

    @staticmethod
    def _own() -> float:
        return sum(os.times()[:4]) * os.sysconf("SC_CLK_TCK")

    def _spent(self) -> list[int]:
        return [now - then for now, then in zip(self._counts(), self._began, strict=True)]

    @property
    def share(self) -> float:
        """Return the share of other machines."""
        spent = self._spent()
        return spent[7] / sum(spent) if sum(spent) else 0.0

    @property
    def others(self) -> float:
        """Return the share of other processes on this machine."""
        spent = self._spent()
        return max(0.0, (sum(spent[:3]) - self._own() + self._used) / sum(spent)) if sum(spent) else 0.0
