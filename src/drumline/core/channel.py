"""The channels that a program is proven for: which messages of a rank have to wait for each other.

On all of them a send completes only once its receive is posted, nothing is buffered between, and a rank's messages move
in the order in which it posted them. They differ in which of its messages stand in one queue:

    edge   one queue per directed edge             Drumline's own transports; gloo
    pair   one per pair of ranks, both directions  NCCL as PyTorch uses it for a single send or receive
    rank   one for all messages of a rank          NCCL as PyTorch uses it for a batch of them

What runs on a rank's one queue runs on all three; the other way round it may hang:

    0RECV_B0,0F0,0SEND_F0,0B0      Two queues of rank 0, from and to rank 1: 0SEND_F0 moves while 0RECV_B0 waits.
    1RECV_F0,1F0,1B0,1SEND_B0      One queue: 0SEND_F0 stands behind 0RECV_B0, which waits for what it leads to.
"""

from __future__ import annotations

from enum import StrEnum

from drumline.core.errors import ProgramError, nearest


class Queues(StrEnum):
    """What has one queue of messages: the channel's kind, from the freest to the strictest."""

    EDGE = "edge"
    PAIR = "pair"
    RANK = "rank"

    @staticmethod
    def of(channel: str) -> Queues:
        """Return the kind that a word names.

        >>> Queues.of("pair")
        <Queues.PAIR: 'pair'>
        >>> Queues.of("node")
        Traceback (most recent call last):
        drumline.core.errors.ProgramError: no channel is called 'node'; expected edge, pair or rank...
        """
        try:
            return Queues(channel)
        except ValueError:
            raise ProgramError(
                f"no channel is called {channel!r:.40}",
                expected="edge, pair or rank",
                fix=nearest(str(channel), list(Queues)),
            ) from None

    @property
    def words(self) -> str:
        """The kind in words."""
        return {Queues.EDGE: "directed edge", Queues.PAIR: "pair of ranks", Queues.RANK: "rank"}[self]

    def key(self, rank: int, peer: int, *, sends: bool) -> tuple[int, ...]:
        """Return which queue of `rank` a message to or from `peer` stands in.

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
