"""Where all ranks of a run compute and what carries their messages: known once they have met, and said in one line.

::

    ranks 0-1 on cpu, by shared-memory
    rank 0 on cuda:0, rank 1 on cuda:1, by nccl
    ranks 0-1 on cuda:0, by shared-memory: 2 ranks share cuda:0
    host 0: rank 0 on cuda:0, rank 1 on cuda:1; host 1: rank 2 on cuda:0; by nccl
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

IN_PROCESS = "in-process"
NCCL_HOST = "drumline-"  # how names that we give to hosts begin


@dataclass(frozen=True, slots=True)
class DeviceCard:
    """What a rank tells the others of its device.

    `host` is equal for processes that share memory. `identity` is equal for ranks that compute on the same device, on
    any host; it is empty if the device has none. `listed` is what the environment lets the process see, if that is
    not all.
    """

    host: str
    device: str
    identity: str = ""
    listed: str = ""

    @property
    def kind(self) -> str:
        """The kind of device, such as cuda."""
        return self.device.partition(":")[0]


@dataclass(frozen=True, slots=True)
class RankDevices:
    """The device of every rank, by its number, and the transport between them.

    >>> two = [DeviceCard("here", "cuda:0"), DeviceCard("here", "cuda:0")]
    >>> str(RankDevices(tuple(two), "shared-memory"))
    'ranks 0-1 on cuda:0, by shared-memory: 2 ranks share cuda:0'
    """

    cards: tuple[DeviceCard, ...]
    transport: str

    @classmethod
    def alone(cls, device: str, num_ranks: int) -> RankDevices:
        """Return the devices of ranks that take turns in one process.

        >>> str(RankDevices.alone("cuda:0", 1)), str(RankDevices.alone("cpu", 2))
        ('rank 0 on cuda:0, in-process', 'ranks 0-1 on cpu, in-process')
        """
        return cls((DeviceCard("", device),) * num_ranks, IN_PROCESS)

    @property
    def num_hosts(self) -> int:
        """On how many hosts the ranks are."""
        return len({card.host for card in self.cards})

    @property
    def shared(self) -> dict[int, list[int]]:
        """The ranks on each accelerator that several processes compute on, by the first of them."""
        if self.transport == IN_PROCESS:
            return {}
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, card in enumerate(self.cards):
            if card.kind != "cpu":
                place = ("", card.identity) if card.identity else (card.host, card.device)
                groups.setdefault(place, []).append(rank)
        return {ranks[0]: ranks for ranks in groups.values() if len(ranks) > 1}

    def nccl_host(self, rank: int) -> str:
        """Return the host that NCCL shall take a rank to be on; empty if its own will do.

        NCCL refuses two ranks on one device of a host. So of ranks that share a device, each is on another.

        >>> RankDevices((DeviceCard("a", "cuda:0"),) * 2, "nccl").nccl_host(1)
        'drumline-0-1'
        """
        if not self.shared:
            return ""
        place = next((ranks.index(rank) for ranks in self.shared.values() if rank in ranks), 0)
        return nccl_host(self._host_number(rank), place)

    def __str__(self) -> str:
        hosts = [list(ranks) for _, ranks in groupby(range(len(self.cards)), key=self._host_number)]
        if self.num_hosts == 1:
            places = f"{self._listed(hosts[0])}, "
        else:
            named = (f"host {self._host_number(ranks[0])}: {self._listed(ranks)}" for ranks in hosts)
            places = f"{'; '.join(named)}; "
        how = self.transport if self.transport == IN_PROCESS else f"by {self.transport}"
        return f"{places}{how}" + (f": {self.shared_text}" if self.shared else "")

    @property
    def places(self) -> str:
        """The devices that ranks compute on, without their ranks.

        >>> RankDevices.alone("cpu", 2).places
        'cpu'
        """
        return ", ".join(dict.fromkeys(card.device for card in self.cards))

    @property
    def shared_text(self) -> str:
        """Who shares what; empty if every rank has its own accelerator, or computes on the CPU."""
        return ", ".join(f"{len(ranks)} ranks share {self.cards[first].device}" for first, ranks in self.shared.items())

    @property
    def warning(self) -> str:
        """What users should know of ranks that share devices; empty if none do."""
        if not self.shared:
            return ""
        extra = sum(len(ranks) - 1 for ranks in self.shared.values())
        through = " and their messages go through the host" if self.transport != "nccl" else ""
        return (
            f"{self}. They compute by turns{through}, which is slow. "
            f"Start {len(self.cards) - extra} instead of {len(self.cards)}: one for each device."
        )

    def to_json(self) -> dict[str, Any]:
        """Return it as plain values; hosts are numbers, not names.

        >>> RankDevices.alone("cpu", 1).to_json()["ranks"]
        [{'rank': 0, 'host': 0, 'device': 'cpu', 'shared_with': []}]
        """
        together = {rank: ranks for ranks in self.shared.values() for rank in ranks}
        ranks = [
            {
                "rank": rank,
                "host": self._host_number(rank),
                "device": card.device,
                "shared_with": [other for other in together.get(rank, ()) if other != rank],
            }
            for rank, card in enumerate(self.cards)
        ]
        return {"text": str(self), "transport": self.transport, "ranks": ranks}

    def _host_number(self, rank: int) -> int:
        """Return the number of a rank's host, in the order of the ranks."""
        return list(dict.fromkeys(card.host for card in self.cards)).index(self.cards[rank].host)

    def _listed(self, ranks: Sequence[int]) -> str:
        """Return some ranks with their devices; those on one device, one after the other, together."""
        cards = [self.cards[rank] for rank in ranks]
        several = len({card.listed for card in cards}) > 1  # views of the host: cuda:0 of one is not that of another
        places = [f"{card.device} of {card.listed or 'all'}" if several else card.device for card in cards]
        groups = [list(group) for _, group in groupby(zip(ranks, places, strict=True), key=lambda pair: pair[1])]
        return ", ".join(
            f"{f'rank {group[0][0]}' if len(group) == 1 else f'ranks {group[0][0]}-{group[-1][0]}'} on {group[0][1]}"
            for group in groups
        )


