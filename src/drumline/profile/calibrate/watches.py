"""Clocks for works: one for the host, and one for an accelerator, whose short works are repeated by the device alone.

A kernel of a few microseconds cannot be timed by calling it: the host takes longer to ask for it than the device to do
it. So works of short kernels are captured as a graph of many, and the device runs the graph.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch

from drumline.profile.calibrate.cuda import captured

Call = Callable[[], Any]
_FEWEST, _MOST = 5, 40  # rounds
_LONG, _FEW = 0.02, 3  # so few rounds of works that take so many seconds
_ROUND = 2e-3  # seconds of a round of a short work
_SHORT = 300e-6  # of a kernel


class Timed(NamedTuple):
    """The median of several rounds, and half the distance between the quartiles over it."""

    seconds: float
    spread: float


class TimeWatch(Protocol):
    """Times calls."""

    def timed(self, call: Call, seconds: float, kernels: int = 1) -> Timed:
        """Return the time of a call of so many kernels, in about so many seconds of measuring."""


def summed_up(rounds: list[float]) -> Timed:
    """Return the median and the spread of rounds.

    >>> summed_up([1.0, 2.0, 2.0, 2.0, 9.0])
    Timed(seconds=2.0, spread=0.0)
    """
    middle = statistics.median(rounds)
    ranked = sorted(rounds)
    quarter = len(ranked) // 4
    return Timed(middle, (ranked[-1 - quarter] - ranked[quarter]) / 2 / middle if middle else 0.0)


class HostWatch:
    """Times calls that end when they return. `now` is the clock.

    >>> moments = iter(range(1000))
    >>> HostWatch(lambda: float(next(moments))).timed(lambda: None, 10.0)
    Timed(seconds=1.0, spread=0.0)
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def _round(self, call: Call, times: int) -> float:
        begun = self._now()
        for _ in range(times):
            call()
        return (self._now() - begun) / times

    def timed(self, call: Call, seconds: float, kernels: int = 1) -> Timed:
        """Return the time of a call."""
        call()
        first = self._round(call, 1)
        times = max(1, math.ceil(min(_ROUND, seconds / _FEWEST) / max(first, 1e-7)) if first < _ROUND else 1)
        count = _count(seconds, max(first * times, 1e-7))
        return summed_up([self._round(call, times) for _ in range(count)])


class DeviceWatch:
    """Times what calls make an accelerator do."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def _rounds(self, call: Call, count: int, times: int) -> list[float]:
        marks = [torch.Event(self._device, enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            call()
            mark.record()
        torch.accelerator.synchronize(self._device)
        return [
            before.elapsed_time(after) / 1e3 / times for before, after in pairwise(marks)
        ]  # fmt: skip

    def timed(self, call: Call, seconds: float, kernels: int = 1) -> Timed:
        """Return the time of a call's works on the device."""
        call()
        torch.accelerator.synchronize(self._device)
        first = max(min(self._rounds(call, 2, 1)), 1e-7)
        if first < _SHORT * kernels:
            times = min(max(math.ceil(_ROUND / first), 4), 200)
            with suppress(RuntimeError):  # what cannot be captured is timed as the host asks for it
                replay = captured(call, times, self._device)
                replay()
                took = max(statistics.median(self._rounds(replay, 3, 1)), 1e-7)
                return summed_up(self._rounds(replay, _count(seconds, took), times))
        return summed_up(self._rounds(call, _count(seconds, first), 1))


def _count(seconds: float, each: float) -> int:
    return min(max(int(seconds / each), _FEWEST if each < _LONG else _FEW), _MOST)


def watch_of(device: torch.device, now: Callable[[], float] = time.perf_counter) -> TimeWatch:
    """Return the watch of a device; `now` is the host's clock.

    >>> type(watch_of(torch.device("cpu"))).__name__
    'HostWatch'
    """
    return HostWatch(now) if device.type == "cpu" else DeviceWatch(device)
