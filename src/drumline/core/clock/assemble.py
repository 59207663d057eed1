"""From rows to a graph: nodes for actions, messages and exchanges, numbered chain by chain."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count

import numpy as np

from drumline.core import rules
from drumline.core.action import AWAITED, Action, Op
from drumline.core.clock.plain_graph import is_plain, plain_graph
from drumline.core.clock.producers import producers
from drumline.core.graph import (
    CODE,
    OPS,
    TRANSFERS,
    WAITS,
    Columns,
    Crossings,
    Exchanges,
    Ints,
    Messages,
    NotCompilable,
    Number,
    TimeGraph,
    Waits,
)
from drumline.core.program import Program, once_per_program

# By the code of the op that makes a message: its send, its receive, and whether it leaves an overlapped pair second.
SEND_OF, RECV_OF = (
    np.array([CODE[rules.SPELLED[op][end]] if op in rules.SPELLED else -1 for op in OPS]) for end in (0, 1)
)
LEAVES_LATE = np.array([op in rules.SPELLED and rules.leaves_late(Action(0, rules.SPELLED[op][0], 0)) for op in OPS])


@once_per_program
def compile_program(program: Program, messages: Messages) -> TimeGraph:
    r"""Return the program's graph, compiled once per kind of messages; raise NotCompilable if it breaks a rule.

    >>> compile_program(Program.parse("0F0,0B0\n1F0,1B0"), Messages.LATENCY).num_nodes
    4
    """
    work = program.timed_columns
    num_stages, num_microbatches = int(work.stage.max(initial=-1)) + 1, int(work.microbatch.max(initial=-1)) + 1
    if messages is Messages.LATENCY and work is program.columns and not work.paired.any():
        return plain_graph(work, num_stages, num_microbatches)
    producer = producers(work, num_stages, num_microbatches)
    consumer = np.flatnonzero(producer >= 0)
    crosses = work.rank[producer[consumer]] != work.rank[consumer]
    local, remote = consumer[~crosses], consumer[crosses]
    if np.any(work.cell[producer[local]] >= work.cell[local]):
        raise NotCompilable
    halves, num_pairs = work.code[work.paired], len(work.code) - sum(work.lengths)
    overlapped = sorted(CODE[op] for op in rules.OVERLAPPED)
    if len(halves) != 2 * num_pairs or np.any(np.sort(halves.reshape(-1, 2), axis=1) != overlapped):
        raise NotCompilable

    builder = GraphBuilder(program, producer[remote], remote)
    spelled = bool(np.isin(builder.untimed.code, TRANSFERS).any())
    if messages is not Messages.BLOCKING:
        builder.stops()
    posted = builder.posted(num_stages, num_microbatches) if spelled else None
    if messages is Messages.BLOCKING:
        builder.blocking(posted)
        builder.stops()  # after the sends, which are complete when they end
    elif messages is Messages.LINKS or spelled:
        builder.links(posted)
        messages = Messages.LINKS
    else:
        builder.take(builder.made_by)
    if messages is not Messages.BLOCKING:
        builder.await_sends()
    builder.exchange()
    return builder.build(messages, num_stages, num_microbatches)


def _turns(columns: Columns, op: Op) -> Iterator[tuple[int, tuple[int, int, int]]]:
    """Yield the index of every such action, its rank and stage, and how many of these came before it there."""
    taken = defaultdict[tuple[int, int], "count[int]"](count)
    for at in np.flatnonzero(columns.code == CODE[op]).tolist():
        key = int(columns.rank[at]), int(columns.stage[at])
        yield at, (*key, next(taken[key]))


class GraphBuilder:
    """Collects nodes as (chain, key in the chain, need, crossing, place), then numbers them chain by chain.

    Nodes of one key come in the order of their places.

    Timed actions come first, as nodes 0, 1, ... of their rows; until `build`, every need is an index in this order.
    """

    def __init__(self, program: Program, producer: Ints, consumer: Ints) -> None:
        columns, self.work = program.columns, program.timed_columns
        self.untimed = columns.only(~columns.timed)
        self.num_ranks = program.num_ranks
        self.producer, self.consumer = producer, consumer
        self.source, self.target = self.work.rank[producer], self.work.rank[consumer]
        self.edge = self.source.astype(np.int64) * self.num_ranks + self.target
        self.made_by, self.taken_by = self.work.cell[producer], self.work.cell[consumer]
        # The timed action after which each of the others comes.
        first = np.cumsum((0, *self.work.lengths), dtype=np.int64)
        self.follows = (np.cumsum(columns.timed & columns.heads) - 1)[~columns.timed]
        self.follows[self.follows < first[self.untimed.rank]] = -1
        self.num_timed = self.num_nodes = int(first[-1])
        self.need, self.crossing = np.full((2, self.num_timed), -1)  # for the timed actions
        row, numbers = self.work.rank[self.work.heads], np.arange(self.num_timed)
        self.nodes = [(row, numbers * 4 + 2, self.need, self.crossing, np.zeros_like(numbers))]
        self.num_chains = self.num_ranks
        self.node = self.recv_node = np.full(len(producer), -1)
        self.exchanges = np.flatnonzero(self.untimed.code == CODE[Op.REDUCE_GRAD])
        self.exchange_node = np.empty(0, dtype=np.int64)
        # Activations leave a pair before gradients.
        self.forward_first = self.made_by * 2 + LEAVES_LATE[self.work.code[producer]]
        self.waits = np.flatnonzero(np.isin(self.untimed.code, WAITS))
        self.awaited = np.full(len(self.waits), -1)
        # What a row stops at between its timed actions: a WAIT, or copying gradients together for an exchange.
        self.stop = np.sort(np.concatenate((self.waits, self.exchanges)))
        self.is_wait = np.isin(self.stop, self.waits)
        self.stop_need = np.full(len(self.stop), -1)
        self.stop_node = self.sent = np.empty(0, dtype=np.int64)

    def add(self, chain_number: Ints, key: Ints, need: Ints, crossing: Ints, place: Ints | None = None) -> Ints:
        """Add nodes and return their indices."""
        self.nodes.append((chain_number, key, need, crossing, np.zeros_like(key) if place is None else place))
        self.num_nodes += len(key)
        return np.arange(self.num_nodes - len(key), self.num_nodes)

    def take(self, need: Ints) -> None:
        """Make every consumer wait for `need`, its input; a second input of one action waits at a gate before it."""
        crossing = np.arange(len(need))
        _, first = np.unique(self.taken_by, return_index=True)
        self.need[self.taken_by[first]], self.crossing[self.taken_by[first]] = need[first], crossing[first]
        if len(first) < len(need):
            again = np.delete(crossing, first)
            self.add(self.target[again], self.taken_by[again] * 4 + 1, need[again], again)

    def stops(self) -> None:
        """Add a node for every WAIT and every packing, after the action that it follows."""
        rank, follows = self.untimed.rank[self.stop], self.follows[self.stop]
        self.stop_node = self.add(rank, follows * 4 + 3, self.stop_need, np.full(len(rank), -1), self.stop + 1)

    @property
    def gate(self) -> Ints:
        """The nodes of the WAITs."""
        return self.stop_node[self.is_wait]

    @property
    def pack_node(self) -> Ints:
        """The nodes at which gradients are copied together."""
        return self.stop_node[~self.is_wait]

    def behind(self, cell: Ints) -> Ints:
        """Return the node that an untimed action follows: the timed action before it, or a stop in between."""
        follows, rank = self.follows[cell], self.untimed.rank
        if not len(self.stop_node) or not len(cell):
            return follows
        last = np.searchsorted(self.stop, cell) - 1
        stop = self.stop[last]
        between = (last >= 0) & (rank[stop] == rank[cell]) & (self.follows[stop] == follows)
        behind: Ints = np.where(between, self.stop_node[last], follows)
        return behind

    def await_sends(self) -> None:
        """Make every WAIT for a send wait for its message."""
        untimed = self.untimed
        columns = (column.tolist() for column in (untimed.code, untimed.stage, untimed.microbatch))
        named = list(zip(*columns, strict=True)) if len(self.waits) else []
        crossing_of = {named[sent]: (crossing, sent) for crossing, sent in enumerate(self.sent.tolist()) if named}
        for at, wait in enumerate(self.waits.tolist()):
            code, *pair = named[wait]
            if OPS[code] is not Op.WAIT_REDUCE_GRAD:
                crossing, sent = crossing_of.get((CODE[AWAITED[OPS[code]]], *pair), (-1, -1))
                if sent < 0 or sent > wait or untimed.rank[sent] != untimed.rank[wait]:
                    raise NotCompilable
                self.awaited[at] = self.node[crossing]

    def links(self, posted: tuple[Ints, Ints, Ints] | None) -> None:
        """Add a node per message, chained per link in the order of the sends."""
        nowhere = np.full(len(self.made_by), -1)
        sent_after, received_after, order = posted or (self.made_by, nowhere, self.forward_first)
        edges, edge = np.unique(self.edge, return_inverse=True)
        link, nothing = self.num_chains + edge, np.full(len(edge), -1)
        self.num_chains += len(edges)
        self.node = self.add(link, order * 2 + 1, sent_after, nothing)
        waits = np.flatnonzero(received_after >= 0)
        self.add(link[waits], order[waits] * 2, received_after[waits], nothing[waits])
        self.take(self.node)

    def posted(self, num_stages: int, num_microbatches: int) -> tuple[Ints, Ints, Ints]:
        """Return the timed actions after which each message is sent and its receive posted, and the order of sends."""
        untimed, work, follows = self.untimed, self.work, self.follows
        listed = np.flatnonzero(np.isin(untimed.code, TRANSFERS))
        stage, at = untimed.stage[listed], untimed.microbatch[listed]
        if np.any((stage >= num_stages) | (at >= num_microbatches)):
            raise NotCompilable
        where = np.full((len(OPS), num_stages, num_microbatches), -1, dtype=np.int64)
        where[untimed.code[listed], stage, at] = listed
        producer_codes, microbatch = work.code[self.producer], work.microbatch[self.producer]
        sent = where[SEND_OF[producer_codes], work.stage[self.producer], microbatch]
        received = where[RECV_OF[producer_codes], work.stage[self.consumer], microbatch]
        every_one = len(listed) == 2 * len(sent) == np.count_nonzero(where >= 0)
        if not every_one or np.any((sent < 0) | (received < 0)):
            raise NotCompilable
        placed = (untimed.rank[sent] == self.source) & (untimed.rank[received] == self.target)
        in_time = (follows[sent] >= self.made_by) & (follows[received] < self.taken_by)
        in_order = np.lexsort((sent, self.edge)) == np.lexsort((received, self.edge))
        if not np.all(placed & in_time & in_order):
            raise NotCompilable
        self.sent = sent
        return self.behind(sent), self.behind(received), sent

    def blocking(self, posted: tuple[Ints, Ints, Ints] | None) -> None:
        """Put a send after every producer, or where the row has it, and a receive before every consumer.

        As in a lowered program, activations leave an overlapped pair before gradients. An edge's messages are received
        in the order in which they are sent: a message that is sent early and used late is received early.
        """
        sent_after, _, order = posted or (self.made_by, self.made_by, self.forward_first)
        crossing, nothing = np.argsort(order, kind="stable"), np.full(len(order), -1)
        # Nodes of the same place keep the order in which they are added.
        self.node, self.recv_node = nothing.copy(), nothing.copy()
        place = nothing + 1 if posted is None else order[crossing] + 1
        self.node[crossing] = self.add(self.source[crossing], sent_after[crossing] * 4 + 3, nothing, nothing, place)
        taken_by = self.taken_by.copy()
        crossing = np.lexsort((order, self.edge))
        for messages in np.split(crossing, np.flatnonzero(np.diff(self.edge[crossing])) + 1):
            taken_by[messages] = np.minimum.accumulate(taken_by[messages][::-1])[::-1]
        key = taken_by[crossing] * 4
        self.recv_node[crossing] = self.add(self.target[crossing], key, self.node[crossing], crossing)

    def exchange(self) -> None:
        """Add the gradient exchanges: each waits for its own rank and, if the stage has a copy, for the copy's rank.

        The n-th exchange of a stage on one rank meets the n-th on the other; the n-th UPDATE waits for it. Exchanges
        with other pipelines, whose ranks do the same, go one after the other: they use one link.
        """
        follows = self.pack_node
        posted = {turn: at for at, (_, turn) in enumerate(_turns(self.untimed, Op.REDUCE_GRAD))}
        partner = np.full(len(posted), -1)
        for (on_rank, of_stage, nth), at in posted.items():
            others = (posted.get((other, of_stage, nth)) for other in range(self.num_ranks) if other != on_rank)
            met = next((other for other in others if other is not None), None)
            if met is not None:
                partner[at] = follows[met]
        alone, turns, nothing = partner < 0, np.arange(len(posted)), np.full(len(posted), -1)
        own_lanes = np.where(alone, self.untimed.rank[self.exchanges], self.num_ranks + turns)
        links, link = np.unique(own_lanes, return_inverse=True)
        number = self.num_chains + link
        self.num_chains += len(links)
        self.add(number, turns * 2, partner, nothing)
        self.exchange_node = self.add(number, turns * 2 + 1, follows, nothing)
        for at, turn in _turns(self.untimed, Op.WAIT_REDUCE_GRAD):
            place = posted.get(turn)
            if place is None or self.exchanges[place] > at:
                raise NotCompilable
            self.awaited[np.searchsorted(self.waits, at)] = self.exchange_node[place]
        for update, turn in _turns(self.work, Op.UPDATE) if posted else ():
            if turn in posted:
                self.need[self.work.cell[update]] = self.exchange_node[posted[turn]]

    def build(self, messages: Messages, num_stages: int, num_microbatches: int) -> TimeGraph:
        """Give every node its number, chain by chain, and return the graph."""
        self.stop_need[self.is_wait] = self.awaited
        chain_number, key, need, crossing, place = map(np.concatenate, zip(*self.nodes, strict=True))
        # One more entry than there are nodes, so that -1 stays -1.
        new = np.arange(self.num_nodes + 1, dtype=Number)
        new[-1] = -1
        if self.num_nodes > self.num_timed:
            order = np.lexsort((place, key, chain_number))
            new[order] = np.arange(self.num_nodes, dtype=Number)
            chain_number, need, crossing = chain_number[order], new[need[order]], crossing[order]
        counts = np.bincount(chain_number, minlength=self.num_chains)
        last = np.cumsum(counts)
        waits, timed = self.waits, new[: self.num_timed]
        exchanged = self.untimed.stage[self.exchanges], self.untimed.rank[self.exchanges]
        return TimeGraph(
            messages,
            self.num_ranks,
            num_stages,
            num_microbatches,
            self.num_nodes,
            np.stack((last - counts, last), axis=1),
            need.astype(Number, copy=False),
            crossing,
            tuple(np.split(timed, np.cumsum(self.work.lengths)[:-1])),
            self.work,
            timed[self.work.cell],
            Crossings(self.producer, self.consumer, self.source, self.target, new[self.node], new[self.recv_node]),
            Exchanges(*exchanged, new[self.pack_node], new[self.exchange_node]),
            Waits(self.untimed.rank[waits], new[self.gate], new[self.awaited], self.follows[waits]),
            not len(self.exchanges) and not len(self.waits) and is_plain(self.work, num_stages),
        )
