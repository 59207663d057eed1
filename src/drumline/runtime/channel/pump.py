"""One pump for the links to all other ranks: it reads whatever comes, and pushes what the kernel did not take.

    link 1 ──┐                      ┌──► a handler per kind of packet
    link 2 ──┼── poll ──► _serve ───┤
    bell   ──┘                      └──► a bell: something else that became readable

There are no threads: packets are read when a rank looks, or waits.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterable, Sequence

from drumline.runtime.channel.channel import LINGER
from drumline.runtime.channel.link import Handler, Link

_IN, _OUT = select.POLLIN, select.POLLOUT


class Pump:
    """This rank's links to all others, by peer."""

    def __init__(self, links: Iterable[Link]) -> None:
        self._handlers: list[Handler] = [_refuse] * 256
        self._backed_up: set[int] = set()
        self._poller = select.poll()
        self.links = {link.peer: link for link in links}
        self._by_fd = {link.fd: link for link in self.links.values()}
        self._bells: dict[int, Callable[[], None]] = {}
        for fd in self._by_fd:
            self._poller.register(fd, _IN)

    def listen(self, fd: int, bell: Callable[[], None]) -> None:
        """Have `bell` called when the descriptor is readable, along with the packets."""
        self._bells[fd] = bell
        self._poller.register(fd, _IN)

    def send_packet(self, target: int, packet: bytes, fds: Sequence[int] = ()) -> None:
        """Send a packet; returns at once, and keeps what the kernel does not take yet."""
        if not self.links[target].send(packet, fds) and target not in self._backed_up:
            self._backed_up.add(target)
            self._watch(self.links[target], _IN | _OUT)

    @property
    def all_sent(self) -> bool:
        """Whether the kernel has taken every packet."""
        return not self._backed_up

    def pump(self) -> None:
        """Read everything that is there and call the handlers; never blocks."""
        while self.look():
            pass

    def look(self) -> bool:
        """Read a packet from every rank that sent some, and return whether there was any; never blocks."""
        events = self._poller.poll(0)
        if events:
            self._serve(events)
            return True
        return False

    def _serve_while(self, going_on: Callable[[], bool], seconds: float) -> None:
        """Read what comes as long as something goes on, and no longer than so many seconds."""
        deadline_ns = time.perf_counter_ns() + int(seconds * 1e9)
        while going_on() and (left := deadline_ns - time.perf_counter_ns()) > 0:
            self._serve(self._poller.poll(milliseconds(left)))

    def _serve(self, events: list[tuple[int, int]]) -> None:
        for fd, event in events:
            link = self._by_fd.get(fd)
            if link is None:
                self._bells[fd]()
                continue
            if event & _OUT and link.push():
                self._backed_up.discard(link.peer)
                self._watch(link, _IN)
            if event != _OUT and not link.read(self._handlers):
                self._end(link)

    def _watch(self, link: Link, events: int) -> None:
        if link.fd in self._by_fd:
            self._poller.modify(link.fd, events)

    def _end(self, link: Link) -> None:
        self._poller.unregister(link.fd)
        del self._by_fd[link.fd]
        self._backed_up.discard(link.peer)
        self._ended(link.peer)

    def _ended(self, peer: int) -> None:
        """Note that a peer's connection has ended."""

    def _let_go(self) -> None:
        """Let the last packets leave, read no more, and close the sockets."""
        for fd in self._bells:
            self._poller.unregister(fd)
        self._handlers = [_ignore] * 256
        deadline = time.perf_counter_ns() + int(LINGER * 1e9)
        self._serve_while(lambda: bool(self._backed_up), LINGER)
        for link in self.links.values():
            link.end_sending()
        # Over TCP a close with unread packets would destroy those on their way to the peer: wait for its end too.
        left = (deadline - time.perf_counter_ns()) / 1e9
        self._serve_while(lambda: any(not link.carries_fds for link in self._by_fd.values()), left)
        for link in self.links.values():
            link.close()
        self._by_fd.clear()


def _refuse(source: int, packet: bytes, fds: list[int]) -> None:
    raise AssertionError(f"rank {source} sent a packet of the unknown kind {packet[0]}")


def _ignore(source: int, packet: bytes, fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def milliseconds(nanoseconds: int) -> int:
    """Return a time to poll for: rounded up, and in pieces that fit the kernel's int."""
    return min(-(-nanoseconds // 1_000_000), 3_600_000)
