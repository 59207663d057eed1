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

from drumline.core import rules
from drumline.core.action import Action, Op
from drumline.core.clock.assemble import compile_program
from drumline.core.costs import Costs
from drumline.core.graph import OPS, Messages
from drumline.core.memory import Sizes
from drumline.core.placement import Placement
from drumline.core.program import Program
from drumline.core.simulate.durations import message_bytes, work_seconds
from drumline.core.timeline.idle import Limit

F, I, W, B = range(4)  # noqa: E741 - the letters the papers use
_OPS = (Op.FORWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT, Op.BACKWARD)
_NUMBER = {op: number for number, op in enumerate(_OPS)}

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
        return Action(pair // self.num_microbatches, _OPS[op], pair % self.num_microbatches)

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

    @cached_property
    def rank(self) -> list[int]:
        """The rank of every pair."""
        home = self.placement.rank_of
        return [home(stage, m) for stage in range(self.num_stages) for m in range(self.num_microbatches)]

    @cached_property
    def lanes(self) -> tuple[tuple[StageLane, ...], ...]:
        """The lanes of every rank, its lowest stage first."""
        lanes = []
        for rank in range(self.num_ranks):
            mine = []
            for stage in range(self.num_stages):
                passing = tuple(
                    m for m in range(self.num_microbatches) if self.rank[stage * self.num_microbatches + m] == rank
                )
                if passing:
                    mine.append(StageLane(rank, stage, passing))
            lanes.append(tuple(mine))
        return tuple(lanes)

    @cached_property
    def plain(self) -> Program:
        """One microbatch after another, with split backwards: the program that holds the least."""
        return self._one_by_one((Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT))

    @cached_property
    def joined(self) -> Program:
        """The same program with whole backwards."""
        return self._one_by_one((Op.BACKWARD,))

    def _one_by_one(self, backward: Sequence[Op]) -> Program:
        rows: list[list[Action]] = [[] for _ in range(self.num_ranks)]
        stages = range(self.num_stages)
        for m in range(self.num_microbatches):
            for stage in stages:
                rows[self.placement.rank_of(stage, m)].append(Action(stage, Op.FORWARD, m))
            for stage in reversed(stages):
                rows[self.placement.rank_of(stage, m)] += [Action(stage, op, m) for op in backward]
        return self._finished(rows)

    def _finished(self, rows: Sequence[Sequence[Action]], name: str = "searched") -> Program:
        """Return the rows as a program; copies of a stage exchange their gradients at the end."""
        if not self.placement.mirrored:
            return Program.of(rows, name)
        return Program.of(
            [
                [*row, *(Action(stage, Op.REDUCE_GRAD) for stage in sorted({action.stage for action in row}))]
                for row in rows
            ],
            name,
        )

    def program(self, rows: Rows, name: str = "searched") -> Program:
        """Return the program with these rows."""
        return self._finished([[self.action(number) for number in row] for row in rows], name)

    def rows_of(self, program: Program) -> Rows | None:
        """Return a program's rows as numbers; None if it has overlapped pairs or updates, which have no number."""
        rows: Rows = []
        for row in program.rows:
            kept_actions = [action for action in row if action.op is not Op.REDUCE_GRAD]
            if any(action.op not in _NUMBER for action in kept_actions):
                return None
            rows.append([self.number(stage, _NUMBER[op], m or 0) for stage, op, m, _ in kept_actions])
        return rows

    @cached_property
    def seconds(self) -> list[float]:
        """The seconds of every action."""
        seconds = [0.0] * self.num_actions
        for program in (self.plain, self.joined):
            graph = compile_program(program, Messages.LATENCY)
            work = graph.work
            columns = (work.stage.tolist(), work.code.tolist(), work.microbatch.tolist())
            for stage, code, m, time in zip(*columns, work_seconds(graph, [self.costs])[:, 0].tolist(), strict=True):
                seconds[self.number(stage, _NUMBER[OPS[code]], m)] = time
        return seconds

    @cached_property
    def need(self) -> list[int]:
        """What every action waits for on another stage, by number; -1 if nothing."""
        needs = [-1] * self.num_actions
        length = 4 * self.num_microbatches
        for (stage, op), (needed_stage, needed_op) in self.inputs.items():
            if op != W:  # W only needs its own I, and can run any time after it
                first, needed = self.number(stage, op, 0), self.number(needed_stage, needed_op, 0)
                needs[first : first + length - op : 4] = range(needed, needed + length - needed_op, 4)
        return needs

    @cached_property
    def inputs(self) -> dict[tuple[int, int], tuple[int, int]]:
        """What every (stage, op) waits for, by `rules`: the last of its inputs, which never arrives earlier."""
        inputs_of = {}
        for stage in range(self.num_stages):
            for number, op in enumerate(_OPS):
                for alternatives in rules.needs(Action(stage, op, 0), self.num_stages):
                    # B uses the entry of I for its gradient.
                    inputs_of[stage, number] = min((action.stage, _NUMBER[action.op]) for action in alternatives)
        return inputs_of

    @cached_property
    def link(self) -> list[int]:
        """The link that every action's output travels on, as source * P + target; -1 if it stays on its rank."""
        links = [-1] * self.num_actions
        for number, needed in enumerate(self.need):
            if needed >= 0 and number % 4 != B:
                source, target = self.rank[needed // 4], self.rank[number // 4]
                if source != target:
                    links[needed] = source * self.num_ranks + target
        for pair in range(len(self.rank)):
            links[4 * pair + B] = links[4 * pair + I]
        return links

    @cached_property
    def latency(self) -> list[float]:
        """How long after its end every action's output can be used at the earliest, including the transfer."""
        return [
            moving + (self.costs.edge(*divmod(link, self.num_ranks)).latency if link >= 0 else 0.0)
            for link, moving in zip(self.link, self.moving, strict=True)
        ]

    @cached_property
    def moving(self) -> list[float]:
        """How long every action's output occupies its link."""
        bytes_moving = [0.0] * self.num_actions
        if self.costs.has_finite_links:
            for program in (self.plain, self.joined):
                graph = compile_program(program, Messages.LATENCY)
                work, crossings = graph.work, graph.crossings
                producers = [column[crossings.producer].tolist() for column in (work.stage, work.code, work.microbatch)]
                for stage, code, m, size in zip(*producers, message_bytes(graph, self.costs).tolist(), strict=True):
                    number = self.number(stage, _NUMBER[OPS[code]], m)
                    bytes_moving[number] = (
                        size / self.costs.edge(*divmod(self.link[number], self.num_ranks)).bytes_per_second
                    )
        return bytes_moving

    @cached_property
    def resources(self) -> tuple[Resource, ...]:
        """What the limit restricts: pairs, bytes or both."""
        resources = []
        if self.limit.max_activations is not None:
            during = [1.0 if op is Op.FORWARD else 0.0 for op in _OPS]
            after = [more - (op in rules.RELEASES) for more, op in zip(during, _OPS, strict=True)]
            pairs, nothing = len(self.rank), [0.0] * self.num_ranks
            resources.append(Resource(during * pairs, after * pairs, nothing, self.limit.most_pairs))
        if self.limit.max_bytes is not None:
            resources.append(self._bytes(self.limit.most_bytes))
        return tuple(resources)

    def _bytes(self, most: float) -> Resource:
        sizes = Sizes.of(self.plain, self.costs)
        factors = self.costs.factors(self.num_microbatches)
        during, after = [0.0] * self.num_actions, [0.0] * self.num_actions
        for number in range(self.num_actions):
            stage, op, m, _ = self.action(number)
            more, less = sizes.change[op, stage]
            during[number], after[number] = more * factors[m or 0], (more + less) * factors[m or 0]
        static = [sum(sizes.static[lane.stage] for lane in lanes) for lanes in self.lanes]
        return Resource(during, after, static, most)

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
