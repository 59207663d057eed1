"""A program compiled to arrays: nodes that take time, and what each of them waits for.

Nodes come in chains, one per rank's row, per link, per gradient exchange. A node waits for the one before it in its
chain and for at most one other, so its end is one line of arithmetic:

    end[i] = max(end[i - 1], end[need[i]] + lag[i]) + seconds[i]

Where an action needs two others (an overlapped pair, a message whose receive must be posted), a gate that takes no time
stands before it and waits for the first. So does a WAIT: a gate in its row that waits for the message or the exchange.
Index -1 is the start of time. Who needs whom comes from `rules`.

    messages    nodes beside the actions                   a consumer waits for
    LATENCY     none                                       its producer, plus the edge's latency
    LINKS       one per message, chained per link          its message, plus the edge's latency
    BLOCKING    a send and a receive inside the rows       the receive before it
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
import numpy.typing as npt

from drumline.core import rules
from drumline.core.action import TIMED_OPS, TRANSFER_OPS, WAIT_OPS, Op
from drumline.core.costs import Costs

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

OPS = tuple(Op)
CODE: dict[Op, int] = {op: code for code, op in enumerate(OPS)}
TIMED = np.array([op in TIMED_OPS for op in OPS])
# Places of the compute ops in a small table of their own; the others have none.
PLACE = np.array([list(rules.NEEDS).index(op) if op in rules.NEEDS else -1 for op in OPS])
WAITS = tuple(sorted(CODE[op] for op in WAIT_OPS))
TRANSFERS = tuple(sorted(CODE[op] for op in TRANSFER_OPS))


class Messages(Enum):
    """How messages between ranks are modelled."""

    LATENCY = auto()
    LINKS = auto()
    BLOCKING = auto()

    @staticmethod
    def of(costs: Costs) -> Messages:
        """Return how messages are modelled under these costs."""
        if not costs.has_finite_links:
            return Messages.LATENCY
        return Messages.LINKS if costs.overlap else Messages.BLOCKING


class NotCompilable(Exception):
    """The program breaks a rule; the validator says which."""


@dataclass(frozen=True, slots=True)
class Work:
    """Every plain action, one array per property; `node` is where it runs, `rank` on whom."""

    stage: Ints
    code: Ints
    microbatch: Ints
    node: Ints
    rank: Ints


@dataclass(frozen=True, slots=True)
class Crossings:
    """The messages between ranks: who makes and takes them (as work), and their nodes, -1 where they have none.

    `node` is the transfer, or under BLOCKING the send; `recv_node` the receive.
    """

    producer: Ints
    consumer: Ints
    source: Ints
    target: Ints
    node: Ints
    recv_node: Ints


@dataclass(frozen=True, slots=True)
class Exchanges:
    """The gradient exchanges: stage, rank and node of each."""

    stage: Ints
    rank: Ints
    node: Ints


@dataclass(frozen=True, slots=True)
class Waits:
    """The WAITs: the rank of each, its node, the node it waits for (-1: none), and which timed action it follows.

    Timed actions are numbered through, row by row; -1 is a WAIT before the first of its row.
    """

    rank: Ints
    node: Ints
    awaited: Ints
    follows: Ints


@dataclass(frozen=True, slots=True)
class Graph:
    """The compiled form. `chains` bound consecutive nodes; the first ones are the ranks' rows.

    Where the program is not `plain`, compiling has not checked all of it, and the validator must.
    """

    messages: Messages
    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_nodes: int
    chains: tuple[tuple[int, int], ...]
    before: Ints
    need: Ints
    crossing: Ints
    action_nodes: tuple[Ints, ...]
    work: Work
    crossings: Crossings
    exchanges: Exchanges
    waits: Waits
    plain: bool
