"""A program compiled to arrays: nodes that take time, and what each of them waits for.

Nodes come in chains, one per rank's row, per link, per gradient exchange. A node waits for the one before it in its
chain and for at most one other, so its end is one line of arithmetic:

    end[i] = max(end[i - 1], end[need[i]] + lag[i]) + seconds[i]

Where an action needs two others (an overlapped pair, a message whose receive must be posted), a gate that takes no time
stands before it and waits for the first. Index -1 is the start of time. Who needs whom comes from `rules`.

    messages    nodes beside the actions                   a consumer waits for
    LATENCY     none                                       its producer, plus the edge's latency
    LINKS       one per message, chained per link          its message, plus the edge's latency
    BLOCKING    a send and a receive inside the rows       the receive just before it
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain

import numpy as np
import numpy.typing as npt

from drumline.core import rules
from drumline.core.action import TIMED_OPS, Op
from drumline.core.program import Program

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

OPS = tuple(Op)
CODE: dict[Op, int] = {op: code for code, op in enumerate(OPS)}
_TIMED = np.array([op in TIMED_OPS for op in OPS])
# Places of the compute ops in a small table of their own; the others have none.
_PLACE = np.array([list(rules.NEEDS).index(op) if op in rules.NEEDS else -1 for op in OPS])
_SENDS, _RECVS = (CODE[Op.SEND_F], CODE[Op.SEND_B]), (CODE[Op.RECV_F], CODE[Op.RECV_B])


class Messages(Enum):
    """How messages between ranks are modelled."""

    LATENCY = auto()
    LINKS = auto()
    BLOCKING = auto()


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
class Graph:
    """The compiled form. `chains` bound consecutive nodes; the first ones are the ranks' rows."""

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


def compile_program(program: Program, messages: Messages) -> Graph:
    r"""Return the program's graph, compiled once per kind of messages; raise NotCompilable if a rule is broken.

    >>> compile_program(Program.parse("0F0,0B0\n1F0,1B0"), Messages.LATENCY).num_nodes
    4
    """
    cache = program.compiled
    if messages not in cache:
        cache[messages] = _compile(program, messages)
    graph = cache[messages]
    assert isinstance(graph, Graph)
    return graph


@dataclass(frozen=True, slots=True)
class _Cells:
    """The rows' actions as arrays: timed ones are numbered through, the others know which timed one they follow."""

    num_ranks: int
    timed_rank: Ints
    work: Work
    stage: Ints
    code: Ints
    microbatch: Ints
    rank: Ints
    follows: Ints

    @staticmethod
    def of(program: Program) -> _Cells:
        actions = list(chain.from_iterable(program.rows))
        count = len(actions)
        stage = np.fromiter([action.stage for action in actions], np.int64, count)
        code = np.fromiter([CODE[action.op] for action in actions], np.int64, count)
        numbers = [action.microbatch for action in actions]
        if None in numbers:
            numbers = [-1 if number is None else number for number in numbers]
        microbatch = np.fromiter(numbers, np.int64, count)
        rank = np.repeat(np.arange(program.num_ranks), [len(row) for row in program.rows])
        timed = _TIMED[code]
        number = np.cumsum(timed) - 1
        columns = [stage, code, microbatch, number, rank]
        other = np.flatnonzero(~timed)
        fused = np.flatnonzero(code == CODE[Op.OVERLAP])
        if len(other) or len(fused):
            plain = np.flatnonzero(timed & (code != CODE[Op.OVERLAP]))
            columns = [column[plain] for column in columns]
        if len(fused):
            halves = [
                (part.stage, CODE[part.op], -1 if part.microbatch is None else part.microbatch, number[at], rank[at])
                for at in fused
                for part in actions[at].parts
            ]
            columns = [np.append(a, b) for a, b in zip(columns, np.array(halves).T, strict=True)]
        first = np.searchsorted(rank[timed], np.arange(program.num_ranks))
        follows = np.where(number[other] >= first[rank[other]], number[other], -1)
        return _Cells(
            program.num_ranks,
            rank[timed],
            Work(*columns),
            stage[other],
            code[other],
            microbatch[other],
            rank[other],
            follows,
        )


def _compile(program: Program, messages: Messages) -> Graph:
    cells = _Cells.of(program)
    work = cells.work
    num_stages, num_microbatches = int(work.stage.max(initial=-1)) + 1, int(work.microbatch.max(initial=-1)) + 1
    producer = _producers(work, num_stages, num_microbatches)
    consumer = np.flatnonzero(producer >= 0)
    crosses = work.rank[producer[consumer]] != work.rank[consumer]
    local, remote = consumer[~crosses], consumer[crosses]
    if np.any(work.node[producer[local]] >= work.node[local]):
        raise NotCompilable

    assembly = _Assembly(cells, producer[remote], remote)
    spelled = bool(np.isin(cells.code, _SENDS + _RECVS).any())
    posted = assembly.posted(num_stages, num_microbatches) if spelled else None
    if messages is Messages.BLOCKING:
        assembly.blocking()
    elif messages is Messages.LINKS or spelled:
        assembly.links(posted)
        messages = Messages.LINKS
    else:
        assembly.latency()
    assembly.exchange()
    return assembly.build(messages, num_stages, num_microbatches)


