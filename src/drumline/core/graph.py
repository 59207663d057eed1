"""A program compiled to arrays: nodes that take time, and what each node waits for.

Nodes form chains: one per rank's row, per link, per gradient exchange. A node waits for the previous node in its chain
and for at most one other, so its end is one line of arithmetic:

    end[i] = max(end[i - 1], end[need[i]] + lag[i]) + seconds[i]

If an action needs two others (an overlapped pair, or a message whose receive must be posted), a gate before it takes no
time and waits for the first. A WAIT is also a gate: it sits in its row and waits for the message or the exchange.
Index -1 is the start of time. Dependencies come from `rules`.

    messages    nodes beside the actions                   a consumer waits for
    LATENCY     none                                       its producer, plus the edge's latency
    LINKS       one per message, chained per link          its message, plus the edge's latency
    BLOCKING    a send and a receive inside the rows       the receive before it

Rows of actions are stored as arrays. Code that looks at every action reads these, in a tenth of the time. For the row
0F0,(0F1;1B0)OVERLAP_F_B,0REDUCE_GRAD they are

    stage       0  0  1  0
    code        F  F  B  REDUCE_GRAD        an op's index in `OPS`
    microbatch  0  1  0 -1                  -1 if there is none
    cell        0  1  1  2                  the action's number, counted through all rows: halves of a pair share one

Where microbatches run in S slices, `microbatch` has the numbers of these: m*S + s is slice s of microbatch m.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from drumline.core import rules
from drumline.core.action import TIMED_OPS, TRANSFER_OPS, WAIT_OPS, Action, Op, in_units, overlap
from drumline.core.costs import Costs
from drumline.core.rules import Backward

Ints = npt.NDArray[np.signedinteger[Any]]
Floats = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Number = np.int32  # of actions, stages and microbatches: products of two may need more bits

OPS = tuple(Op)
CODE: dict[Op, int] = {op: code for code, op in enumerate(OPS)}
TIMED = np.array([op in TIMED_OPS for op in OPS])
# Indices of the compute ops in their own small table; other ops have none.
PLACE = np.array([list(rules.NEEDS).index(op) if op in rules.NEEDS else -1 for op in OPS], dtype=np.int64)
WAITS = tuple(sorted(CODE[op] for op in WAIT_OPS))
TRANSFERS = tuple(sorted(CODE[op] for op in TRANSFER_OPS))

_NUM_FIELDS = len(Action._fields)
# The codes of ops with one letter, by the letter's number.
_CODE_OF_LETTER = np.zeros(128, dtype=Number)
_CODE_OF_LETTER[[ord(op) for op in OPS if len(op) == 1]] = [CODE[op] for op in OPS if len(op) == 1]


@dataclass(frozen=True, slots=True)
class Columns:
    """Every plain action in the order of the rows, the halves of an overlapped pair side by side.

    `num_slices` says in how many slices each microbatch runs.
    """

    lengths: tuple[int, ...]
    stage: Ints
    code: Ints
    microbatch: Ints
    rank: Ints
    cell: Ints
    paired: Flags
    num_slices: int = 1

    @staticmethod
    def of(rows: Sequence[Sequence[Action]], num_slices: int = 1) -> Columns:
        """Convert rows to arrays.

        >>> Columns.of([[Action.parse("(0F1;1B0)OVERLAP_F_B"), Action.parse("0UNSHARD")]]).microbatch.tolist()
        [1, 0, -1]
        """
        lengths = tuple(map(len, rows))
        num_actions = sum(lengths)
        cell, paired = np.arange(num_actions, dtype=Number), np.zeros(num_actions, dtype=bool)
        # One look at each action: programs are larger than a processor's cache.
        fields: list[Any] = list(chain.from_iterable(chain.from_iterable(rows)))
        if any(pairs := fields[3::_NUM_FIELDS]):
            sizes = _column(map(len, pairs), num_actions)
            cell = np.repeat(cell, np.maximum(sizes, 1))
            paired = sizes[cell] > 0
            parts = chain.from_iterable(action.parts or (action,) for row in rows for action in row)
            fields = list(chain.from_iterable(parts))
        count, numbers = len(cell), fields[2::_NUM_FIELDS]
        if None in numbers:
            numbers = [-1 if number is None else number for number in numbers]
        return Columns(
            lengths,
            _column(fields[::_NUM_FIELDS], count),
            _codes(fields[1::_NUM_FIELDS]),
            _column(numbers, count),
            np.repeat(np.arange(len(lengths), dtype=Number), lengths)[cell],
            cell,
            paired,
            num_slices,
        )

    @staticmethod
    def plain(lengths: Sequence[int], stage: Ints, code: Ints, microbatch: Ints, num_slices: int = 1) -> Columns:
        """Return the arrays of rows of these lengths without overlapped pairs.

        >>> Columns.plain([1, 1], *np.array([[0, 1], [CODE[Op.FORWARD]] * 2, [0, 0]])).rows()
        ((0F0,), (1F0,))
        """
        rank = np.repeat(np.arange(len(lengths), dtype=Number), lengths)
        cell, paired = np.arange(len(code), dtype=Number), np.zeros(len(code), dtype=bool)
        stage, code, microbatch = (column.astype(Number, copy=False) for column in (stage, code, microbatch))
        return Columns(tuple(lengths), stage, code, microbatch, rank, cell, paired, num_slices)

    @staticmethod
    def spread(
        lengths: Sequence[int], numbers: npt.NDArray[Any], cell: npt.NDArray[Any], paired: Flags, num_slices: int = 1
    ) -> Columns:
        """Return the arrays of rows from the stages, codes and microbatches of all plain actions.

        >>> Columns.spread([1], np.array([[0, 1], [0, 1], [1, 0]]), np.array([0, 0]), np.array([True, True])).rows()
        (((0F1;1B0)OVERLAP_F_B,),)
        """
        stage, code, microbatch, cell = (column.astype(Number, copy=False) for column in (*numbers, cell))
        if not paired.any():
            return Columns.plain(lengths, stage, code, microbatch, num_slices)
        rank = np.repeat(np.arange(len(lengths), dtype=Number), lengths)[cell]
        return Columns(tuple(lengths), stage, code, microbatch, rank, cell, paired, num_slices)

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """Return the rows of actions that these arrays stand for."""
        ops, numbers = map(OPS.__getitem__, self.code.tolist()), self.numbers(self.microbatch)
        microbatches = [None if number < 0 else number for number in numbers] if -1 in numbers else numbers
        parts = zip(self.stage.tolist(), ops, microbatches, repeat(()), strict=False)
        actions = [tuple.__new__(Action, part) for part in parts]
        if self.paired.any():
            first = np.flatnonzero(self.heads & self.paired).tolist()
            for at in first:
                actions[at] = overlap(actions[at], actions[at + 1])
            actions = [actions[at] for at in np.flatnonzero(self.heads).tolist()]
        bounds = np.cumsum((0, *self.lengths)).tolist()
        return tuple(tuple(actions[low:high]) for low, high in pairwise(bounds))

    def numbers(self, microbatch: Ints) -> Sequence[int]:
        """Return numbers of microbatches or slices as they are written.

        >>> columns = Columns.of([[Action(0, Op.FORWARD, number) for number in range(4)]], num_slices=2)
        >>> list(map(str, columns.numbers(columns.microbatch[1:3])))
        ['0.1', '1.0']
        """
        return in_units(microbatch.tolist(), self.num_slices)

    def same(self, other: Columns) -> bool:
        """Whether the rows are the same."""
        names = ("stage", "code", "microbatch", "cell")
        return (self.lengths, self.num_slices) == (other.lengths, other.num_slices) and all(
            np.array_equal(getattr(self, name), getattr(other, name)) for name in names
        )

    @property
    def num_ranks(self) -> int:
        """How many rows there are."""
        return len(self.lengths)

    @property
    def ops(self) -> set[Op]:
        """The ops of the plain actions."""
        return {OPS[code] for code in np.flatnonzero(np.bincount(self.code)).tolist()}

    @property
    def position(self) -> Ints:
        """The action's position in its own row."""
        first = np.cumsum((0, *self.lengths), dtype=np.int64)
        return self.cell - first[self.rank]

    @property
    def heads(self) -> Flags:
        """Which entries begin a cell: all except the second halves of pairs."""
        return np.append(True, self.cell[1:] != self.cell[:-1])[: len(self.cell)]

    def by_stage(self, chosen: Ints | None = None) -> Iterator[tuple[tuple[int, int], Ints]]:
        """Yield every (rank, stage) with the indices of its entries: all of them, or only the chosen ones.

        >>> rows = [[Action.parse(text) for text in ("0F0", "1F0", "0F1")]]
        >>> [(key, entries.tolist()) for key, entries in Columns.of(rows).by_stage()]
        [((0, 0), [0, 2]), ((0, 1), [1])]
        """
        entries = np.arange(len(self.code)) if chosen is None else chosen
        entries = entries[np.lexsort((self.stage[entries], self.rank[entries]))]
        rank, stage = self.rank[entries], self.stage[entries]
        begins = np.flatnonzero((np.diff(rank, prepend=-1) != 0) | (np.diff(stage, prepend=-1) != 0))
        for at, each in zip(begins.tolist(), np.split(entries, begins[1:]), strict=False):
            yield (int(rank[at]), int(stage[at])), each

    def only(self, chosen: Flags) -> Columns:
        """Return the chosen entries, which must be whole actions, as if the rows contained nothing else."""
        if len(chosen) == np.count_nonzero(chosen):
            return self
        begins = self.heads[chosen]
        rank = self.rank[chosen]
        return Columns(
            tuple(np.bincount(rank[begins], minlength=self.num_ranks).tolist()),
            self.stage[chosen],
            self.code[chosen],
            self.microbatch[chosen],
            rank,
            np.cumsum(begins, dtype=Number) - Number(1),
            self.paired[chosen],
            self.num_slices,
        )

    @property
    def timed(self) -> Flags:
        """Which entries belong to actions that take time."""
        return TIMED[self.code] | self.paired

    def backwards(self, num_stages: int) -> tuple[Backward, ...]:
        """Return how much of its backward each stage runs, or would have to run for the program to be complete.

        >>> row = [Action.parse(text) for text in ("0F0", "1F0", "2F0", "2I0", "1B0")]
        >>> [str(kind) for kind in Columns.of([row]).backwards(num_stages=3)]
        ['none', 'whole', 'input']
        """
        there, stage = np.zeros((num_stages, len(OPS)), dtype=bool), self.stage
        if stage.min(initial=0) < 0:
            there[stage[stage >= 0], self.code[stage >= 0]] = True
        else:
            there[stage, self.code] = True
        whole = there[:, CODE[Op.BACKWARD]] | there[:, CODE[Op.BACKWARD_WEIGHT]]
        first = there[:, CODE[Op.BACKWARD_INPUT]]
        lowest = int(np.append(whole | first, True).argmax())
        lowest_whole = int(np.append(whole, True).argmax())
        alone = first & ~whole
        above = (alone[stage] and stage > lowest_whole for stage in range(lowest, num_stages))
        return (Backward.NONE,) * lowest + tuple(Backward.INPUT if passes else Backward.WHOLE for passes in above)


