"""Connect the ranks: a socket between every pair, agreed on through a torch.distributed store.

    every rank   opens a listener and puts (host, address, token) into the store
    rank i       connects to every j < i and shows j's token; j answers with i's
                 then accepts every j > i

Ranks share a host if they have the same boot and network namespace. They use a Unix socket on an abstract address,
which leaves nothing in a file system. Other ranks use TCP, and listen on one interface alone.
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
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, TCPStore
from torch.distributed import DistNetworkError, DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from drumline.channel.channel import LINGER, too_late
from drumline.channel.interfaces import ListenAddress, endpoint, place_between_hosts, place_named
from drumline.channel.link import Link
from drumline.channel.rank_names import BY_NUMBER, RankNames
from drumline.core.errors import RunError

_LOOK_SECONDS = 0.5
_MOST_PAUSE = 0.05  # seconds between two questions whether a key is there
_HELLO = struct.Struct("<16sI")
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 5}  # notice after 15 s, as mesh.SILENCE


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
    naming: RankNames = BY_NUMBER,
) -> list[Any]:
    """Put a value into the store and return the values of all ranks; a topic may be used again.

    While it waits, it calls `look` twice a second, which may raise. `naming` names the ranks in errors.

    >>> from torch.distributed import HashStore
    >>> exchange(HashStore(), 0, 1, "colour", "blue", timeout=1.0)
    ['blue']
    """
    # The count of this rank's calls keeps one exchange from reading the values of an earlier one.
    turn = store.add(f"{topic}/turns/{rank}", 1)
    here = PrefixStore(f"{topic}/{turn}", store)
    here.set(str(rank), pickle.dumps(value).hex())
    deadline = time.perf_counter() + timeout
    values = []
    for other in range(num_ranks):
        try:
            _await(here, str(other), deadline, look)
            values.append(pickle.loads(bytes.fromhex(here.get(str(other)).decode())))
        except DistStoreError:
            what = f"{naming.rank(rank)} waits for {naming.rank(other)} to report its {topic}"
            raise too_late(what, timeout) from None
        except DistNetworkError as error:
            raise RunError(
                f"{naming.rank(rank)} lost the ranks' store while it waited for {naming.rank(other)} to report its"
                f" {topic}",
                fix="look at the first rank's error: its host keeps the store",
            ) from error
    return values


def _await(store: Store, key: str, deadline: float, look: Callable[[], None] | None) -> None:
    """Wait for a key, looking now and then whether that is in vain."""
    if look is None:
        store.wait([key], timedelta(seconds=max(0.001, deadline - time.perf_counter())))
        return
    # By asking again and again: torch warns on stderr of every wait that ends without the key.
    looked, pause = time.perf_counter(), 1e-3
    while not store.check([key]):
        now = time.perf_counter()
        if now >= deadline:
            raise DistStoreError(f"no {key} by the deadline")
        if now - looked > _LOOK_SECONDS:
            look()
            looked = now
        time.sleep(pause)
        pause = min(2 * pause, _MOST_PAUSE)


@dataclass(frozen=True, slots=True)
class Card:
    """What a rank tells the others about itself."""

    host: str
    token: bytes
    unix: bytes
    tcp: tuple[str, int] | None = None


def connect(
    rank: int,
    num_ranks: int,
    *,
    store: Store,
    timeout: float,
    host: str | None = None,
    interface: str = "",
    naming: RankNames = BY_NUMBER,
) -> list[Link]:
    """Return a link to every other rank; ranks with different `host` values use TCP even if they share a host.

    `interface` names the one to listen on, or an address of it; else it is the one that leads to the store.
    """
    deadline = time.perf_counter() + timeout
    return _Rendezvous(rank, num_ranks, store, timeout, host or host_id(), interface, deadline, naming).links()


def agreed_place(
    store: Store, rank: int, num_ranks: int, interface: str, *, timeout: float, naming: RankNames = BY_NUMBER
) -> ListenAddress:
    """Return where this rank listens for other hosts; if any rank has no such place, all ranks raise and name it."""
    address: ListenAddress | RunError
    try:
        address = place_between_hosts(interface, store_host(store))
    except RunError as error:
        address = error
    problem = None if isinstance(address, ListenAddress) else str(address)
    problems = exchange(store, rank, num_ranks, "drumline/interface", problem, timeout=timeout, naming=naming)
    if isinstance(address, ListenAddress) and not any(problems):
        return address
    with suppress(RunError):  # the rank that keeps the store leaves after all others have read this
        exchange(store, rank, num_ranks, "drumline/refused", None, timeout=10 * LINGER)
    if isinstance(address, RunError):
        raise address
    other = next(rank for rank, problem in enumerate(problems) if problem)
    raise RunError(f"{naming.rank(other)}: {problems[other]}")


def hosted_store(host: str, port: int, *, interface: str = "", timeout: float, **settings: Any) -> TCPStore:
    """Return a store that listens on one address alone: that of the interface, else the one that `host` is here.

    torch's own would listen on all interfaces. Port 0 picks a free one.
    """
    try:
        place = place_named(interface, like=host) if interface else _own_place(host)
        listener = socket.create_server((place.address, port), family=place.family, backlog=128)
    except OSError as error:
        raise RunError(
            f"cannot listen at {endpoint(host, port)}: {error.strerror or error}",
            expected="a name or an address of this host, and a free port",
            fix="name the interface to listen on: --interface NAME",
        ) from error
    port = listener.getsockname()[1]
    listening: dict[str, Any] = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return TCPStore(place.address, port, timeout=timedelta(seconds=timeout), **listening, **settings)


def _own_place(host: str) -> ListenAddress:
    """Return where a name of this host, or an address, leads to."""
    addresses = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return ListenAddress("", str(addresses[0][4][0]))


def store_host(store: Store) -> str:
    """Return the host of the ranks' store; empty if it has none."""
    inner: Any = store
    while hasattr(inner, "underlying_store"):
        inner = inner.underlying_store
    return "localhost" if isinstance(inner, HashStore) else str(getattr(inner, "host", ""))


