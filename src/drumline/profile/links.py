"""Measure messages between two ranks: round trips over the channel that a pipeline uses."""

from __future__ import annotations

import time
from itertools import count
from statistics import median

import torch

from drumline.channel.channel import Channel, Wait
from drumline.core.action import Action
from drumline.plan.device.model_profile import ProfiledLink
from drumline.plan.device.overheads import fitted

SIZES = (4 * 2**10, 64 * 2**10, 512 * 2**10, 4 * 2**20)  # bytes
_FORTH, _BACK, _USER = Action.parse("1RECV_F0"), Action.parse("0RECV_B0"), Action.parse("0F0")
_SECONDS = 60
_NUM_WARM_UPS, _NUM_TRIPS = 3, 20


def link(channel: Channel, other: int, device: torch.device) -> ProfiledLink:
    """Measure messages of some sizes between this rank and another, which calls it at the same time."""
    steps = count(1)  # each round trip is a separate step

    def seconds(payload: torch.Tensor) -> float:
        """Return the time of a message one way: half of the median round trip."""
        taken = []
        for _ in range(_NUM_WARM_UPS + _NUM_TRIPS):
            begun = time.perf_counter()
            channel.begin(next(steps))
            _trip(channel, other, payload)
            taken.append((time.perf_counter() - begun) / 2)
        return median(taken[_NUM_WARM_UPS:])

    points = tuple((size, seconds(torch.zeros(size // 4, device=device))) for size in SIZES)
    return ProfiledLink(channel.rank, other, points, fitted(points))


def _trip(channel: Channel, other: int, payload: torch.Tensor) -> None:
    """Send a message forth and get it back, or the reverse on the rank with the higher number."""
    if channel.rank < other:
        channel.send(_FORTH, other, (payload,), None)
        _get(channel, other, _BACK)
    else:
        channel.send(_BACK, other, (_get(channel, other, _FORTH),), None)
    channel.flush(_deadline())


def _get(channel: Channel, other: int, receive: Action) -> torch.Tensor:
    channel.post(receive, other)
    while (delivery := channel.take(receive, other)) is None:
        channel.block(Wait(channel.rank, _USER, receive, other), _deadline())
    return delivery.tensors[0]


def _deadline() -> int:
    return time.perf_counter_ns() + _SECONDS * 1_000_000_000


def pairs(num_ranks: int) -> list[tuple[int, int]]:
    """Return the pairs of ranks between which a pipeline sends: neighbours, and the last with the first.

    >>> pairs(2), pairs(3)
    ([(0, 1)], [(0, 1), (1, 2), (0, 2)])
    """
    return [(rank, rank + 1) for rank in range(num_ranks - 1)] + ([(0, num_ranks - 1)] if num_ranks > 2 else [])