def _codes(ops: Sequence[Op]) -> Ints:
    letters = "".join(ops)
    if len(letters) == len(ops):
        return _CODE_OF_LETTER[np.frombuffer(letters.encode(), dtype=np.uint8)]
    return _column(map(CODE.__getitem__, ops), len(ops))


def _column(numbers: Iterable[int], count: int) -> Ints:
    listed = numbers if isinstance(numbers, list) else list(numbers)
    try:
        return np.fromiter(listed, Number, count)
    except OverflowError:  # nobody can time such a program, but the validator says why
        return np.fromiter(listed, np.int64, count)


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
    """The program breaks a rule; the validator says which one."""


class Crossings(NamedTuple):
    """The messages between ranks: who makes and uses them (as `work`), and their nodes, -1 if they have none.

    `node` is the transfer, or under BLOCKING the send; `recv_node` the receive.
    """

    producer: Ints
    consumer: Ints
    source: Ints
    target: Ints
    node: Ints
    recv_node: Ints


class Exchanges(NamedTuple):
    """The gradient exchanges: stage and rank of each, its node, and where its rank copies the gradients together."""

    stage: Ints
    rank: Ints
    packed: Ints
    node: Ints


class Waits(NamedTuple):
    """The WAITs: the rank of each, its node, the node it waits for (-1: none), and which timed action it follows.

    Timed actions are numbered through all rows; -1 is a WAIT before the first action of its row.
    """

    rank: Ints
    node: Ints
    awaited: Ints
    follows: Ints


