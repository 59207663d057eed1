"""What is searched, as flat lists: every action's seconds, what it waits for, and what it holds.

An action is a number, with four numbers per (stage, microbatch) pair:

    4 * (stage * M + microbatch) + op        op: 0 F, 1 I, 2 W, 3 B

A row is a list of such numbers. Memory depends on each row alone, whatever the times, so a limit is a property of rows;
times depend on all of them. I and B send the same message, so both use the entry of I for it.

Seconds and bytes come from the simulator's own graph of the simplest program, one microbatch after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from drumline.core import rules
from drumline.core.action import Action
from drumline.core.costs import Costs
from drumline.core.graph import Floats, Ints, Messages
from drumline.core.memory import Sizes
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.timeline.idle import Limit
from drumline.plan.search.bounds import entries

F, I, W, B = range(4)  # noqa: E741 - the letters the papers use

_NO_LIMIT = Limit()

Rows = list[list[int]]


@dataclass(frozen=True, slots=True)
class StageLane:
    """A stage on one rank, with the microbatches that pass through it there, in order."""

    rank: int
    stage: int
    microbatches: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Resource:
    """Something a rank holds: what each action adds while it runs and permanently, the constant part, and the limit.

    `always` is per rank. Sums follow the simulator's order, so that both agree to the last bit; `most` is what the
    limit allows, including rounding.
    """

    during: list[float]
    after: list[float]
    always: list[float]
    most: float


@dataclass(frozen=True)
class Instance:
    """Costs, placement and limit, expanded to one entry per action.

    >>> value = Instance(Costs(forward=[2, 1]), Placement.linear(2), num_microbatches=3)
    >>> value.num_actions, value.seconds[value.number(0, F, 2)], value.action(value.number(1, W, 2))
    (24, 2.0, 1W2)
    """

    costs: Costs
    placement: Placement
    num_microbatches: int
    limit: Limit = _NO_LIMIT

    def __post_init__(self) -> None:
        self.costs.check_counts(self.num_stages, self.num_microbatches)
        self.limit.check(self.costs)

    def number(self, stage: int, op: int, microbatch: int) -> int:
        """Return an action's number."""
        return 4 * (stage * self.num_microbatches + microbatch) + op

    def action(self, number: int) -> Action:
        """Return the action with this number."""
        pair, op = divmod(number, 4)
        return Action(pair // self.num_microbatches, entries.SEARCHED[op], pair % self.num_microbatches)

    @property
    def num_ranks(self) -> int:
        """The number of ranks."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """The number of stages."""
        return self.placement.num_stages

    @property
    def num_actions(self) -> int:
        """The number of action numbers, including both B and I with W."""
        return 4 * self.num_stages * self.num_microbatches

    @cached_property
    def messages(self) -> Messages:
        """How messages are modelled; under BLOCKING, only the simulator itself computes times."""
        return Messages.of(self.costs)

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of the entries: stages, microbatches, ops."""
        return self.num_stages, self.num_microbatches, 4

    @cached_property
    def homes(self) -> Ints:
        """The rank of every pair, as (stages, microbatches)."""
        return entries.homes(self.placement, self.num_microbatches)

    @cached_property
    def rank(self) -> list[int]:
        """The rank of every pair."""
        return _listed(self.homes)

    @cached_property
    def lanes(self) -> tuple[tuple[StageLane, ...], ...]:
        """The lanes of every rank, its lowest stage first."""
        lanes: list[list[StageLane]] = [[] for _ in range(self.num_ranks)]
        for stage, ranks in enumerate(self.homes):
            for rank in self.placement.ranks_of(stage):
                passing = tuple(np.flatnonzero(ranks == rank).tolist())
                if passing:
                    lanes[rank].append(StageLane(rank, stage, passing))
        return tuple(map(tuple, lanes))

    @cached_property
    def plain(self) -> Program:
        """One microbatch after another, with split backwards: the program that holds the least."""
        return entries.one_by_one(self.placement, self.homes, (I, W))

    @cached_property
    def joined(self) -> Program:
        """The same program with whole backwards."""
        return entries.one_by_one(self.placement, self.homes, (B,))

    def program(self, rows: Rows, name: str = "searched") -> Program:
        """Return the program with these rows."""
        rank = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        numbers = np.array([number for row in rows for number in row], dtype=np.int64)
        return entries.program_of(self.placement, self.homes, numbers, rank, name)

    def rows_of(self, program: Program) -> Rows | None:
        """Return a program's rows as numbers; None if it has overlapped pairs or updates, which have no number."""
        columns = program.columns.only(program.columns.code != entries.EXCHANGE)
        op = entries.NUMBER[columns.code]
        if columns.paired.any() or (op < 0).any():
            return None
        numbers = 4 * (columns.stage * self.num_microbatches + np.maximum(columns.microbatch, 0)) + op
        return [row.tolist() for row in np.split(numbers, np.cumsum(columns.lengths)[:-1])]

    @cached_property
    def times(self) -> Floats:
        """The seconds of every action, as (stages, microbatches, ops)."""
        return entries.seconds(self.costs, (self.plain, self.joined), self.shape)

    @cached_property
    def seconds(self) -> list[float]:
        """The seconds of every action."""
        return _listed(self.times)

    @cached_property
    def needs(self) -> Ints:
        """What every action waits for on another stage, as (stages, microbatches, ops)."""
        return entries.needs(self.num_stages, self.num_microbatches)

    @cached_property
    def need(self) -> list[int]:
        """What every action waits for on another stage, by number; -1 if nothing."""
        return _listed(self.needs)

    @cached_property
    def inputs(self) -> dict[tuple[int, int], tuple[int, int]]:
        """What every (stage, op) waits for."""
        return entries.inputs(self.num_stages)

    @cached_property
    def links(self) -> Ints:
        """The link of every action's output, as (stages, microbatches, ops)."""
        return entries.links(self.needs, self.homes, self.num_ranks)

    @cached_property
    def link(self) -> list[int]:
        """The link that every action's output travels on, as source * P + target; -1 if it stays on its rank."""
        return _listed(self.links)

    @cached_property
    def latencies(self) -> Floats:
        """How long after its end every output can be used, as (stages, microbatches, ops)."""
        return self.transfers + entries.latency(self.costs, self.links, self.num_ranks)

    @cached_property
    def latency(self) -> list[float]:
        """How long after its end every action's output can be used at the earliest, including the transfer."""
        return _listed(self.latencies)

    @cached_property
    def transfers(self) -> Floats:
        """How long every output occupies its link, as (stages, microbatches, ops)."""
        return entries.moving(self.costs, (self.plain, self.joined), self.links, self.num_ranks)

    @cached_property
    def moving(self) -> list[float]:
        """How long every action's output occupies its link."""
        return _listed(self.transfers)

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """What the limit restricts: pairs, bytes or both."""
        resources = []
        if self.limit.max_activations is not None:
            during = [1.0 if op == F else 0.0 for op in range(4)]
            after = [more - (op in rules.RELEASES) for more, op in zip(during, entries.SEARCHED, strict=True)]
            pairs, nothing = len(self.rank), [0.0] * self.num_ranks
            resources.append(Resource(during * pairs, after * pairs, nothing, self.limit.most_pairs))
        if self.limit.max_bytes is not None:
            sizes = Sizes.of(self.plain, self.costs)
            during, after = map(_listed, entries.bytes_held(self.costs, sizes, self.shape))
            static = [sum(sizes.static[lane.stage] for lane in lanes) for lanes in self.lanes]
            resources.append(Resource(during, after, static, self.limit.most_bytes))
        return tuple(resources)

    def rows_fit(self, program: Program) -> bool:
        """Whether all rows of a program stay within the limit."""
        rows = self.rows_of(program)
        return rows is not None and all(self.fits(row, rank) for rank, row in enumerate(rows))

    def fits(self, row: Sequence[int], rank: int) -> bool:
        """Whether a row stays within the limit."""
        for resource in self.resources:
            during, after, always, most = resource.during, resource.after, resource.always[rank], resource.most
            stash = 0.0
            for number in row:
                if always + (stash + during[number]) > most:
                    return False
                stash += after[number]
        return True


def _listed(table: Floats | Ints) -> list[Any]:
    """Return a table's entries as plain numbers, which Python reads faster than an array's."""
    return table.ravel().tolist()
