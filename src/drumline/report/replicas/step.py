"""Simulate one step of many copies of a pipeline, whose copies of a stage exchange gradients at the end.

    replica 0   rank 0  |F0 F1 .. B0 B1 ....|exchange|      an exchange starts when the last copy of the stage is ready
                rank 1  |.. F0 B0 F1 B1|...|exchange|..|
    replica 1   rank 0  |F0 F1 ... B0 B1 ...|exchange|
                rank 1  |.. F0 B0 . F1 B1|.|exchange|..|

Every copy runs the same compiled program with factors of its own, one copy after the other, so that memory does not
grow with their number. A rank's exchanges go one after the other.

After its last action a rank waits for the slowest copy of its stages (`replicas`), exchanges gradients (`exchange`),
and drains. Imbalance is what the program idles beyond the same program with every action at the mean of its op, and
every link at its given latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from drumline.core.clock.evaluate import evaluate, starts_of
from drumline.core.costs import Costs
from drumline.core.errors import CostsError, ProgramError
from drumline.core.graph import Floats, Ints, Messages, NotCompilable, TimeGraph
from drumline.core.program import Program
from drumline.core.simulate.durations import level_work, work_seconds
from drumline.core.simulate.simulate import compiled, invalid
from drumline.core.timeline.causes import CAUSES, Arrivals, Causes, Times, causes_of
from drumline.core.timeline.idle import Cause
from drumline.report.replicas.spread import FactorDraws, Spread

# Why a rank idles: causes of a single pipeline, and those of many.
REASONS = (Cause.FILL, Cause.WAIT, Cause.IMBALANCE, Cause.TRANSFER, "replicas", "exchange", Cause.DRAIN)
_REPLICAS, _EXCHANGE, _DRAIN = (REASONS.index(reason) for reason in ("replicas", "exchange", Cause.DRAIN))
MAX_RANKS = 1_000_000


@dataclass(frozen=True, slots=True)
class SlowLink:
    """The link between two ranks of one replica for which ranks waited longest, and how slow it is."""

    replica: int
    source: int
    target: int
    latency: float
    waited: float


@dataclass(frozen=True, eq=False, repr=False)
class ReplicaStep:
    """What the step took; `idle` is seconds by (reason, replica, rank), the reasons as in `REASONS`."""

    program: Program
    makespan: float
    ends: Floats  # of every replica's own pipeline
    busy: Floats  # by (replica, rank)
    idle: Floats
    slowest: SlowLink | None

    @property
    def num_replicas(self) -> int:
        """How many copies of the pipeline there are."""
        return len(self.ends)

    @property
    def num_ranks(self) -> int:
        """How many ranks all copies have together."""
        return self.num_replicas * self.program.num_ranks

    @property
    def num_actions(self) -> int:
        """How many actions all copies run."""
        return self.num_replicas * self.program.num_actions

    @property
    def bubble(self) -> float:
        """The share of all ranks' time that is idle."""
        return 1 - float(self.busy.sum()) / (self.num_ranks * self.makespan) if self.makespan > 0 else 0.0

    @property
    def straggler(self) -> int:
        """The replica whose pipeline ends last."""
        return int(self.ends.argmax())

    @property
    def idle_shares(self) -> dict[str, float]:
        """The share of all ranks' time that each reason takes; they sum to the bubble."""
        whole = self.num_ranks * self.makespan or 1.0
        return {str(reason): float(self.idle[at].sum()) / whole for at, reason in enumerate(REASONS)}

    def summary(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        slowest = self.slowest
        link = {name: getattr(slowest, name) for name in SlowLink.__slots__} if slowest else None
        return {
            "schedule": self.program.name,
            "replicas": self.num_replicas,
            "ranks": self.program.num_ranks,
            "microbatches": self.program.num_microbatches,
            "slices": self.program.num_slices,
            "actions": self.num_actions,
            "makespan": self.makespan,
            "bubble": self.bubble,
            "idle_shares": self.idle_shares,
            "replica_makespans": self.ends.tolist(),
            "straggler": self.straggler,
            "slowest_link": link,
        }


def replicas(
    program: Program,
    costs: Costs | None = None,
    *,
    num_replicas: int,
    spread: Spread | float = 0.0,
    seed: int = 0,
) -> ReplicaStep:
    """Return one step of so many copies of a pipeline, simulated action by action.

    `spread` says how much seconds vary, as a relative standard deviation or with measured factors. `costs.reduce` is a
    stage's gradient exchange between all copies; it takes as long as the slowest of its links.

    >>> from drumline.schedules import generate
    >>> step = replicas(generate("1f1b", num_ranks=4, num_microbatches=8), Costs(reduce=2), num_replicas=3)
    >>> step.num_ranks, step.makespan, {reason: round(share, 3) for reason, share in step.idle_shares.items() if share}
    (12, 35.0, {'fill': 0.043, 'wait': 0.129, 'exchange': 0.057, 'drain': 0.086})
    """
    costs = costs or Costs()
    graph = _graph(program, costs, num_replicas)
    spread = spread if isinstance(spread, Spread) else Spread.log_normal(spread)
    draws, cluster = FactorDraws(spread, graph.work, seed), _Cluster.of(graph, costs, num_replicas)
    for replica in range(num_replicas):
        cluster.add(replica, draws)
    return cluster.finished(program, draws)


def _graph(program: Program, costs: Costs, num_replicas: int) -> TimeGraph:
    if num_replicas < 1 or num_replicas * program.num_ranks > MAX_RANKS:
        raise CostsError(
            f"{num_replicas} replicas of {program.num_ranks} ranks", expected=f"1 to {MAX_RANKS} ranks altogether"
        )
    if Messages.of(costs) is not Messages.LATENCY:
        raise CostsError("replicas need links without a bandwidth", fix="put what a message takes into comm or edges")
    try:
        graph = compiled(program, costs)
    except NotCompilable:
        raise invalid(program) from None
    if not graph.only_work or len(graph.exchanges.node) or program.num_updates or not all(graph.work.lengths):
        raise ProgramError(
            f"{program.name} overlaps actions, exchanges gradients or updates weights by itself",
            expected="a flushed program with one copy of each stage",
        )
    return graph


@dataclass
class _Cluster:
    """What is known of the replicas that have run; no array has an entry for every action of all."""

    graph: TimeGraph
    costs: Costs
    nominal: Floats
    twin: Times
    latency: Floats  # of every link
    ends: Floats
    own_ends: Floats
    ready: Floats
    busy: Floats
    idle: Floats
    waited: Floats
    link_factors: Floats

    @staticmethod
    def of(graph: TimeGraph, costs: Costs, num_replicas: int) -> _Cluster:
        nominal = work_seconds(graph, [costs])[:, 0]
        latency = np.array([costs.edge(*edge).latency for edge in graph.edges[0]]) if _is_late(costs) else np.empty(0)
        level, lag = level_work(graph, nominal), _lag(graph, latency)
        ended = np.ascontiguousarray(evaluate(graph, level, lag))
        twin = Times(starts_of(graph, ended, lag), ended, 0.0, float(ended.max()))
        shape, links = (num_replicas, graph.num_ranks), (num_replicas, len(latency))
        zeros = (np.zeros(num_replicas), np.zeros(shape), np.zeros((num_replicas, graph.num_stages)), np.zeros(shape))
        return _Cluster(
            graph,
            costs,
            nominal,
            twin,
            latency,
            *zeros,
            np.zeros((len(REASONS), *shape)),
            np.zeros(links),
            np.ones(links),
        )

    def add(self, replica: int, draws: FactorDraws) -> None:
        """Run one replica."""
        graph, work = self.graph, self.graph.work
        factors = draws.actions()
        seconds = self.nominal if factors is None else np.multiply(factors, self.nominal, out=factors)
        lag = None
        if len(self.latency):
            self.link_factors[replica] = draws.links(len(self.latency))
            lag = _lag(graph, self.latency * self.link_factors[replica])
        ended = np.ascontiguousarray(evaluate(graph, seconds, lag))
        first, last = graph.chains.T
        self.own_ends[replica] = ended[last - 1]
        self.ends[replica] = self.own_ends[replica].max()
        self.ready[replica] = ended[self.last_of_stage]
        self.busy[replica] = np.add.reduceat(seconds, first)
        # The end of the whole is not known yet: with the end of time at 0, no rank drains.
        times = Times(starts_of(graph, ended, lag), ended, 0.0, -math.inf)
        found_causes = causes_of(work, times, Arrivals(graph.need, -1), self.twin)
        for cause, seconds_by_rank in found_causes.seconds(graph.num_ranks).items():
            self.idle[REASONS.index(cause), replica] = seconds_by_rank
        if lag is not None:
            self.waited[replica] = self._by_link(found_causes)

    @cached_property
    def last_of_stage(self) -> Ints:
        """The last action of every stage."""
        last = np.zeros(self.graph.num_stages, dtype=np.int64)
        last[self.graph.work.stage] = np.arange(len(self.graph.work.stage))
        return last

    def _by_link(self, found_causes: Causes) -> Floats:
        """Return how long ranks waited for messages on their way, by link."""
        late: Ints = np.flatnonzero(found_causes.cause == CAUSES.index(Cause.TRANSFER))
        link = self.graph.node_edge[found_causes.before[late]]
        seconds = (found_causes.end - found_causes.start)[late]
        return np.bincount(link, seconds, len(self.latency)).astype(np.float64)

    def _exchanges(self, draws: FactorDraws) -> Iterator[list[tuple[float, float]]]:
        """Yield, rank by rank, when its exchanges start and end, the same in all replicas."""
        ready = self.ready.max(axis=0)
        takes = np.array(self.costs.per_stage("reduce", self.graph.num_stages))
        home = self.graph.work.rank[self.last_of_stage]
        # An exchange goes through all replicas, so it takes as long as over the slowest of its links.
        slow = np.array([draws.links(self.graph.num_ranks) for _ in self.ends]).max(axis=0)
        for rank in range(self.graph.num_ranks):
            spans, free = [], 0.0
            for stage in sorted(np.flatnonzero(home == rank).tolist(), key=ready.__getitem__):
                start = max(free, float(ready[stage]))
                free = start + float(takes[stage] * slow[rank])
                spans.append((start, free))
            yield spans

    def finished(self, program: Program, draws: FactorDraws) -> ReplicaStep:
        """Exchange the gradients, and return the whole step."""
        exchanges = list(self._exchanges(draws))
        makespan = max(float(self.ends.max()), *(end for spans in exchanges for _, end in spans))
        for rank, spans in enumerate(exchanges):
            idle_from = self.own_ends[:, rank]
            free = np.maximum(idle_from, spans[-1][1])
            moving = sum(np.maximum(end - np.maximum(idle_from, start), 0.0) for start, end in spans)
            self.idle[_EXCHANGE, :, rank] = moving
            self.idle[_REPLICAS, :, rank] = free - idle_from - moving
            self.idle[_DRAIN, :, rank] = makespan - free
        return ReplicaStep(program, makespan, self.ends, self.busy, self.idle, self._slowest())

    def _slowest(self) -> SlowLink | None:
        if not self.waited.any():
            return None
        replica, link = divmod(int(self.waited.argmax()), len(self.latency))
        latency = float(self.latency[link] * self.link_factors[replica, link])
        return SlowLink(replica, *self.graph.edges[0][link], latency, float(self.waited[replica, link]))


def _lag(graph: TimeGraph, latency: Floats) -> Floats | None:
    """Return how long after its need each action may start."""
    return np.append(latency, 0.0).take(graph.node_edge) if len(latency) else None


def _is_late(costs: Costs) -> bool:
    return costs.comm != 0 or any(edge.latency for edge in costs.edges.values())
