"""From rows to a graph: nodes for actions, messages and exchanges, numbered chain by chain."""

from __future__ import annotations

import numpy as np

from drumline.core import rules
from drumline.core.action import AWAITED, Action, Op
from drumline.core.program import Program, once_per_program
from drumline.core.simulate.cells import Cells, producers
from drumline.core.simulate.graph import (
    CODE,
    OPS,
    PLACE,
    TRANSFERS,
    WAITS,
    Crossings,
    Exchanges,
    Graph,
    Ints,
    Messages,
    NotCompilable,
    Waits,
    Work,
)

# By the code of what makes a message: its send, its receive, and whether it is the second to leave an overlapped pair.
_SEND, _RECV = (np.array([CODE[rules.SPELLED[op][end]] if op in rules.SPELLED else -1 for op in OPS]) for end in (0, 1))
_LATE = np.array([op in rules.SPELLED and rules.leaves_late(Action(0, rules.SPELLED[op][0], 0)) for op in OPS])


@once_per_program
def compile_program(program: Program, messages: Messages) -> Graph:
    r"""Return the program's graph, compiled once per kind of messages; raise NotCompilable if a rule is broken.

    >>> compile_program(Program.parse("0F0,0B0\n1F0,1B0"), Messages.LATENCY).num_nodes
    4
    """
    cells = Cells.of(program)
    work = cells.work
    num_stages, num_microbatches = int(work.stage.max(initial=-1)) + 1, int(work.microbatch.max(initial=-1)) + 1
    producer = producers(program.columns, work, num_stages, num_microbatches)
    consumer = np.flatnonzero(producer >= 0)
    crosses = work.rank[producer[consumer]] != work.rank[consumer]
    local, remote = consumer[~crosses], consumer[crosses]
    if np.any(work.node[producer[local]] >= work.node[local]):
        raise NotCompilable

    fused = len(work.node) - len(cells.timed_rank)
    halves = np.sort(work.code[len(work.code) - 2 * fused :].reshape(-1, 2), axis=1)
    if np.any(halves != sorted(CODE[op] for op in rules.OVERLAPPED)):
        raise NotCompilable

    builder = GraphBuilder(cells, producer[remote], remote)
    spelled = bool(np.isin(cells.code, TRANSFERS).any())
    if messages is not Messages.BLOCKING:
        builder.gates()
    posted = builder.posted(num_stages, num_microbatches) if spelled else None
    if messages is Messages.BLOCKING:
        builder.blocking(posted)
        builder.gates()  # behind the sends, which are done when they end
    elif messages is Messages.LINKS or spelled:
        builder.links(posted)
        messages = Messages.LINKS
    else:
        builder.latency()
    if messages is not Messages.BLOCKING:
        builder.await_sends()
    builder.exchange()
    return builder.build(messages, num_stages, num_microbatches, _is_plain(cells, num_stages))


def _is_plain(cells: Cells, num_stages: int) -> bool:
    """Whether all that rules say about the program was checked on the way here.

    What is left to the validator is rare and small: exchanges, updates, parameter state, and stages on several ranks.
    """
    work = cells.work
    home = np.full(num_stages, -1)
    home[work.stage] = work.rank
    others = (CODE[Op.REDUCE_GRAD], *WAITS)
    computes_only = bool((PLACE[work.code] >= 0).all()) and not np.any(np.isin(cells.code, others))
    return computes_only and bool((home[work.stage] == work.rank).all())


class Turns:
    """Counts how often each (rank, stage) has had its turn."""

    def __init__(self) -> None:
        self.taken: dict[tuple[int, int], int] = {}

    def next(self, rank: int, stage: int) -> int:
        """Return 0, 1, 2, ... for the same rank and stage."""
        turn = self.taken.get((rank, stage), 0)
        self.taken[rank, stage] = turn + 1
        return turn


