"""The interface between the executor and a transport: each rank has one end of a channel.

    executor of rank 0                         executor of rank 1
      send(1 <- 0F3's output) ──── channel ────► post(1RECV_F3), later take(1RECV_F3)

`send` and `post` return at once. Messages of one directed edge travel in the order of their posts, but may be taken in
another. A message is identified by its receive action and the step, so that a rank may be a step ahead of another.
Besides messages, a channel carries words: small values that every rank tells all others, under a topic.
"""

from __future__ import annotations

import faulthandler
import io
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from drumline.channel.rank_names import BY_NUMBER, RankNames
from drumline.core import rules
from drumline.core.action import RECV_OPS, Action
from drumline.core.errors import WaitTimeout

# How long the real transports wait, in seconds; each default is defined only here.

# Connecting, and everything else without its own deadline.
TIMEOUT = 60.0

# After a connection ends without goodbye: how long an abort may still explain it before the peer is blamed.
GRACE = 0.5

# Between hosts: after so long without any acknowledgement of what was sent, the link counts as cut.
SILENCE = 15.0

# Closing: how long to wait until the last packets are sent.
LINGER = 1.0

# How long a wait polls before it sleeps: waking up costs tens of microseconds.
SPIN = 50e-6


@dataclass(slots=True)
class Delivery:
    """A message that arrived: its tensors, their structure, and when it travelled.

    `made_ns` is when the sender passed it to the channel and `sent_ns` when it left the sender (the same if unknown),
    both by the sender's clock. `arrived_ns` is when it could be taken here, or later if nobody looked.
    """

    tensors: tuple[Tensor, ...]
    form: Any
    made_ns: int
    sent_ns: int
    arrived_ns: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Wait:
    """What a rank waits for: `action` needs the message `receive`, which `source` sends."""

    rank: int
    action: Action
    receive: Action
    source: int

    def __str__(self) -> str:
        return self.text(BY_NUMBER)

    def text(self, naming: RankNames) -> str:
        """Return it in words."""
        own_rank, other = naming.rank(self.rank), naming.rank(self.source)
        if self.receive.op in RECV_OPS:
            producers = " or ".join(map(str, rules.producers(self.receive)))
            return f"{own_rank} at {self.action} waits for {producers} of {other}"
        return f"{own_rank} waits for {other} to reach {self.receive}"


class Channel(ABC):
    """One rank's end. Every wait is bounded: after its limit it raises WaitTimeout and says what it waited for."""

    name: str
    rank: int
    num_ranks: int
    naming: RankNames = BY_NUMBER  # what messages call the ranks
    timeout: float = TIMEOUT
    copies = True  # whether tensors arrive as others with the same values

    @property
    def is_spread(self) -> bool:
        """Whether some rank runs on another host."""
        return False

    @property
    def is_cut(self) -> bool:
        """Whether the connection to some rank has ended; reads nothing."""
        return False

    def connect(self, edges: Sequence[tuple[int, int]]) -> None:  # noqa: B027 - most connect all ranks from the start
        """Open more directed edges (source, target); call it with the same edges on all ranks."""

    @abstractmethod
    def begin(self, step: int, *, train: bool = True, program: int = 0, since: int | None = None) -> None:
        """Start a step, which trains or not: everything sent, posted and taken from here on belongs to it.

        `program` is a byte that distinguishes its program from others. Messages of earlier steps must have been taken,
        or with `since` those of steps before that one.
        """

    @abstractmethod
    def belongs(self, step: int) -> None:
        """Let what is sent, posted and taken from here on belong to another step than the one that runs."""

    @abstractmethod
    def send(self, receive: Action, target: int, tensors: Sequence[Tensor], form: Any) -> None:
        """Send a message that `target` receives as `receive`; the tensors must not change afterwards."""

    def post(self, receive: Action, source: int) -> None:  # noqa: B027 - most make room without being told
        """Announce that the next message from `source` will be `receive`, and that there is room for it."""

    @abstractmethod
    def take(self, receive: Action, source: int) -> Delivery | None:
        """Take a message, or return None if it has not arrived; never blocks."""

    @abstractmethod
    def block(self, wait: Wait, deadline_ns: int) -> None:
        """Return after something arrived that may be what `wait` names; raise WaitTimeout after the deadline."""

    @abstractmethod
    def flush(self, deadline_ns: int) -> None:
        """Return after everything sent has left this rank's buffers."""

    @abstractmethod
    def tell(self, topic: str, value: Any) -> None:
        """Tell every other rank a small picklable value under a new topic; returns at once."""

    @abstractmethod
    def hear(self, topic: str, deadline_ns: int) -> list[Any]:
        """Return what every rank told under the topic, by rank, including this one; each topic is heard once."""

    def hear_now(self, topic: str) -> list[Any] | None:
        """Return what every rank told under the topic; None if other ranks must run first to know it.

        A rank with its own process waits, as long as for anything else.
        """
        return self.hear(topic, time.perf_counter_ns() + int(self.timeout * 1e9))

    def compare_clocks(self, deadline_ns: int) -> None:  # noqa: B027 - ranks of one process share a clock
        """Exchange pings with all ranks to measure the offsets between clocks; all ranks call it."""

    def comparisons(self) -> list[tuple[int, int, int]]:
        """Return samples of clock offsets: source, when something left there, when it arrived here."""
        return []

    @abstractmethod
    def abort(self, error: BaseException, during: str) -> None:
        """Tell every rank that this one failed `during` an action, so that each raises RankFailed at its next wait."""

    @abstractmethod
    def close(self) -> None:
        """Release everything; closing twice is fine."""


def step_topic(step: int) -> str:
    """Return the topic under which a rank tells that it has finished a step.

    >>> step_topic(3)
    'step/3'
    """
    return f"step/{step}"


def too_late(what: Wait | str, seconds: float, others: Sequence[str] = ()) -> WaitTimeout:
    """Return the error of a wait that took too long; `others` says what the ranks it depends on were doing.

    >>> print(too_late("rank 0 waits for rank 1 to report its model", 5.0))
    rank 0 waits for rank 1 to report its model, for 5 s so far; raise `timeout` if that rank is just slow
    """
    known = f" ({'; '.join(others)})" if others else ""
    return WaitTimeout(f"{what}, for {seconds:.3g} s so far{known}", fix="raise `timeout` if that rank is just slow")


def give_up(what: Wait | str, seconds: float, others: Sequence[str] = (), stacks: str = "") -> WaitTimeout:
    """Return the error of a wait that took too long, after writing the stacks of all threads to stderr.

    `stacks` are those of other ranks.
    """
    for stream in (sys.stderr, sys.__stderr__):
        try:
            if stream is not None:
                print(f"drumline: {what}; stacks of all threads in this process:", file=stream, flush=True)
                faulthandler.dump_traceback(file=stream, all_threads=True)
                print(stacks, end="\n" if stacks else "", file=stream, flush=True)
                break
        except (io.UnsupportedOperation, ValueError, OSError):  # the stderr of a notebook or a test is not a file
            continue
    return too_late(what, seconds, others)
