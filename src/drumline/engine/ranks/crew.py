"""The ranks of this process and their connections to all other ranks.

A process has one rank under torchrun or `dl.launch`, else several that take turns. If one rank fails, every rank learns
of it: `together` tells the others before the error propagates.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import time
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch

from drumline.channel import stacks
from drumline.channel.channel import Channel, Wait
from drumline.channel.devices.rank_devices import RankDevices
from drumline.channel.in_process import Hub, take_turns
from drumline.channel.lines.axes import Axes
from drumline.channel.rank_names import RankNames
from drumline.core.errors import MismatchError, RunError, UsageError
from drumline.core.program import Program
from drumline.engine.program.find import edges_of
from drumline.engine.ranks import transports

_open: weakref.WeakSet[Crew] = weakref.WeakSet()


@atexit.register
def leave_all() -> None:
    """Disconnect all pipelines that nobody closed: other processes may be waiting for this one."""
    for crew in list(_open):
        crew.close()


def has_lost_ranks() -> bool:
    """Whether a rank of some open pipeline has gone, so that its next step would fail; a signal handler may ask."""
    return any(not crew.over and crew.channels[0].is_cut for crew in list(_open))


@cache
def _tell_of_turns(num_ranks: int) -> None:
    """Warn once that ranks take turns, because users may expect them to run in parallel."""
    logging.getLogger("drumline").warning(
        "%d ranks take turns in this process because no launcher started others: same gradients, but no faster steps. "
        "Start ranks with dl.launch or torchrun, or pass transport='in-process' to silence this warning.",
        num_ranks,
    )


Drive = Callable[[Sequence[Generator[Wait, None, None]]], None]  # runs ranks until all have ended


class Crew:
    """The channels of this process, and everything that all ranks do together."""

    def __init__(
        self, channels: Sequence[Channel], hub: Hub | None, axes: Axes, devices: RankDevices, *, timeout: float
    ) -> None:
        self.channels = list(channels)
        self.hub = hub
        self.alone = hub is not None  # whether all ranks are in this process
        self.axes = axes
        self.devices = devices  # of all ranks, of all lines
        self.timeout = timeout
        self.over = ""  # why the pipeline can no longer be used; empty while it can
        self._is_running = False  # whether ranks of this process are in the middle of their rows
        # What else to do when this rank waits for a message with nothing to do, and when this process fails.
        self.waiting: list[Callable[[], None]] = []
        self.failed: list[Callable[[], None]] = []
        self._topics = itertools.count()
        self._is_spread = self.channels[0].is_spread
        # Runs this process's ranks through their rows, and waits where needed.
        self.drive: Drive = self._drive if hub is None else partial(take_turns, hub)
        if hub is None:
            _open.add(self)

    @staticmethod
    def gathered(
        transport: str,
        device: torch.device,
        *,
        num_ranks: int | None,
        program: Program | None,
        ahead: int,
        timeout: float,
        axes: Axes,
        scope: str,
        interface: str = "",
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> Crew:
        """Return the crew of this process, connected to the other ranks of its line."""
        if transports.alone(transport):
            if transport == "auto" and (num_ranks or 1) > 1:
                _tell_of_turns(num_ranks or 1)
            hub = Hub(num_ranks or 1, now)
            return Crew(hub.channels(), hub, axes, RankDevices.alone(str(device), num_ranks or 1), timeout=timeout)
        channel, devices = transports.open_channel(
            transport,
            device,
            timeout=timeout,
            num_slots=max(4, ahead),
            scope=scope,
            axes=axes,
            edges=None if program is None else edges_of(program),
            interface=interface,
            now=now,
        )
        crew = Crew([channel], None, axes, devices, timeout=timeout)
        with crew.together("the set-up"):
            if num_ranks not in (None, channel.num_ranks):
                raise MismatchError(
                    f"num_ranks is {num_ranks}",
                    expected=f"{channel.num_ranks}, the mesh's pp"
                    if axes.is_mesh
                    else f"{channel.num_ranks}, the number of processes started",
                )
        return crew

    @property
    def num_ranks(self) -> int:
        """The number of ranks, in this process and in others."""
        return self.channels[0].num_ranks

    @property
    def rank(self) -> int:
        """The rank of this process; if several ranks take turns here, the first of them."""
        return self.channels[0].rank

    @property
    def naming(self) -> RankNames:
        """What messages call the ranks of this pipeline."""
        return self.axes.naming

    @property
    def name(self) -> str:
        """What messages call this process's first rank."""
        return self.naming.rank(self.rank)

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """Open more edges between ranks; all ranks call it with the same edges."""
        for channel in self.channels:
            channel.connect(edges)

    def _drive(self, runs: Sequence[Generator[Wait, None, None]]) -> None:
        for wait in runs[0]:
            for react in self.waiting:
                react()
            self.channels[0].block(wait, self._deadline())
        self.channels[0].flush(self._deadline())

    @contextmanager
    def running(self) -> Iterator[None]:
        """Refuse whatever all ranks do together until ranks of this process have run their rows."""
        self._is_running = True
        try:
            yield
        finally:
            self._is_running = False

    def collect(self, what: str, value: Any) -> list[Any]:
        """Send one value for all ranks of this process, and return the values of all ranks."""
        return self.all_told(what, [value] * len(self.channels))

    def everywhere(self, what: str, value: Any) -> list[Any]:
        """Send one value and return those of all ranks, of the other lines of a mesh too."""
        return self.axes.exchanged(f"drumline/{what}", value) if self.axes.is_mesh else self.collect(what, value)

    def all_told(self, what: str, values: Sequence[Any]) -> list[Any]:
        """Send the values of this process's ranks to all ranks, and return the values of all ranks."""
        topic = f"{what}/{next(self._topics)}"
        self.tell(topic, values)
        return self.heard(topic)

    def tell(self, topic: str, values: Sequence[Any]) -> None:
        """Send the values of this process's ranks to all ranks."""
        for channel, value in zip(self.channels, values, strict=True):
            channel.tell(topic, value)

    def heard(self, topic: str) -> list[Any]:
        """Return the values of all ranks, waiting for those that are missing."""
        hears = [channel.hear(topic, self._deadline()) for channel in self.channels]
        return hears[0]

    def compare_clocks(self) -> None:
        """Measure the offsets between the ranks' clocks; all ranks call it."""
        for channel in self.channels:
            channel.compare_clocks(self._deadline())

    @contextmanager
    def together(self, during: str, action: Callable[[], str] = str) -> Iterator[None]:
        """Tell every rank if this one fails; with several processes the pipeline then ends.

        `action` returns the current action of this process, if it is in the middle of a step.
        """
        if self.over:
            raise RunError(f"this pipeline can no longer be used: {self.over}", fix="create a new one on all ranks")
        if self._is_running:
            raise UsageError(
                f"a loss function, a forward or a hook called the pipeline inside of a step ({during})",
                expected="calls between two steps: other ranks are in the middle of their rows",
                fix="make the call after `step` returns, on every rank",
            )
        if self._is_spread:
            stacks.dump_later(self.timeout)  # by then others give up, and cannot ask for them
        try:
            yield
        except BaseException as error:
            at = action() or during
            for react in self.failed:
                react()
            for channel in self.channels:
                channel.abort(error, at)
            self.axes.failed(at, error)
            if self._is_spread:
                stacks.keep_quiet()
            if not self.alone:
                self.over = f"it failed at {at}: {error}"
                self.channels[0].close()
            raise

    def close(self) -> None:
        """Disconnect from the other ranks."""
        if not self.over:
            self.over = "it was closed"
            if self._is_spread:
                stacks.keep_quiet()
            for channel in self.channels:
                channel.close()

    def _deadline(self) -> int:
        return time.perf_counter_ns() + int(self.timeout * 1e9)
