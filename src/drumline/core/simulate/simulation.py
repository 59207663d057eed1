"""What the simulator returns: a timeline that knows its costs, and computes the rest when it is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.clock.evaluate import evaluate, starts_of
from drumline.core.costs import Costs
from drumline.core.graph import OPS, Columns, Floats, Ints, Messages, Number, TimeGraph
from drumline.core.memory import Holding, holdings
from drumline.core.program import Program
from drumline.core.simulate.durations import (
    all_alike,
    lags,
    level_work,
    message_bytes,
    node_seconds,
    sums,
    work_seconds,
)
from drumline.core.simulate.walks import critical_nodes, peak_queues, peak_receive_bytes
from drumline.core.timeline.attribute import attribute
from drumline.core.timeline.causes import Arrivals, Times, causes_of
from drumline.core.timeline.idle import Idle, Limit
from drumline.core.timeline.spans import Span, SpanLane, Track, Transfer
from drumline.core.timeline.timeline import Timeline


@dataclass(frozen=True, eq=False, repr=False)
class Simulation(Timeline):
    """A computed timeline: it knows its costs, and from them messages, memory and a balanced twin.

    `ended` and `lag` belong to the graph's nodes. `work` is the seconds of the plain actions, if the costs alone do not
    define them. `weighed` is what ranks were measured to hold. Everything else is computed on demand.
    """

    program: Program
    costs: Costs
    graph: TimeGraph
    ended: Floats
    lag: Floats | None
    limit: Limit | None = None
    work: Floats | None = None
    weighed: Sequence[Holding] | None = None

    @cached_property
    def started(self) -> Floats:
        """The nodes' starts."""
        return starts_of(self.graph, self.ended, self.lag)

    @cached_property
    def starts(self) -> list[float]:
        """The nodes' starts, as plain numbers."""
        times: list[float] = self.started.tolist()
        return times

    @cached_property
    def ends(self) -> list[float]:
        """The nodes' ends, as plain numbers."""
        times: list[float] = self.ended.tolist()
        return times

    @cached_property
    def tracks(self) -> Sequence[Track]:
        """Every rank's timed actions."""
        rows = zip(self.program.timed_rows, self.graph.action_nodes, strict=True)
        return [Track(row, self.started[nodes].tolist(), self.ended[nodes].tolist()) for row, nodes in rows]

    @cached_property
    def columns(self) -> Columns:
        """The tracks' actions as arrays."""
        return self.program.timed_columns

    @cached_property
    def exchanges(self) -> Sequence[Span]:
        """The gradient exchanges."""
        return self._of_exchanges(self.graph.exchanges.node)

    @cached_property
    def packing(self) -> Sequence[Span]:
        """The spans in which copying a stage's gradients together, for their exchange, kept a rank from computing."""
        return [span for span in self._of_exchanges(self.graph.exchanges.packed) if span.end > span.start]

    def _of_exchanges(self, nodes: Ints) -> list[Span]:
        columns = self.graph.exchanges.rank, self.graph.exchanges.stage, nodes
        return [
            Span(rank, Action(stage, Op.REDUCE_GRAD), self.starts[node], self.ends[node], SpanLane.EXCHANGE)
            for rank, stage, node in zip(*(column.tolist() for column in columns), strict=True)
        ]

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds each rank computed."""
        times, lengths = self.times, self.graph.work.lengths
        each = zip(sums(times.ends, lengths), sums(times.starts, lengths), strict=True)
        return tuple(ends - starts for ends, starts in each)

    @cached_property
    def span(self) -> float:
        """The longest rank's own first start to last end."""
        longest = 0.0
        for nodes in self.graph.action_nodes:
            starts, ends = self.started[nodes], self.ended[nodes]
            works = np.flatnonzero(ends > starts)
            if len(works):
                longest = max(longest, float(ends[-1] - starts[works[0]]))
        return longest

    @cached_property
    def start(self) -> float:
        """When the first action starts."""
        first = np.array([nodes[0] for nodes in self.graph.action_nodes if len(nodes)], dtype=np.int64)
        if "started" in self.__dict__:
            return float(self.started[first].min()) if len(first) else 0.0
        return float(starts_of(self.graph, self.ended, self.lag, first).min()) if len(first) else 0.0

    @cached_property
    def end(self) -> float:
        """When the last action, message or exchange ends."""
        return float(self.ended.max(initial=0.0))

    @cached_property
    def transfers(self) -> Sequence[Transfer]:
        """The messages between ranks."""
        graph = self.graph
        crossings, work = graph.crossings, graph.work
        producer_nodes, taken = graph.node[crossings.producer], graph.node[crossings.consumer]
        action = work.stage[crossings.producer], work.code[crossings.producer]
        numbers = crossings.node, producer_nodes, taken, *action, crossings.source, crossings.target
        columns = (column.tolist() for column in (*numbers, message_bytes(graph, self.costs)))
        transfers = []
        for microbatch, node, maker, taker, stage, code, source, target, size in zip(
            work.numbers(work.microbatch[crossings.producer]), *columns, strict=True
        ):
            finished = self.ends[maker]
            start, sent = (finished, finished) if node < 0 else (self.starts[node], self.ends[node])
            arrived = sent + self.costs.edge(source, target).latency
            message = rules.message(Action(stage, OPS[code], microbatch), self.program.num_stages)
            assert message is not None
            transfers.append(Transfer(message.send, source, target, finished, start, arrived, self.starts[taker], size))
        return transfers

    @cached_property
    def peak_queues(self) -> dict[tuple[int, int], int]:
        """Per edge, how many messages were made and not yet used at once."""
        return peak_queues(self.graph, self.started, self.ended)

    @cached_property
    def peak_receive_bytes(self) -> tuple[float, ...]:
        """The most message bytes each rank had arriving or waiting, in addition to what it holds."""
        return peak_receive_bytes(self.graph, self.started, self.ended, self.costs)

    @cached_property
    def critical_path(self) -> tuple[Span, ...]:
        """The chain of spans that determines the makespan, in order."""
        nodes = critical_nodes(self.graph, self.started, self.ended)
        if nodes is None:
            return super().critical_path
        work, places = self.graph.work, nodes.tolist()
        columns = (column[nodes].tolist() for column in (work.rank, work.stage, work.code))
        numbers = work.numbers(work.microbatch[nodes])
        return tuple(
            Span(rank, Action(stage, OPS[code], microbatch), float(self.started[node]), float(self.ended[node]))
            for node, rank, stage, code, microbatch in zip(places, *columns, numbers, strict=True)
        )

    @cached_property
    def latest_inputs(self) -> Sequence[Sequence[tuple[int, int]]]:
        """Per rank, where the latest input of each timed action ran: (rank, index there), both -1 if it had none."""
        graph, crossings, actions = self.graph, self.graph.crossings, self.graph.action_nodes
        index_of = np.full(graph.num_nodes, -1)
        index_of[np.concatenate(actions)] = np.concatenate([np.arange(len(nodes)) for nodes in actions])
        producers, consumers = graph.node[crossings.producer], graph.node[crossings.consumer]
        # If there are several inputs, the last one written counts: the one that ended last.
        order = np.lexsort((index_of[producers], crossings.source, self.ended[producers]))
        rank, index = np.full((2, graph.num_nodes), -1)
        rank[consumers[order]] = crossings.source[order]
        index[consumers[order]] = index_of[producers[order]]
        return [list(zip(rank[nodes].tolist(), index[nodes].tolist(), strict=True)) for nodes in actions]

    @cached_property
    def awaited(self) -> dict[tuple[int, int], Span]:
        r"""The send or exchange that each action had to wait for at a WAIT, by rank and index among the timed actions.

        In 0F0,0SEND_F0,0WAIT_SEND_F0,0F1 rank 0 computes 0F1 only after rank 1 has received 0F0's output.

        >>> from drumline.core.simulate.simulate import simulate
        >>> rows = "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1\n1RECV_F0,1F0,1RECV_F1,1F1"
        >>> simulate(Program.parse(rows), Costs(message_bytes=2, bytes_per_second=1)).awaited
        {(0, 1): Span(rank=0, action=0SEND_F0, start=1.0, end=3.0, lane=<SpanLane.TRANSFER: 'transfer'>)}
        """
        graph, waits = self.graph, self.graph.waits
        entries: dict[tuple[int, int], Span] = {}
        if not len(waits.node):
            return entries
        spans = dict(zip(graph.exchanges.node.tolist(), self.exchanges, strict=True))
        for node, sent in zip(graph.crossings.node.tolist(), self.transfers, strict=True):
            spans[node] = Span(sent.source, sent.action, self.starts[node], self.ends[node], SpanLane.TRANSFER)
        first = np.cumsum([0, *(len(nodes) for nodes in graph.action_nodes)]).tolist()
        columns = (column.tolist() for column in (waits.rank, waits.node, waits.awaited, waits.follows))
        for rank, node, needed, follows in zip(*columns, strict=True):
            index, track = max(follows + 1 - first[rank], 0), self.tracks[rank]
            if needed < 0 or index == len(track.starts):
                continue
            free = track.ends[index - 1] if index else self.start
            if free < self.ends[node] == track.starts[index]:
                entries[rank, index] = spans[needed]
        return entries

    def awaited_before(self, rank: int, index: int) -> Span | None:
        """Return the send or exchange that a WAIT or an UPDATE at (rank, index) waited for, if any."""
        return self.awaited.get((rank, index)) or super().awaited_before(rank, index)

    @cached_property
    def occupied(self) -> Sequence[Sequence[Span]]:
        """Per rank, the spans in which moving a message, or copying gradients together, kept it from computing."""
        crossings = self.graph.crossings
        spans = [[span for span in self.packing if span.rank == rank] for rank in range(self.num_ranks)]
        if self.graph.messages is Messages.BLOCKING:
            for index, transfer in enumerate(self.transfers):
                recv = rules.message_of(transfer.action).recv
                for rank, action, node in (
                    (transfer.source, transfer.action, int(crossings.node[index])),
                    (transfer.target, recv, int(crossings.recv_node[index])),
                ):
                    spans[rank].append(Span(rank, action, self.starts[node], self.ends[node], SpanLane.TRANSFER))
        return [sorted(row, key=lambda span: (span.start, span.end)) for row in spans]

    @cached_property
    def memory(self) -> Sequence[Holding]:
        """Per rank, what it holds after each start and end."""
        return holdings(self.program, self.costs) if self.weighed is None else self.weighed

    @cached_property
    def causes(self) -> Sequence[Idle]:
        """Every idle interval with its cause; they sum to `idle`."""
        graph = self.graph
        is_plain = not (self.limit or len(graph.waits.node) or self._exchanges_matter)
        if not is_plain or graph.messages is Messages.BLOCKING or not all(graph.work.lengths):
            return attribute(self, self.limit)
        maker = graph.need
        if graph.messages is not Messages.LATENCY or not graph.only_work:
            maker = np.full(len(graph.node), -1, dtype=Number)
            maker[graph.crossings.consumer] = graph.crossings.producer
        times, twin = self.times, self.balanced
        last = np.cumsum(graph.work.lengths) - 1
        arrivals = Arrivals(maker, int(last[times.ends[last].argmax()]))
        return causes_of(graph.work, times, arrivals, twin.times if isinstance(twin, Simulation) else None)

    @property
    def _exchanges_matter(self) -> bool:
        """Whether exchanges take time, or an optimizer step waits for one."""
        graph = self.graph
        nodes = np.concatenate((graph.exchanges.node, graph.exchanges.packed))
        if len(nodes) == 0:
            return False
        return Op.UPDATE in graph.work.ops or bool((self.ended[nodes] > self.started[nodes]).any())

    @property
    def times(self) -> Times:
        """The times of all timed actions as arrays; an overlapped pair is one action."""
        if self.graph.only_work:
            return Times(self.started, np.ascontiguousarray(self.ended), self.start, self.end)
        nodes = np.concatenate(self.graph.action_nodes)
        return Times(self.started[nodes], self.ended[nodes], self.start, self.end)

    @cached_property
    def balanced(self) -> Timeline | None:
        """The same program and work, as if all stages and microbatches cost the same; None if they do."""
        if self.work is None and all_alike(self.graph, self.costs):
            return None
        seconds = work_seconds(self.graph, [self.costs])[:, 0] if self.work is None else self.work
        level = level_work(self.graph, seconds)
        if bool((np.abs(level - seconds) <= 1e-12 * np.abs(seconds)).all()):
            return None
        return simulation_of(self.program, self.costs, self.graph, node_seconds(self.graph, self.costs, level))


def simulation_of(
    program: Program, costs: Costs, graph: TimeGraph, seconds: Floats, limit: Limit | None = None
) -> Simulation:
    """Return the timeline of a graph whose nodes take these seconds."""
    late = lags(graph, [costs], seconds[:, None])
    lag = None if late is None else late[:, 0]
    return Simulation(program, costs, graph, evaluate(graph, seconds, lag), lag, limit)