def nccl_host(host: int, place: int) -> str:
    """Return a name of a host for NCCL: that of the ranks which have this place among those on their device."""
    return f"{NCCL_HOST}{host}-{place}"


def chosen_transport(asked: str, cards: Sequence[DeviceCard], lines: Sequence[Sequence[int]], *, by_device: str) -> str:
    """Return the transport between ranks: the one that is asked for, or for "auto" the quickest that works.

    Only the ranks of a line send each other messages, and all lines of a mesh have one transport. `by_device` is what
    carries messages between devices of this kind if every rank has its own: nccl or gloo.

    >>> value = [DeviceCard("here", "cuda:0"), DeviceCard("here", "cuda:1")]
    >>> chosen_transport("auto", value, [[0, 1]], by_device="nccl")
    'nccl'
    >>> chosen_transport("auto", value[:1] * 2, [[0, 1]], by_device="nccl")
    'shared-memory'
    >>> chosen_transport("auto", [DeviceCard("here", "cpu"), DeviceCard("there", "cpu")], [[0, 1]], by_device="gloo")
    'gloo'
    """
    if asked != "auto":
        return asked
    choices = {_between([cards[rank] for rank in line], by_device) for line in lines}
    return choices.pop() if len(choices) == 1 else _between(cards, by_device)


def _between(cards: Sequence[DeviceCard], by_device: str) -> str:
    """Return the quickest transport between ranks."""
    met = RankDevices(tuple(cards), "auto")
    by_host = cards[0].kind == "cpu" or bool(met.shared)
    return ("shared-memory" if met.num_hosts == 1 else "gloo") if by_host else by_device