@dataclass(frozen=True)
class TimeGraph:
    """The compiled form. `chains` bound consecutive nodes (first, one after last); the first are the ranks' rows.

    `work` are the plain actions that take time, and `node` is where each of them runs.

    If the program is not `plain`, compiling has not checked all of it, and the validator must.
    """

    messages: Messages
    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_nodes: int
    chains: Ints
    need: Ints
    crossing: Ints
    action_nodes: tuple[Ints, ...]
    work: Columns
    node: Ints
    crossings: Crossings
    exchanges: Exchanges
    waits: Waits
    plain: bool

    @staticmethod
    def of_plain(work: Columns, need: Ints, num_stages: int, num_microbatches: int, *, plain: bool) -> TimeGraph:
        """Return the graph of rows whose actions are its nodes; its messages are listed when somebody looks at them."""
        lengths = np.array(work.lengths, dtype=np.int64)
        last, nothing = np.cumsum(lengths), np.empty(0, dtype=Number)
        graph = object.__new__(TimeGraph)
        graph.__dict__.update(
            messages=Messages.LATENCY,
            num_ranks=len(lengths),
            num_stages=num_stages,
            num_microbatches=num_microbatches,
            num_nodes=len(need),
            chains=np.stack((last - lengths, last), axis=1),
            need=need,
            action_nodes=tuple(np.split(work.cell, last[:-1])),
            work=work,
            node=work.cell,
            exchanges=Exchanges(nothing, nothing, nothing, nothing),
            waits=Waits(nothing, nothing, nothing, nothing),
            plain=plain,
        )
        return graph

    def __getattr__(self, name: str) -> Any:
        if name not in ("crossing", "crossings") or "need" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        takers = np.flatnonzero(self.need >= 0).astype(Number)
        makers, nowhere = self.need[takers], np.full(len(takers), -1, dtype=Number)
        crossing = np.full(self.num_nodes, -1, dtype=Number)
        crossing[takers] = np.arange(len(takers), dtype=Number)
        ranks = self.work.rank[makers], self.work.rank[takers]
        self.__dict__.update(crossing=crossing, crossings=Crossings(makers, takers, *ranks, nowhere, nowhere))
        return self.__dict__[name]

    @cached_property
    def before(self) -> Ints:
        """The node before each in its chain, or -1."""
        before = np.arange(-1, self.num_nodes - 1, dtype=Number)
        first, last = self.chains.T
        before[first[first < last]] = -1
        return before

    @cached_property
    def only_work(self) -> bool:
        """Whether every node is one plain action, so that nodes and plain actions have the same numbers."""
        return self.node is self.work.cell or (self.num_nodes == len(self.node) and not self.work.paired.any())

    @cached_property
    def edges(self) -> tuple[list[tuple[int, int]], Ints]:
        """The directed links that messages use, and the link of each message."""
        source, target = self.crossings.source.astype(np.int64), self.crossings.target
        coded, which = np.unique(source * self.num_ranks + target, return_inverse=True)
        return [divmod(code, self.num_ranks) for code in coded.tolist()], which

    @cached_property
    def node_edge(self) -> Ints:
        """The link of the message that each node waits for; for none, the number of links."""
        edges, which = self.edges
        links: Ints = np.append(which, len(edges))[self.crossing]
        return links