class GraphBuilder:
    """Collects nodes as (chain, key inside it, need, crossing), then numbers them chain by chain.

    The timed actions come first, as nodes 0, 1, ... of their rows; until `build` every need is an index in this order.
    """

    def __init__(self, cells: Cells, producer: Ints, consumer: Ints) -> None:
        self.cells = cells
        self.producer, self.consumer = producer, consumer
        work = cells.work
        self.source, self.target = work.rank[producer], work.rank[consumer]
        self.made_by, self.taken_by = work.node[producer], work.node[consumer]
        num_timed = len(cells.timed_rank)
        self.chain: list[Ints] = [cells.timed_rank]
        self.key: list[Ints] = [np.arange(num_timed) * 4 + 2]
        self.need: list[Ints] = [np.full(num_timed, -1)]
        self.crossing: list[Ints] = [np.full(num_timed, -1)]
        self.num_nodes = num_timed
        self.num_chains = cells.num_ranks
        self.node = self.recv_node = np.full(len(producer), -1)
        self.exchanges = np.flatnonzero(cells.code == CODE[Op.REDUCE_GRAD])
        self.exchange_node = np.empty(0, dtype=np.int64)
        # After which of its rank's nodes each exchange is posted; activations leave a pair before gradients.
        self.posted_after = cells.follows[self.exchanges]
        self.forward_first = self.made_by * 2 + _LATE[work.code[producer]]
        self.waits = np.flatnonzero(np.isin(cells.code, WAITS))
        self.awaited = np.full(len(self.waits), -1)
        self.gate = self.sent = np.empty(0, dtype=np.int64)

    def add(self, chain_number: Ints, key: Ints, need: Ints, crossing: Ints) -> Ints:
        """Add nodes and return their indices."""
        self.chain.append(chain_number)
        self.key.append(key)
        self.need.append(need)
        self.crossing.append(crossing)
        self.num_nodes += len(key)
        return np.arange(self.num_nodes - len(key), self.num_nodes)

    def take(self, need: Ints) -> None:
        """Make every consumer wait for `need`, its input; a second input of one action waits at a gate before it."""
        crossing = np.arange(len(need))
        _, first = np.unique(self.taken_by, return_index=True)
        self.need[0][self.taken_by[first]], self.crossing[0][self.taken_by[first]] = need[first], crossing[first]
        if len(first) < len(need):
            again = np.delete(crossing, first)
            self.add(self.target[again], self.taken_by[again] * 4 + 1, need[again], again)

    def gates(self) -> None:
        """Add a gate for every WAIT, behind the action that it follows; what it waits for is told later."""
        if len(self.waits):
            rank, follows = self.cells.rank[self.waits], self.cells.follows[self.waits]
            self.gate = self.add(rank, follows * 4 + 3, self.awaited, np.full(len(rank), -1))

    def behind(self, cell: Ints) -> Ints:
        """Return the node behind which an untimed action stands: the timed action before it, or a WAIT between."""
        follows = self.cells.follows[cell]
        if not len(self.gate) or not len(cell):
            return follows
        last = np.searchsorted(self.waits, cell) - 1
        wait = self.waits[last]
        between = (last >= 0) & (self.cells.rank[wait] == self.cells.rank[cell]) & (self.cells.follows[wait] == follows)
        behind: Ints = np.where(between, self.gate[last], follows)
        return behind

    def await_sends(self) -> None:
        """Let every WAIT for a send wait for its message."""
        if not len(self.waits):
            return
        cells = self.cells
        crossing_of = {
            (code, stage, microbatch): (at, cell)
            for at, (cell, code, stage, microbatch) in enumerate(
                zip(*(one.tolist() for one in (self.sent, *self._named(self.sent))), strict=True)
            )
        }
        for at, wait in enumerate(self.waits.tolist()):
            code, stage, microbatch = (int(one) for one in self._named(wait))
            if OPS[code] is not Op.WAIT_REDUCE_GRAD:
                crossing, sent = crossing_of.get((CODE[AWAITED[OPS[code]]], stage, microbatch), (-1, -1))
                if sent < 0 or sent > wait or cells.rank[sent] != cells.rank[wait]:
                    raise NotCompilable
                self.awaited[at] = self.node[crossing]

    def _named(self, cell: Ints | int) -> tuple[Ints, Ints, Ints]:
        return self.cells.code[cell], self.cells.stage[cell], self.cells.microbatch[cell]

    def latency(self) -> None:
        """Let every consumer wait for its producer itself."""
        self.take(self.made_by)

    def links(self, posted: tuple[Ints, Ints, Ints] | None) -> None:
        """Add a node per message, chained per link in the order of the sends."""
        nowhere = np.full(len(self.made_by), -1)
        sent_after, received_after, order = posted or (self.made_by, nowhere, self.forward_first)
        edges, edge = np.unique(self.source * self.cells.num_ranks + self.target, return_inverse=True)
        link, nothing = self.num_chains + edge, np.full(len(edge), -1)
        self.num_chains += len(edges)
        self.node = self.add(link, order * 2 + 1, sent_after, nothing)
        waits = np.flatnonzero(received_after >= 0)
        self.add(link[waits], order[waits] * 2, received_after[waits], nothing[waits])
        self.take(self.node)

    def posted(self, num_stages: int, num_microbatches: int) -> tuple[Ints, Ints, Ints]:
        """Return after which timed action each message is sent and its receive posted, and the order of the sends."""
        cells, work = self.cells, self.cells.work
        listed = np.flatnonzero(np.isin(cells.code, TRANSFERS))
        where = np.full((len(OPS), num_stages, num_microbatches), -1, dtype=np.int64)
        inside = (cells.stage[listed] < num_stages) & (cells.microbatch[listed] < num_microbatches)
        if not inside.all():
            raise NotCompilable
        where[cells.code[listed], cells.stage[listed], cells.microbatch[listed]] = listed
        made, microbatch = work.code[self.producer], work.microbatch[self.producer]
        sent = where[_SEND[made], work.stage[self.producer], microbatch]
        received = where[_RECV[made], work.stage[self.consumer], microbatch]
        every_one = len(listed) == 2 * len(sent) == np.count_nonzero(where >= 0)
        if not every_one or np.any((sent < 0) | (received < 0)):
            raise NotCompilable
        placed = (cells.rank[sent] == self.source) & (cells.rank[received] == self.target)
        in_time = (cells.follows[sent] >= self.made_by) & (cells.follows[received] < self.taken_by)
        edge = self.source * cells.num_ranks + self.target
        if not np.all(placed & in_time) or np.any(np.lexsort((sent, edge)) != np.lexsort((received, edge))):
            raise NotCompilable
        self.sent = sent
        return self.behind(sent), self.behind(received), sent

    def blocking(self, posted: tuple[Ints, Ints, Ints] | None) -> None:
        """Put a send behind every producer, or where it is spelled out, and a receive before every consumer.

        As in a lowered program, activations leave an overlapped pair before gradients, and an edge's messages are
        received in the order in which they are sent: one that is sent early and taken up late is received early.
        """
        sent_after, _, order = posted or (self.made_by, self.made_by, self.forward_first)
        crossing, nothing = np.argsort(order, kind="stable"), np.full(len(order), -1)
        # Nodes of one key keep the order in which they are added.
        self.node, self.recv_node = nothing.copy(), nothing.copy()
        self.node[crossing] = self.add(self.source[crossing], sent_after[crossing] * 4 + 3, nothing, nothing)
        taken_by = self.taken_by.copy()
        crossing = np.lexsort((order, self.target, self.source))
        edge = (self.source * self.cells.num_ranks + self.target)[crossing]
        for messages in np.split(crossing, np.flatnonzero(np.diff(edge)) + 1):
            taken_by[messages] = np.minimum.accumulate(taken_by[messages][::-1])[::-1]
        key = taken_by[crossing] * 4
        self.recv_node[crossing] = self.add(self.target[crossing], key, self.node[crossing], crossing)
        self._post_exchanges_behind(sent_after, order, self.exchanges if posted else self.posted_after * 2 + 2)

    def _post_exchanges_behind(self, sent_after: Ints, order: Ints, before: Ints) -> None:
        """Let exchanges be posted behind the sends that stand before them, which hold the rank."""
        by_order = np.argsort(order, kind="stable")
        place = np.searchsorted(order[by_order], before) - 1
        for at in np.flatnonzero(place >= 0).tolist():
            send = by_order[place[at]]
            if sent_after[send] == self.posted_after[at]:
                self.posted_after[at] = self.node[send]

    def exchange(self) -> None:
        """Add the gradient exchanges: each waits for its own rank and, where the stage has a copy, for the copy's.

        The n-th exchange of a stage on one rank meets the n-th on the other; the n-th UPDATE waits for it.
        """
        cells, work = self.cells, self.cells.work
        stage, rank = cells.stage[self.exchanges].tolist(), cells.rank[self.exchanges].tolist()
        behind = self.behind(self.exchanges)
        follows = np.where(behind == cells.follows[self.exchanges], self.posted_after, behind)
        turns = Turns()
        turn_of = [turns.next(*key) for key in zip(rank, stage, strict=True)]
        posted = {key: at for at, key in enumerate(zip(rank, stage, turn_of, strict=True))}
        partner = np.full(len(stage), -1)
        for (on_rank, of_stage, turn), at in posted.items():
            others = [posted[one, of_stage, turn] for one in range(cells.num_ranks) if (one, of_stage, turn) in posted]
            met = [other for other in others if rank[other] != on_rank]
            if met:
                partner[at] = follows[met[0]]
        number, nothing = self.num_chains + np.arange(len(stage)), np.full(len(stage), -1)
        self.num_chains += len(stage)
        self.add(number, np.zeros(len(stage), dtype=np.int64), partner, nothing)
        self.exchange_node = self.add(number, np.ones(len(stage), dtype=np.int64), follows, nothing)
        self.await_exchanges(posted)
        if not posted:
            return
        turns = Turns()
        for update in np.flatnonzero(work.code == CODE[Op.UPDATE]).tolist():
            key = (int(work.rank[update]), int(work.stage[update]))
            place = posted.get((*key, turns.next(*key)))
            if place is not None:
                self.need[0][work.node[update]] = self.exchange_node[place]

    def await_exchanges(self, posted: dict[tuple[int, int, int], int]) -> None:
        """Let the n-th WAIT for a stage's exchange wait for its rank's n-th."""
        cells, turns = self.cells, Turns()
        for at, wait in enumerate(self.waits.tolist()):
            if cells.code[wait] == CODE[Op.WAIT_REDUCE_GRAD]:
                key = int(cells.rank[wait]), int(cells.stage[wait])
                place = posted.get((*key, turns.next(*key)))
                if place is None or self.exchanges[place] > wait:
                    raise NotCompilable
                self.awaited[at] = self.exchange_node[place]

    def build(self, messages: Messages, num_stages: int, num_microbatches: int, plain: bool) -> Graph:
        """Give every node its number, chain by chain, and return the graph."""
        chain_number, key, need, crossing = (
            np.concatenate(parts) if len(parts) > 1 else parts[0]
            for parts in (self.chain, self.key, self.need, self.crossing)
        )
        # One more than there are nodes, so that -1 stays -1.
        new = np.arange(self.num_nodes + 1)
        new[-1] = -1
        if self.num_nodes > len(self.cells.timed_rank):
            order = np.lexsort((key, chain_number))
            new[order] = np.arange(self.num_nodes)
            chain_number, need, crossing = chain_number[order], new[need[order]], crossing[order]
        counts = np.bincount(chain_number, minlength=self.num_chains)
        last = np.cumsum(counts)
        before = np.arange(-1, self.num_nodes - 1)
        before[(last - counts)[counts > 0]] = -1
        cells, work = self.cells, self.cells.work
        timed = new[: len(cells.timed_rank)]
        bounds = np.searchsorted(cells.timed_rank, np.arange(1, cells.num_ranks))
        return Graph(
            messages,
            cells.num_ranks,
            num_stages,
            num_microbatches,
            self.num_nodes,
            tuple(zip((last - counts).tolist(), last.tolist(), strict=True)),
            before,
            need,
            crossing,
            tuple(np.split(timed, bounds)),
            Work(work.stage, work.code, work.microbatch, new[work.node], work.rank),
            Crossings(self.producer, self.consumer, self.source, self.target, new[self.node], new[self.recv_node]),
            Exchanges(cells.stage[self.exchanges], cells.rank[self.exchanges], new[self.exchange_node]),
            Waits(cells.rank[self.waits], new[self.gate], new[self.awaited], cells.follows[self.waits]),
            plain,
        )