@dataclass(slots=True)
class _Rendezvous:
    rank: int
    num_ranks: int
    store: Store
    timeout: float
    host: str
    interface: str
    deadline: float
    naming: RankNames

    def _exchanged(self, topic: str, value: Any) -> list[Any]:
        arguments = (self.store, self.rank, self.num_ranks, topic, value)
        return exchange(*arguments, timeout=self.timeout, naming=self.naming)

    def links(self) -> list[Link]:
        hosts = self._exchanged("drumline/host", self.host)
        with ExitStack() as listening:
            unix, tcp = self._listeners(hosts, listening)
            cards = self._cards(unix, tcp)
            links: list[Link] = []
            try:
                links.extend(self._call(other, cards) for other in range(self.rank))
                for listener in (unix, tcp):
                    local = listener is unix
                    expected = {
                        j for j in range(self.rank + 1, self.num_ranks) if (cards[j].host == self.host) == local
                    }
                    if expected:
                        assert listener is not None
                        links.extend(self._accept(listener, expected, cards))
            except BaseException:
                for link in links:
                    link.close()
                raise
            return links

    def _listeners(self, hosts: list[str], listening: ExitStack) -> tuple[socket.socket | None, socket.socket | None]:
        """Return the listeners for ranks of this host and of others; None where there are none."""
        unix = tcp = None
        if hosts.count(self.host) > 1:
            unix = listening.enter_context(socket.socket(socket.AF_UNIX))
            unix.bind(b"\0drumline-" + secrets.token_hex(16).encode())
            unix.listen(self.num_ranks)
        if len(set(hosts)) > 1:
            arguments = (self.store, self.rank, self.num_ranks, self.interface)
            place = agreed_place(*arguments, timeout=self.timeout, naming=self.naming)
            address = (place.address, 0)
            tcp = listening.enter_context(socket.create_server(address, family=place.family, backlog=self.num_ranks))
        return unix, tcp

    def _cards(self, unix: socket.socket | None, tcp: socket.socket | None) -> list[Card]:
        card = Card(
            self.host,
            secrets.token_bytes(16),
            b"" if unix is None else unix.getsockname(),
            None if tcp is None else tcp.getsockname()[:2],
        )
        return self._exchanged("drumline/address", card)

    def _left(self, what: str) -> float:
        left = self.deadline - time.perf_counter()
        if left <= 0:
            raise too_late(f"{self.naming.rank(self.rank)} waits for {what}", self.timeout)
        return left

    def _call(self, other: int, cards: list[Card]) -> Link:
        """Connect to a lower rank and show its token."""
        card, mine = cards[other], cards[self.rank].token
        assert card.host == self.host or card.tcp is not None
        way: Any = card.unix if card.host == self.host else card.tcp
        family = socket.AF_UNIX if way is card.unix else socket.AF_INET6 if ":" in way[0] else socket.AF_INET
        connection = socket.socket(family)
        try:
            connection.settimeout(self._left(f"{self.naming.rank(other)} to answer"))
            connection.connect(way)
            connection.settimeout(self._left(f"{self.naming.rank(other)} to answer"))
            connection.sendall(_HELLO.pack(card.token, self.rank))
            if _receive(connection, len(mine)) != mine:
                raise ConnectionError("another program answers at that address")
            return _link(other, connection)
        except OSError as error:
            connection.close()
            where = "its socket" if way is card.unix else endpoint(*way)
            raise RunError(
                f"{self.naming.rank(self.rank)} cannot connect to {self.naming.rank(other)} at {where}:"
                f" {error or type(error).__name__}",
                fix="check that the rank is still running and that the hosts can reach each other's ports",
            ) from error
        except BaseException:
            connection.close()
            raise

    def _accept(self, listener: socket.socket, expected: set[int], cards: list[Card]) -> list[Link]:
        """Accept the higher ranks that show this rank's token, and no other connections."""
        links: list[Link] = []
        while expected:
            missing = f"{self.naming.listed(sorted(expected))} to connect"
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
        for option, value in _KEEPALIVE.items():
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
