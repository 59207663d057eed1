"""The ranks that live in this process, and their way to all others.

One under torchrun or `dl.launch`; several that take turns otherwise. Whatever goes wrong on one rank, every rank learns
of it: `together` tells the others before the error leaves.
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

from drumline.core.errors import MismatchError, RunError
from drumline.core.program import Program
from drumline.pipeline import transports
from drumline.pipeline.programs import edges_of
from drumline.runtime.capture.capture import Drive
from drumline.runtime.channel.channel import Channel, Wait
from drumline.runtime.channel.in_process import Hub, take_turns

_scopes = itertools.count()
_open: weakref.WeakSet[Crew] = weakref.WeakSet()


@atexit.register
def leave_all() -> None:
    """Take leave on behalf of all pipelines that nobody closed: others may wait for this process."""
    for crew in list(_open):
        crew.close()


@cache
def _tell_of_turns(num_ranks: int) -> None:
    """Say once that ranks do not run at the same time, to users who may expect that they do."""
    logging.getLogger("drumline").warning(
        "%d ranks take turns in this process because no launcher started others: same gradients, but no faster steps. "
        "Start ranks with dl.launch or torchrun, or pass transport='in-process' to silence this warning.",
        num_ranks,
    )


class CrewObserver:
    """Does nothing when this process waits or fails; whoever watches does something."""

    def waiting(self) -> None:
        """Hear that this rank has nothing to do until a message comes."""

    def failed(self) -> None:
        """Hear that this process cannot go on."""


class Crew:
    """This process's channels, and what all ranks do together."""

    def __init__(self, channels: Sequence[Channel], hub: Hub | None, *, timeout: float) -> None:
        self.channels = list(channels)
        self.hub = hub
        self.timeout = timeout
        self.over = ""  # why nothing more can be done together
        self._observers: list[CrewObserver] = []
        self._topics = itertools.count()
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
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> Crew:
        """Return the crew of this process, connected to all others."""
        if transports.alone(transport):
            if transport == "auto" and (num_ranks or 1) > 1:
                _tell_of_turns(num_ranks or 1)
            hub = Hub(num_ranks or 1, now)
            return Crew(hub.channels(), hub, timeout=timeout)
        channel = transports.open_channel(
            transport,
            device,
            timeout=timeout,
            num_slots=max(4, ahead),
            scope=f"drumline/{next(_scopes)}",
            edges=None if program is None else edges_of(program),
            now=now,
        )
        crew = Crew([channel], None, timeout=timeout)
        with crew.together("the set-up"):
            if num_ranks not in (None, channel.num_ranks):
                raise MismatchError(
                    f"num_ranks is {num_ranks}", expected=f"{channel.num_ranks}, the number of processes started"
                )
        return crew

    @property
    def alone(self) -> bool:
        """Whether all ranks live in this process."""
        return self.hub is not None

    @property
    def num_ranks(self) -> int:
        """How many ranks there are, here and elsewhere."""
        return self.channels[0].num_ranks

    @property
    def rank(self) -> int:
        """This process's rank, the first of them if several take turns here."""
        return self.channels[0].rank

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:
        """Make more edges between ranks ready for use, alike on all of them."""
        for channel in self.channels:
            channel.connect(edges)

    def observe(self, observer: CrewObserver) -> None:
        """Tell an observer whenever this process waits or fails."""
        self._observers.append(observer)

    @property
    def drive(self) -> Drive:
        """What runs this process's ranks through their rows, waiting where they have to."""
        return self._drive if self.hub is None else partial(take_turns, self.hub)

    def _drive(self, runs: Sequence[Generator[Wait, None, None]]) -> None:
        for wait in runs[0]:
            for observer in self._observers:
                observer.waiting()
            self.channels[0].block(wait, self._deadline())
        self.channels[0].flush(self._deadline())

    def collect(self, what: str, value: Any) -> list[Any]:
        """Tell one value for all ranks of this process, and return what every rank told."""
        return self.all_told(what, [value] * len(self.channels))

    def all_told(self, what: str, values: Sequence[Any]) -> list[Any]:
        """Tell the values of this process's ranks to all, and return what every rank told."""
        topic = f"{what}/{next(self._topics)}"
        self.tell(topic, values)
        return self.heard(topic)

    def tell(self, topic: str, values: Sequence[Any]) -> None:
        """Tell the values of this process's ranks to all."""
        for channel, value in zip(self.channels, values, strict=True):
            channel.tell(topic, value)

    def heard(self, topic: str) -> list[Any]:
        """Return what every rank told, waiting for those that have not yet."""
        told = [channel.hear(topic, self._deadline()) for channel in self.channels]
        return told[0]

    def compare_clocks(self) -> None:
        """Learn how far apart the ranks' clocks are; all ranks call it."""
        for channel in self.channels:
            channel.compare_clocks(self._deadline())

    @contextmanager
    def together(self, during: str, action: Callable[[], str] = str) -> Iterator[None]:
        """Let every rank know if this one fails; with several processes nothing more can be done after that.

        `action` returns what this process is at, if it is in the middle of a step.
        """
        if self.over:
            raise RunError(f"this pipeline can no longer be used: {self.over}", fix="create a new one on all ranks")
        try:
            yield
        except BaseException as error:
            at = action() or during
            for observer in self._observers:
                observer.failed()
            for channel in self.channels:
                channel.abort(error, at)
            if not self.alone:
                self.over = f"it failed at {at}: {error}"
                self.channels[0].close()
            raise

    def close(self) -> None:
        """Take leave of the other ranks."""
        if not self.over:
            self.over = "it was closed"
            for channel in self.channels:
                channel.close()

    def _deadline(self) -> int:
        return time.perf_counter_ns() + int(self.timeout * 1e9)
