"""The channels that a program can be proven for: which of a rank's messages wait for each other.

On every channel a send completes only after its receive is posted, and nothing is buffered in between. Messages in the
same queue move in the order in which the rank posted them. Channels differ in which messages share a queue:

    edge   one queue per directed edge             Drumline's own transports; gloo
    pair   one per pair of ranks, both directions  NCCL as PyTorch uses it for a single send or receive
    rank   one for all messages of a rank          NCCL as PyTorch uses it for a batch of sends and receives

A program that runs with one queue per rank runs on all three channels. The reverse is not true; it may hang:

    0RECV_B0,0F0,0SEND_F0,0B0      Two queues between ranks 0 and 1: 0SEND_F0 moves while 0RECV_B0 waits.
    1RECV_F0,1F0,1B0,1SEND_B0      One queue: 0SEND_F0 waits behind 0RECV_B0, which needs 0SEND_F0 to move first.
"""

from __future__ import annotations

from enum import StrEnum

from drumline.core.errors import ProgramError, nearest


class Queues(StrEnum):
    """The kind of channel, by what shares one queue of messages; from the least to the most strict."""

    EDGE = "edge"
    PAIR = "pair"
    RANK = "rank"

    @staticmethod
    def of(channel: str) -> Queues:
        """Return the channel kind with this name.

        >>> Queues.of("pair")
        <Queues.PAIR: 'pair'>
        >>> Queues.of("node")
        Traceback (most recent call last):
        drumline.core.errors.ProgramError: unknown channel 'node'; expected edge, pair or rank...
        """
        try:
            return Queues(channel)
        except ValueError:
            raise ProgramError(
                f"unknown channel {channel!r:.40}",
                expected="edge, pair or rank",
                fix=nearest(str(channel), list(Queues)),
            ) from None

    @property
    def words(self) -> str:
        """The kind in plain words."""
        return {Queues.EDGE: "directed edge", Queues.PAIR: "pair of ranks", Queues.RANK: "rank"}[self]

    def key(self, rank: int, peer: int, *, sends: bool) -> tuple[int, ...]:
        """Return the queue of `rank` that a message to or from `peer` uses.

        >>> Queues.EDGE.key(0, 1, sends=True) == Queues.EDGE.key(0, 1, sends=False)
        False
        >>> Queues.PAIR.key(0, 1, sends=True) == Queues.PAIR.key(0, 1, sends=False)
        True
        """
        match self:
            case Queues.EDGE:
                return rank, peer, int(sends)
            case Queues.PAIR:
                return rank, peer
            case Queues.RANK:
                return (rank,)


STRICTEST = Queues.RANK
