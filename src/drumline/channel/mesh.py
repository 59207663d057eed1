"""The control mesh: what ranks tell each other over their links, and how they wait.

    packets    WORD      a value that a rank tells everybody, under a topic, and when
               ABORT     the origin of a failure, its action and its error; ranks that fail because of it pass it on
               GOODBYE   an orderly end: what follows is no failure
               PING      when it left; the answer, a PONG, says the same of itself
               ASK       what a rank waits for; the answer has the same kind
               others    belong to the channel built on the mesh, which registers a handler for each

There are no threads: packets are read when a rank looks (`pump`) or waits (`wait`). A connection that ends without a
goodbye means that the rank died. A rank that dies of another's failure may be noticed first, so an abort has a short
grace period to explain it.
"""

from __future__ import annotations

import pickle
import struct
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch.distributed.distributed_c10d import Store

from drumline.channel import stacks
from drumline.channel.channel import GRACE, SILENCE, SPIN, TIMEOUT, Wait, give_up
from drumline.channel.link import Handler, Link, Pump, milliseconds
from drumline.channel.rank_names import BY_NUMBER, RankNames
from drumline.channel.rendezvous import connect
from drumline.core.errors import RankFailed

WORD = 2
ABORT = 3
GOODBYE = 4
PING = 5
PONG = 6
ASK = 7
FIRST_OWN_KIND = 8  # a channel's kinds start here

_STAMPED = struct.Struct("<Bq")  # kind, when it left
_NUM_PINGS = 16
_WITNESS = "witness"  # how a rank is asked for its stacks; nobody waits for this word
_LOOK_MS = 3_600_000


What = Wait | str | Callable[[], str]  # what is waited for; a function if it changes meanwhile


