"""Connect the ranks: a socket between every pair, agreed on through a torch.distributed store.

    every rank   opens a listener and puts (host, address, token) into the store
    rank i       connects to every j < i and shows j's token; j answers with i's
                 then accepts every j > i

Ranks share a host if they have the same boot and network namespace. They use a Unix socket on an abstract address,
which leaves nothing in a file system. Other ranks use TCP.
Every wait is bounded and names the rank it waits for.
"""

from __future__ import annotations

import os
import pickle
import secrets
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from drumline.core.errors import RunError
from drumline.runtime.channel.channel import too_late
from drumline.runtime.channel.link import Link

_LOOK_SECONDS = 0.5
_HELLO = struct.Struct("<16sI")


def host_id() -> str:
    """Return a name that is the same only for processes that can share Unix sockets and memory."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return secrets.token_hex(16)


def exchange(
    store: Store,
    rank: int,
    num_ranks: int,
    topic: str,
    value: Any,
    *,
    timeout: float,
    look: Callable[[], None] | None = None,
) -> list[Any]:
    """Put a value into the store and return the values of all ranks; a topic may be used again.

    While it waits, it calls `look` twice a second, which may raise.

    >>> from torch.distributed import HashStore
    >>> exchange(HashStore(), 0, 1, "colour", "blue", timeout=1.0)
    ['blue']
    """
    # The count of this rank's calls keeps one exchange from reading the values of an earlier one.
    turn = store.add(f"{topic}/turns/{rank}", 1)
    here = PrefixStore(f"{topic}/{turn}", store)
    here.set(str(rank), pickle.dumps(value).hex())
    started = time.perf_counter()
    values = []
    for other in range(num_ranks):
        while True:
            left = max(0.001, timeout - (time.perf_counter() - started))
            try:
                here.wait([str(other)], timedelta(seconds=left if look is None else min(left, _LOOK_SECONDS)))
                break
            except DistStoreError:
                if look is None or time.perf_counter() - started >= timeout:
                    what = f"rank {rank} waits for rank {other} to report its {topic}"
                    raise too_late(what, timeout) from None
                look()
        values.append(pickle.loads(bytes.fromhex(here.get(str(other)).decode())))
    return values


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank tells the others about itself."""

    host: str
    token: bytes
    unix: bytes
    tcp: tuple[tuple[str, int], ...] = ()


def connect(rank: int, num_ranks: int, *, store: Store, timeout: float, host: str | None = None) -> list[Link]:
    """Return a link to every other rank; ranks with different `host` values use TCP even if they share a host."""
    return _Rendezvous(rank, num_ranks, store, timeout, host or host_id(), time.perf_counter() + timeout).links()


@dataclass(slots=True)
class _Rendezvous:
    rank: int
    num_ranks: int
    store: Store
    timeout: float
    host: str
    deadline: float

    def links(self) -> list[Link]:
        with socket.socket(socket.AF_UNIX) as unix, socket.socket() as tcp:
            cards = self._cards(unix, tcp)
            links: list[Link] = []
            try:
                links.extend(self._call(other, cards) for other in range(self.rank))
                for listener in (unix, tcp):
                    local = listener is unix
                    expected = {
                        j for j in range(self.rank + 1, self.num_ranks) if (cards[j].host == self.host) == local
                    }
                    links.extend(self._accept(listener, expected, cards))
            except BaseException:
                for link in links:
                    link.close()
                raise
            return links

    def _cards(self, unix: socket.socket, tcp: socket.socket) -> list[Card]:
        hosts = exchange(self.store, self.rank, self.num_ranks, "drumline/host", self.host, timeout=self.timeout)
        address = b""
        if hosts.count(self.host) > 1:
            address = b"\0drumline-" + secrets.token_hex(16).encode()
            unix.bind(address)
            unix.listen(self.num_ranks)
        ways: tuple[tuple[str, int], ...] = ()
        if len(set(hosts)) > 1:
            tcp.bind(("", 0))
            tcp.listen(self.num_ranks)
            ways = tuple((name, tcp.getsockname()[1]) for name in _own_addresses(self.store))
        card = Card(self.host, secrets.token_bytes(16), address, ways)
        return exchange(self.store, self.rank, self.num_ranks, "drumline/address", card, timeout=self.timeout)

    def _left(self, what: str) -> float:
        left = self.deadline - time.perf_counter()
        if left <= 0:
            raise too_late(f"rank {self.rank} waits for {what}", self.timeout)
        return left

    def _call(self, other: int, cards: list[Card]) -> Link:
        """Connect to a lower rank and show its token."""
        card, mine = cards[other], cards[self.rank].token
        ways: list[Any] = [card.unix] if card.host == self.host else list(card.tcp)
        problems = []
        for way in ways:
            connection = socket.socket(socket.AF_UNIX if isinstance(way, bytes) else socket.AF_INET)
            try:
                # An address that does not answer must leave time for the next one.
                connection.settimeout(self._left(f"rank {other} to answer") / len(ways))
                connection.connect(way)
                connection.settimeout(self._left(f"rank {other} to answer"))
                connection.sendall(_HELLO.pack(card.token, self.rank))
                if _receive(connection, len(mine)) != mine:
                    raise ConnectionError("another program answers at that address")
                return _link(other, connection)
            except OSError as error:
                connection.close()
                problems.append(f"{way!r}: {error or type(error).__name__}")
            except BaseException:
                connection.close()
                raise
        raise RunError(
            f"rank {self.rank} cannot connect to rank {other} ({'; '.join(problems)})",
            fix="check that the rank is still running and that the hosts can reach each other's ports",
        )

    def _accept(self, listener: socket.socket, expected: set[int], cards: list[Card]) -> list[Link]:
        """Accept the higher ranks that show this rank's token, and no other connections."""
        links: list[Link] = []
        while expected:
            missing = f"rank {', '.join(map(str, sorted(expected)))} to connect"
            try:
                listener.settimeout(self._left(missing))
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            try:
                connection.settimeout(min(5.0, self._left(missing)))
                token, other = _HELLO.unpack(_receive(connection, _HELLO.size))
                if not secrets.compare_digest(token, cards[self.rank].token) or other not in expected:
                    raise ConnectionError("not a rank of this run")
                connection.sendall(cards[other].token)
                links.append(_link(other, connection))
                expected.discard(other)
            except OSError:
                connection.close()
        return links


def _link(other: int, connection: socket.socket) -> Link:
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes does not close its connections: probe them when they are silent.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 5)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Link(other, connection)


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        more = connection.recv(num_bytes - len(data))
        if not more:
            raise ConnectionError("the connection ended")
        data += more
    return data


def _own_addresses(store: Store) -> list[str]:
    """Return the addresses under which other hosts may reach this one, the most likely first."""
    names: list[str] = []
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    if hasattr(inner, "host"):
        with suppress(OSError):
            names.append(_address_towards(inner.host))
    with suppress(OSError):
        names.append(socket.gethostbyname(socket.gethostname()))
    # Use a loopback address only if there is no other (tests; several namespaces cannot connect anyway).
    return sorted(dict.fromkeys([*names, "127.0.0.1"]), key=lambda name: name.startswith("127."))


def _address_towards(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only picks the interface
        return str(probe.getsockname()[0])
