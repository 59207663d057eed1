"""All ranks in one process, over a channel as strict as any of ours: what runs here hangs on none of them.

A send completes only after its receive is posted. Messages of one directed edge are matched in posting order, and a
send that meets the receive of another message is an error. Nothing is buffered. The ranks take turns (see
`take_turns`), so a program that cannot continue is found at once, with what every rank waits for.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

from torch import Tensor

from drumline.channel.channel import Channel, Delivery, Wait
from drumline.core.action import Action, Op
from drumline.core.errors import RunError

Key = tuple[int, Action]


class Hub:
    """What the channels of one process share: for each direction between two ranks, unmatched sends and posts.

    Gradient exchanges have separate edges.
    """

    def __init__(self, num_ranks: int, now: Callable[[], int] = time.perf_counter_ns) -> None:
        self.num_ranks = num_ranks
        self.now = now
        self.sends: dict[tuple[int, int, bool], deque[tuple[Key, Delivery]]] = defaultdict(deque)
        self.posts: dict[tuple[int, int, bool], deque[Key]] = defaultdict(deque)
        # By rank and source; another message with the same key waits after it.
        self.arrived: list[dict[tuple[int, Key], deque[Delivery]]] = [defaultdict(deque) for _ in range(num_ranks)]
        self.words: dict[str, dict[int, Any]] = defaultdict(dict)
        self.heard: Counter[str] = Counter()  # by how many ranks
        self.activity = 0

    def channels(self) -> list[InProcessChannel]:
        """Return every rank's end."""
        return [InProcessChannel(self, rank) for rank in range(self.num_ranks)]

    def match(self, source: int, target: int, exchange: bool) -> None:
        """Match sends and receives of an edge in order."""
        self.activity += 1
        sends, posts = self.sends[source, target, exchange], self.posts[source, target, exchange]
        while sends and posts:
            (sent, delivery), posted = sends.popleft(), posts.popleft()
            if sent != posted:
                raise RunError(
                    f"rank {source} sends {sent[1]} but rank {target} expects {posted[1]}",
                    expected="sends and receives in the same order",
                )
            delivery.sent_ns = delivery.arrived_ns = self.now()
            self.arrived[target][source, sent].append(delivery)


class InProcessChannel(Channel):
    """One rank's end of a hub."""

    name = "in-process"
    copies = False

    def __init__(self, hub: Hub, rank: int) -> None:
        self.hub = hub
        self.rank = rank
        self.num_ranks = hub.num_ranks
        self.step = 0

    def begin(self, step: int, *, train: bool = True, program: int = 0, since: int | None = None) -> None:
        """Start a step."""
        self.step = step

    def belongs(self, step: int) -> None:
        """Let messages belong to another step."""
        self.step = step

    def send(self, receive: Action, target: int, tensors: Sequence[Tensor], form: Any) -> None:
        """Offer a message; it moves after its receive is posted."""
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        now = self.hub.now()
        exchange = receive.op is Op.REDUCE_GRAD
        delivery = Delivery(tuple(tensors), form, now, now, now, num_bytes)
        self.hub.sends[self.rank, target, exchange].append(((self.step, receive), delivery))
        self.hub.match(self.rank, target, exchange)

    def post(self, receive: Action, source: int) -> None:
        """Make room for the edge's next message."""
        exchange = receive.op is Op.REDUCE_GRAD
        self.hub.posts[source, self.rank, exchange].append((self.step, receive))
        self.hub.match(source, self.rank, exchange)

    def take(self, receive: Action, source: int) -> Delivery | None:
        """Take a message, if it moved."""
        arrived, key = self.hub.arrived[self.rank], (source, (self.step, receive))
        if key not in arrived:
            return None
        delivery = arrived[key].popleft()
        if not arrived[key]:
            del arrived[key]
        self.hub.activity += 1
        return delivery

    def block(self, wait: Wait, deadline_ns: int) -> None:
        """Never wait: the other ranks can continue only after this one yields."""
        raise AssertionError("ranks in one process take turns")

    def flush(self, deadline_ns: int) -> None:
        """Do nothing: a step ends for all ranks at once, so nothing is left to send."""

    def tell(self, topic: str, value: Any) -> None:
        """Tell every rank a value."""
        self.hub.words[topic][self.rank] = value
        self.hub.activity += 1

    def hear(self, topic: str, deadline_ns: int) -> list[Any]:
        """Return what every rank told; in one process, all have told before any hears."""
        words = self.hub.words[topic]
        assert len(words) == self.num_ranks, f"rank {self.rank} hears {topic} before all have told"
        self.hub.heard[topic] += 1
        if self.hub.heard[topic] == self.num_ranks:
            del self.hub.words[topic], self.hub.heard[topic]
        return [words[rank] for rank in range(self.num_ranks)]

    def hear_now(self, topic: str) -> list[Any] | None:
        """Return what every rank told, or None if one of them has not yet had its turn."""
        return self.hear(topic, 0) if len(self.hub.words[topic]) == self.num_ranks else None

    def abort(self, error: BaseException, during: str) -> None:
        """Drop what is in flight: every rank of this process fails with the same exception.

        Words stay: those of earlier steps may not have been heard yet.
        """
        self.hub.sends.clear()
        self.hub.posts.clear()
        for arrived in self.hub.arrived:
            arrived.clear()

    def close(self) -> None:
        """Release everything."""
        self.abort(RunError("it was closed"), "")
        self.hub.words.clear()
        self.hub.heard.clear()


def take_turns(hub: Hub, runs: Iterable[Generator[Wait, None, None]]) -> None:
    """Run the ranks' generators in turns until all have ended; raise if none can continue."""
    alive = list(runs)
    while alive:
        before = hub.activity
        waits: list[Wait] = []
        going = []
        for run in alive:
            wait = next(run, None)
            if wait is not None:
                waits.append(wait)
                going.append(run)
        if len(going) == len(alive) and hub.activity == before:
            raise RunError("deadlock, no rank can continue: " + "; ".join(map(str, waits)))
        alive = going