class ControlMesh(Pump):
    """What ranks tell each other besides messages: words, failures, clocks, and what they wait for."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        *,
        store: Store,
        timeout: float = TIMEOUT,
        spin: float = SPIN,
        host: str | None = None,
        interface: str = "",
        now: Callable[[], int] = time.perf_counter_ns,
        naming: RankNames = BY_NUMBER,
    ) -> None:
        how: dict[str, Any] = {"store": store, "timeout": timeout, "host": host, "interface": interface}
        super().__init__(connect(rank, num_ranks, naming=naming, **how))
        self.naming = naming
        self.now = now
        self.rank = rank
        self.num_ranks = num_ranks
        self.timeout = timeout
        self._spin_ns = int(spin * 1e9)
        between_hosts = any(not link.carries_fds for link in self.links.values())
        self._look_ms = 1000 if between_hosts else _LOOK_MS  # how often to look whether a link is cut
        own_handlers = {WORD: self._on_word, ABORT: self._on_abort, GOODBYE: self._on_goodbye}
        for kind, handler in {**own_handlers, PING: self._on_ping, PONG: self._on_pong, ASK: self._on_ask}.items():
            self._handlers[kind] = handler
        self._waiting: tuple[What, Callable[[], Collection[int]]] | None = None  # what this rank waits for now
        self._answers: dict[int, tuple[str, list[int]]] = {}
        self._words: dict[str, dict[int, Any]] = {}
        self._num_pongs = 0
        self._num_comparisons = 0
        self._quickest: dict[int, tuple[int, int]] = {}  # by source: when a packet left, and when it was read here
        self._failure: tuple[int, str] | None = None
        self._has_failed = False  # whether this rank failed, itself or because of another
        self._lost: list[int] = []
        self._departed: set[int] = set()
        self._closed = False
        self.tell(_WITNESS, stacks.witness())

    def on(self, kind: int, handler: Handler) -> None:
        """Call `handler(source, packet, fds)` for every packet of the kind."""
        assert kind >= FIRST_OWN_KIND, f"kind {kind} is the mesh's own"
        self._handlers[kind] = handler

    def wait(
        self,
        ready: Callable[[], bool],
        what: What,
        deadline_ns: int,
        *,
        needs: Callable[[], Collection[int]],
        every_ms: int | None = None,
        refuse: Callable[[], None] = lambda: None,
    ) -> None:
        """Return when `ready()`; raise RankFailed if a rank failed, WaitTimeout after the deadline (perf_counter_ns).

        `needs` names the ranks it depends on: they must not have said goodbye. If it can become ready without a packet,
        check `every_ms`. `refuse` raises if it can never become ready.
        """
        self._waiting = what, needs
        started = time.perf_counter_ns()
        try:
            while True:
                self.pump()
                if ready():
                    return
                self._check(needs)
                refuse()
                now = time.perf_counter_ns()
                if now >= deadline_ns:
                    others = self._others(needs)
                    shown = stacks.show(self._witnesses(), self.naming)
                    raise give_up(self._said(what), (now - started) / 1e9, others, shown)
                if now - started < self._spin_ns:
                    continue
                self._before_sleep()
                sleep_ms = min(milliseconds(deadline_ns - now), every_ms or _LOOK_MS, self._look_ms)
                if not self._serve(self._poller.poll(sleep_ms)):
                    self._notice_cut_links()
        finally:
            self._waiting = None

    def _before_sleep(self) -> None:
        """Make room for messages without which this rank might sleep forever."""

    def _others(self, needs: Callable[[], Collection[int]]) -> list[str]:
        """Return what the awaited rank is itself waiting for, and so on to the rank that all wait for."""
        said: list[str] = []
        seen_ranks = {self.rank}
        at = min(needs(), default=self.rank)
        while at not in seen_ranks and at in self.links:
            seen_ranks.add(at)
            answer = self._asked(at)
            if answer is None:
                silence, known = self.links[at].silence(), self._witnesses().get(at)
                state = (known and known.state) or "it is computing or hangs"
                hangs = f"{self.naming.rank(at)} does not answer: {state}"
                said.append(self._unreachable(self.links[at], _unheard(silence)) if silence >= GRACE else hangs)
                break
            text, behind = answer
            said.append(text or f"{self.naming.rank(at)} is not waiting for any rank")
            at = min(behind, default=self.rank)
        return said

    def _asked(self, rank: int) -> tuple[str, list[int]] | None:
        """Return what and whom a rank waits for; None if it does not answer within the grace period."""
        self._answers.pop(rank, None)
        self.send_packet(rank, bytes((ASK, 0)))
        self._serve_while(lambda: rank not in self._answers and bool(self._by_fd), GRACE)
        return self._answers.get(rank)

    def _witnesses(self) -> dict[int, stacks.StackSource]:
        """Return how to ask other ranks that are still connected for their stacks."""
        connected = {link.peer for link in self._by_fd.values()}
        return {rank: source for rank, source in self.messages(_WITNESS).items() if rank in connected}

    @property
    def is_spread(self) -> bool:
        """Whether some rank runs on another host."""
        return not all(source.is_near for source in self.messages(_WITNESS).values())

    def _notice_cut_links(self) -> None:
        """Give up ranks whose hosts have acknowledged nothing for long; TCP itself would try for many minutes."""
        for link in self.links.values():
            if link.address and link.fd in self._by_fd and (silence := link.silence()) >= SILENCE:
                link.error = TimeoutError(_unheard(silence))
                self._end(link)

    def messages(self, topic: str) -> Mapping[int, Any]:
        """Return what ranks have told under a topic so far, by rank."""
        return self._words.get(topic, {})

    def tell(self, topic: str, value: Any) -> None:
        """Send a word to all ranks."""
        word = pickle.dumps((topic, value))
        assert self.rank not in self._words.get(topic, ()), f"rank {self.rank} tells {topic!r} twice"
        # Copy its own value too: the results of `hear` are not shared, on any rank.
        self._words.setdefault(topic, {})[self.rank] = pickle.loads(word)[1]
        for peer in self.links:
            self.send_packet(peer, _STAMPED.pack(WORD, self.now()) + word)

    def hear(self, topic: str, deadline_ns: int) -> list[Any]:
        """Return all ranks' words under the topic, by rank."""
        words = self._words.setdefault(topic, {})
        if len(words) < self.num_ranks:
            everybody, own_rank = set(range(self.num_ranks)), self.naming.rank(self.rank)
            self.wait(
                lambda: len(words) == self.num_ranks,
                lambda: f"{own_rank} waits for {self.naming.rank(min(everybody - set(words)))} to send {topic!r}",
                deadline_ns,
                needs=lambda: set(self.links) - set(words),
            )
        del self._words[topic]
        return [words[rank] for rank in range(self.num_ranks)]

    def compare_clocks(self, deadline_ns: int) -> None:
        """Exchange pings with all ranks; all of them call it."""
        for peer in range(self.rank):
            for _ in range(_NUM_PINGS):
                self._ping(peer, deadline_ns)
        self._num_comparisons += 1
        topic = f"clocks/{self._num_comparisons}"
        self.tell(topic, None)
        self.hear(topic, deadline_ns)  # answers the others' pings until then

    def _ping(self, peer: int, deadline_ns: int) -> None:
        due = self._num_pongs + 1
        self.send_packet(peer, _STAMPED.pack(PING, self.now()))
        what = f"{self.naming.rank(self.rank)} waits for {self.naming.rank(peer)} to answer a ping"
        self.wait(lambda: self._num_pongs == due, what, deadline_ns, needs=lambda: (peer,))

    def comparisons(self) -> list[tuple[int, int, int]]:
        """Return the quickest packet of each rank since the last call: source, when it left, when it arrived.

        The first time is by the source's clock, the second by this rank's.
        """
        comparisons = [(source, *moments) for source, moments in sorted(self._quickest.items())]
        self._quickest.clear()
        return comparisons

    def _compare(self, source: int, left_ns: int) -> None:
        now = self.now()
        best = self._quickest.get(source)
        if best is None or now - left_ns < best[1] - best[0]:
            self._quickest[source] = left_ns, now

    def abort(self, error: BaseException, during: str) -> None:
        """Tell all ranks that this one failed, or, if another rank caused it, which one that was."""
        self._has_failed = True
        if isinstance(error, RankFailed):
            rank, text = error.rank, error.error
        else:
            at = f" at {during}" if during else ""
            rank = self.naming.number(self.rank)
            text = f"{self.naming.rank(self.rank)} failed{at}: {type(error).__name__}: {error}"
        packet = bytes((ABORT,)) + pickle.dumps((rank, text))
        if not self._closed:
            for peer in self.links:
                self.send_packet(peer, packet)

    def explain(self, rank: int, error: BaseException) -> RankFailed:
        """Return why talking to `rank` failed with `error`: from an abort within the grace period, else the error."""
        why = f"{self.naming.rank(rank)} can no longer be reached ({type(error).__name__}: {error})"
        self._seek_reason(lambda: why, rank)
        assert self._failure is not None
        return RankFailed(*self._failure)

    def close(self) -> None:
        """Say goodbye and release the sockets; closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        for peer in self.links:
            self.send_packet(peer, bytes((GOODBYE,)))
        self._let_go()

    def _ended(self, peer: int) -> None:
        if peer not in self._departed:
            self._lost.append(peer)

    def _check(self, needs: Callable[[], Collection[int]]) -> None:
        if self._lost and self._failure is None:
            lost = self._lost[0]
            self._seek_reason(lambda: self._reason(self.links[lost]), lost)
        if self._failure is not None:
            raise RankFailed(*self._failure)
        for rank in self._departed and self._departed.intersection(needs()):
            at = "" if self._waiting is None else f": {self._said(self._waiting[0])}"
            own_rank, other = self.naming.rank(self.rank), self.naming.rank(rank)
            raise RankFailed(
                self.naming.number(rank),
                f"{other} closed its channel while {own_rank} was still waiting for it{at}",
                fix="call step and eval_step the same number of times on every rank, and close() after them",
            )

    def _seek_reason(self, otherwise: Callable[[], str], rank: int) -> None:
        self.pump()
        self._serve_while(lambda: self._failure is None and bool(self._by_fd), GRACE)
        if self._failure is None:
            self._failure = (self.naming.number(rank), otherwise())

    def _on_word(self, source: int, packet: bytes, fds: list[int]) -> None:
        self._compare(source, _STAMPED.unpack_from(packet)[1])
        topic, value = pickle.loads(memoryview(packet)[_STAMPED.size :])
        self._words.setdefault(topic, {})[source] = value

    def _on_abort(self, source: int, packet: bytes, fds: list[int]) -> None:
        if self._failure is None:
            self._failure = pickle.loads(memoryview(packet)[1:])

    def _on_goodbye(self, source: int, packet: bytes, fds: list[int]) -> None:
        self._departed.add(source)

    def _on_ping(self, source: int, packet: bytes, fds: list[int]) -> None:
        self._compare(source, _STAMPED.unpack(packet)[1])
        self.send_packet(source, _STAMPED.pack(PONG, self.now()))

    def _on_pong(self, source: int, packet: bytes, fds: list[int]) -> None:
        self._compare(source, _STAMPED.unpack(packet)[1])
        self._num_pongs += 1

    def _on_ask(self, source: int, packet: bytes, fds: list[int]) -> None:
        if packet[1]:
            self._answers[source] = pickle.loads(memoryview(packet)[2:])
            return
        what, needs = ("", []) if self._waiting is None else (self._said(self._waiting[0]), list(self._waiting[1]()))
        self.send_packet(source, bytes((ASK, 1)) + pickle.dumps((what, needs)))

    def _reason(self, link: Link) -> str:
        """Return why a connection ended without a goodbye."""
        if link.error is None:
            return f"{self.naming.rank(link.peer)} died without reporting an error: it crashed or was killed"
        return self._unreachable(link, link.error.strerror or str(link.error))

    def _unreachable(self, link: Link, why: str) -> str:
        cause = "the link between the hosts is cut, or that host is down"
        return f"{self.naming.rank(link.peer)} can no longer be reached at {link.address} ({why}): {cause}"

    def _said(self, what: What) -> str:
        """Return what is waited for, in words."""
        return what.text(self.naming) if isinstance(what, Wait) else what() if callable(what) else what


def _unheard(seconds: float) -> str:
    return f"nothing acknowledged for {seconds:.1f} s"