def _producers(work: Work, num_stages: int, num_microbatches: int) -> Ints:
    """Return, per plain action, which other makes its input from a neighbouring stage (-1: none is needed).

    Checks along the way what the simulator relies on: nothing missing or twice, own-stage inputs earlier in the row.
    """
    place = _PLACE[work.code]
    computing = np.flatnonzero(place >= 0)
    if len(computing) < num_stages * num_microbatches or np.any(work.microbatch[computing] < 0):
        raise NotCompilable
    size = num_stages * num_microbatches
    where = np.full(len(rules.NEEDS) * size, -1, dtype=np.int64)
    home = (place * size + work.stage * num_microbatches + work.microbatch)[computing]
    where[home] = computing
    if np.count_nonzero(where >= 0) != len(computing) or np.count_nonzero(place == _PLACE[CODE[Op.FORWARD]]) != size:
        raise NotCompilable
    producer = np.full(len(work.code), -1, dtype=np.int64)
    for op, needed in rules.NEEDS.items():
        consumers = np.flatnonzero(place == _PLACE[CODE[op]])
        for need in needed if len(consumers) else ():
            stage = work.stage[consumers] + need.stage_offset
            inside = (stage >= 0) & (stage < num_stages)
            at, stage = consumers[inside], stage[inside]
            pair = stage * num_microbatches + work.microbatch[at]
            found = where[_PLACE[CODE[need.ops[0]]] * size + pair]
            for other in need.ops[1:]:
                found = np.maximum(found, where[_PLACE[CODE[other]] * size + pair])
            if np.any(found < 0):
                raise NotCompilable
            if need.stage_offset:
                producer[at] = found
            elif np.any((work.rank[found] != work.rank[at]) | (work.node[found] >= work.node[at])):
                raise NotCompilable
    return producer


class _Assembly:
    """Collects nodes as (chain, key inside it, need, crossing), then numbers them chain by chain.

    The timed actions come first, as nodes 0, 1, ... of their rows; until `build` every need is an index in this order.
    """

    def __init__(self, cells: _Cells, producer: Ints, consumer: Ints) -> None:
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
            again = np.setdiff1d(crossing, first)
            self.add(self.target[again], self.taken_by[again] * 4 + 1, need[again], again)

    def latency(self) -> None:
        self.take(self.made_by)

    def links(self, posted: tuple[Ints, Ints, Ints] | None) -> None:
        forward_first = self.made_by * 2 + (self.cells.work.code[self.producer] != CODE[Op.FORWARD])
        sent_after, received_after, order = posted or (self.made_by, np.full(len(self.made_by), -1), forward_first)
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
        listed = np.flatnonzero(np.isin(cells.code, _SENDS + _RECVS))
        where = np.full((len(OPS), num_stages, num_microbatches), -1, dtype=np.int64)
        inside = (cells.stage[listed] < num_stages) & (cells.microbatch[listed] < num_microbatches)
        if not inside.all():
            raise NotCompilable
        where[cells.code[listed], cells.stage[listed], cells.microbatch[listed]] = listed
        backward = (work.code[self.producer] != CODE[Op.FORWARD]).astype(np.int64)
        microbatch = work.microbatch[self.producer]
        sent = where[np.array(_SENDS)[backward], work.stage[self.producer], microbatch]
        received = where[np.array(_RECVS)[backward], work.stage[self.consumer], microbatch]
        every_one = len(listed) == 2 * len(sent) == np.count_nonzero(where >= 0)
        if not every_one or np.any((sent < 0) | (received < 0)):
            raise NotCompilable
        placed = (cells.rank[sent] == self.source) & (cells.rank[received] == self.target)
        in_time = (cells.follows[sent] >= self.made_by) & (cells.follows[received] < self.taken_by)
        edge = self.source * cells.num_ranks + self.target
        if not np.all(placed & in_time) or np.any(np.lexsort((sent, edge)) != np.lexsort((received, edge))):
            raise NotCompilable
        return cells.follows[sent], cells.follows[received], sent

    def blocking(self) -> None:
        nothing = np.full(len(self.producer), -1)
        self.node = self.add(self.source, self.made_by * 4 + 3, nothing, nothing)
        self.recv_node = self.add(self.target, self.taken_by * 4, self.node, np.arange(len(nothing)))

    def exchange(self) -> None:
        """Add the gradient exchanges: each waits for its own rank and, where the stage has a copy, for the copy's."""
        stage, follows = self.cells.stage[self.exchanges], self.cells.follows[self.exchanges]
        partner = np.full(len(stage), -1)
        for one in np.unique(stage):
            copies = np.flatnonzero(stage == one)
            if len(copies) > 2:
                raise NotCompilable
            partner[copies] = follows[copies[::-1]]
        number, nothing = self.num_chains + np.arange(len(stage)), np.full(len(stage), -1)
        self.num_chains += len(stage)
        self.add(number, np.zeros(len(stage), dtype=np.int64), partner, nothing)
        self.exchange_node = self.add(number, np.ones(len(stage), dtype=np.int64), follows, nothing)

    def build(self, messages: Messages, num_stages: int, num_microbatches: int) -> Graph:
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
        )
