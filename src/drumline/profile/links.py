"""Measure messages between two ranks: round trips over the channel that a pipeline uses."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median

import torch

from drumline.channel.channel import Channel, Wait
from drumline.core.action import Action
from drumline.plan.device.model_profile import ProfiledLink
from drumline.plan.device.overheads import fitted

SIZES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20)  # bytes
_FORTH, _BACK, _USER = Action.parse("1RECV_F0"), Action.parse("0RECV_B0"), Action.parse("0F0")
_SECONDS = 60
_NUM_WARM_UPS = 3


class Trips:
    """Messages between this rank and another; each round trip is a separate step."""

    def __init__(self, channel: Channel, other: int) -> None:
        self.channel, self.other = channel, other
        self.leads = channel.rank < other
        self._step = 0

    def seconds(self, payload: torch.Tensor, num_trips: int) -> float:
        """Return the time of a message one way: half of the median round trip."""
        taken = []
        for _ in range(_NUM_WARM_UPS + num_trips):
            begun = time.perf_counter()
            self._trip(payload)
            taken.append((time.perf_counter() - begun) / 2)
        return median(taken[_NUM_WARM_UPS:])

    def _trip(self, payload: torch.Tensor) -> None:
        self._step += 1
        self.channel.begin(self._step)
        if self.leads:
            self.channel.send(_FORTH, self.other, (payload,), None)
            self._get(_BACK)
        else:
            self.channel.send(_BACK, self.other, (self._get(_FORTH),), None)
        self.channel.flush(self._deadline())

    def _get(self, receive: Action) -> torch.Tensor:
        self.channel.post(receive, self.other)
        while (delivery := self.channel.take(receive, self.other)) is None:
            self.channel.block(Wait(self.channel.rank, _USER, receive, self.other), self._deadline())
        return delivery.tensors[0]

    @staticmethod
    def _deadline() -> int:
        return time.perf_counter_ns() + _SECONDS * 1_000_000_000


def link(
    channel: Channel, other: int, device: torch.device, *, sizes: Sequence[int] = SIZES, num_trips: int = 20
) -> ProfiledLink:
    """Measure messages of some sizes between this rank and another, which calls it at the same time."""
    trips = Trips(channel, other)
    points = tuple((size, trips.seconds(torch.zeros(size // 4, device=device), num_trips)) for size in sizes)
    return ProfiledLink(channel.rank, other, points, fitted(points))


def pairs(num_ranks: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks between which a pipeline sends: neighbours, and the last with the first.

    >>> pairs(2), pairs(3)
    ([(0, 1)], [(0, 1), (1, 2), (0, 2)])
    """
    return [(one, one + 1) for one in range(num_ranks - 1)] + ([(0, num_ranks - 1)] if num_ranks > 2 else [])
