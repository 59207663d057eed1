"""Cuts of a profiled model for one program and one microbatch size: what each costs, and the best that fits.

If there are few cuts, all are simulated. Otherwise it starts with the exact cuts of `cuts`: the shortest largest stage,
and the shortest sum + (M - 1) x largest, among cuts whose stages each fit their rank. Then boundaries move as long as
the simulated step gets shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.graph import Floats, Ints
from drumline.core.program import Program, once_per_program
from drumline.core.simulate.by_stage import STAGE_OPS as OPS
from drumline.core.simulate.by_stage import makespans_by_stage
from drumline.core.simulate.simulate import makespans
from drumline.plan.cut.chain import sums
from drumline.plan.cut.cuts import Counts, ends_of, even_cut, every_cut, shared_cut, shortest_largest, shortest_step
from drumline.plan.cut.timed import TimedCut, TimedCuts
from drumline.plan.device.blocks import Profile
from drumline.plan.device.overheads import MessageTime, Numbers, Overheads
from drumline.plan.device.ranks import Ranks

FIELD = dict(zip(OPS, ("forward", "backward", "backward_input", "backward_weight"), strict=True))

_EVERY = 2000  # up to this many cuts, all are simulated: 25 blocks in four stages
_CLIMB: dict[str, Any] = {"rounds": 12, "singly": True}  # rounds of moving boundaries


@dataclass(frozen=True)
class Stages:
    """A program, the blocks at its microbatch size, and the recomputed stages."""

    profile: Profile
    program: Program
    ranks: Ranks
    overheads: Overheads
    recompute: tuple[bool, ...]
    optimizer_states: int = 2

    @cached_property
    def cuts(self) -> TimedCuts:
        """The cuts of the blocks, timed with all measurements."""
        blocks = self.profile.blocks(split=split_share(self.program), optimizer_states=self.optimizer_states)
        return TimedCuts(blocks, self.program, self._steps, self.ranks.limits, self.recompute)

    def costs_for_search(self, counts: Counts) -> Costs:
        """Return the costs of a cut's stages while it is open which backwards are split: the tape counts with I."""
        plain, taped = (self.costs(counts, split=share) for share in (0.0, 1.0))
        names = ("forward", "backward_input")
        stages = self.program.num_stages
        (forward, own_seconds), (longer, _) = (
            [costs.per_stage(name, stages) for name in names] for costs in (plain, taped)
        )
        tape = [max(b - a, 0.0) for a, b in zip(forward, longer, strict=True)]
        return replace(plain, backward_input=[value + more for value, more in zip(own_seconds, tape, strict=True)])

    def costs(self, counts: Counts, *, messages: bool = True, split: float | None = None) -> Costs:
        """Return the costs of a cut's stages, including handling; without `messages`, as if messages were free.

        `split` is the share of forwards that keep a tape (default: as in the program).
        """
        overheads = self.overheads
        if not messages:
            overheads = replace(overheads, send=MessageTime(), take=MessageTime(), flight=0.0)
        ends = np.array(ends_of(counts))
        each = self._seconds(ends[:-1], ends[1:], overheads=overheads, split=split)
        seconds: dict[str, Any] = dict(zip(FIELD.values(), each.tolist(), strict=True))
        for name in ("backward", "backward_input"):  # the simulator adds the recomputed F, with its handling
            less = zip(seconds[name], seconds["forward"], self.recompute, strict=True)
            seconds[name] = [max(back - forward, 0.0) if again else back for back, forward, again in less]
        costs = self.profile.costs(
            counts, optimizer_states=self.optimizer_states, placement=self.program.placement, recompute=self.recompute
        )
        costs = replace(costs, **seconds, comm=overheads.flight)
        if not messages or not self.ranks.edges:
            return replace(costs, message_bytes=0.0)  # copying them is part of the actions
        edges = {ends: replace(edge, latency=edge.latency + costs.comm) for ends, edge in self.ranks.edges.items()}
        return replace(costs, edges=edges)

    def _seconds(
        self,
        firsts: Ints,
        ends: Ints,
        stage: int | slice = slice(None),
        *,
        overheads: Overheads | None = None,
        split: float | None = None,
    ) -> Floats:
        """Return the seconds of each op with its handling, and of F when a backward runs it again, ops first.

        Runs of blocks from `firsts` to before `ends` belong to one stage, or along their last axis to all stages.
        """
        share = split_share(self.program) if split is None else split
        own_overheads, homes = overheads or self.overheads, self.program.placement.homes
        speed = np.array([self.ranks.speeds[home] for home in homes])[stage]
        earlier, later = (crossed[stage] for crossed in crossings(self.program))
        plain = {op: self._plain(op, firsts, ends, split=share) / speed for op in OPS}
        sent, received = self.cuts.table.sent(ends), self.cuts.table.received(firsts)
        # A stage sends its gradient to where its input came from.
        back = plain[Op.FORWARD] * np.array(self.recompute)[stage]
        back = back + own_overheads.take.at(sent) * later + own_overheads.send.at(received) * earlier
        ahead = own_overheads.send.at(sent) * later + own_overheads.take.at(received) * earlier
        extra = dict(zip(OPS, (ahead, back, back, np.zeros_like(back)), strict=True))
        return np.stack([plain[op] + extra[op] + own_overheads.action for op in OPS])

    def _plain(self, op: Op, firsts: Ints, ends: Ints, *, split: float) -> Floats:
        """Return the seconds of an op, with the cost of calling a stage; `split` is the share of split backwards."""
        whole = self._totals(split)[op]
        seconds: Floats = whole[ends] - whole[firsts] + self.profile.overhead.of(FIELD[op], split=split)
        return seconds

    def _totals(self, split: float) -> dict[Op, Floats]:
        """Return the prefix sums of every op's seconds over the blocks."""
        if split not in self._known_totals:
            times = [layer.times for layer in self.profile.layers]
            self._known_totals[split] = {op: sums([each.of(FIELD[op], split=split) for each in times]) for op in OPS}
        return self._known_totals[split]

    @cached_property
    def _known_totals(self) -> dict[float, dict[Op, Floats]]:
        return {}

    def _steps(self, program: Program, many: Sequence[Counts]) -> Floats:
        """Return the predicted step of every cut: the simulated time, plus the time before and after it."""
        ends = np.cumsum([(0, *counts) for counts in many], axis=1)
        gradients = np.diff(sums([layer.gradient_bytes for layer in self.profile.layers])[ends], axis=1)
        held_stages = (list(program.placement.stages_of(rank)) for rank in range(program.num_ranks))
        around: Floats = self._around(np.max([gradients[:, stages].sum(axis=1) for stages in held_stages], axis=0))
        if self.ranks.edges:
            return makespans(program, [self.costs(counts) for counts in many]) + around
        each = self._seconds(ends[:, :-1], ends[:, 1:]).transpose(0, 2, 1)
        return makespans_by_stage(program, each, comm=self.overheads.flight) + around

    def steps_on(self, counts: Counts, slowness: Floats) -> Floats:
        """Return the simulated step of one cut for every row of `slowness`: how many times as long each rank takes."""
        ends = np.array(ends_of(counts))
        each = self._seconds(ends[:-1], ends[1:])[:, :, None] * slowness.T[list(self.program.placement.homes)]
        return makespans_by_stage(self.cuts.pruned(counts), each, comm=self.overheads.flight)

    def around(self, costs: Costs, program: Program) -> float:
        """Return the time of a step before its first action and after its last."""
        gradients = costs.per_stage("gradient_bytes", program.num_stages)
        held_stages = (program.placement.stages_of(rank) for rank in range(program.num_ranks))
        return self._around(max(sum(gradients[stage] for stage in stages) for stages in held_stages))

    def _around(self, gradient_bytes: Numbers) -> Numbers:
        return self.overheads.begin + self.overheads.end.at(gradient_bytes)

    def best(self) -> tuple[TimedCut, TimedCut]:
        """Return the best cut within the limits and the best of all, which may be the same.

        If no cut is within them, the first is the one with the least excess.
        """
        num_blocks, num_stages = len(self.profile.layers), self.program.num_stages
        if math.comb(num_blocks - 1, num_stages - 1) <= _EVERY:
            timed_cuts = self.cuts.timed(every_cut(num_blocks, num_stages))
            return min(timed_cuts, key=lambda cut: cut.order), min(timed_cuts, key=lambda cut: cut.seconds)
        even, tables = even_cut(num_blocks, num_stages), self.tables(limited=False)
        free = self._moved(even, tables, lambda cut: cut.seconds, weigh=False)
        if free.excess == 0:
            return free, free
        return self._moved(free.counts, self.tables(), lambda cut: cut.order), free

    def _moved(
        self, begun: Counts, tables: Sequence[Floats], value: Callable[[TimedCut], Any], *, weigh: bool = True
    ) -> TimedCut:
        """Return the best cut found from the exact ones and from shares by speed, as long as moves help."""
        exact = shortest_largest(tables), shortest_step(tables, self.program.num_microbatches)
        starts = [entry for entry in (begun, *exact) if entry is not None]
        return self.cuts.moved(starts, [self._shared], value=value, weigh=weigh, **_CLIMB)

    @cached_property
    def _shared(self) -> Counts:
        """The cut that gives each rank work by its speed, the same to each of its stages."""
        homes = self.program.placement.homes
        shares = np.array([self.ranks.speeds[home] / homes.count(home) for home in homes])
        return shared_cut(self._whole(0, np.arange(len(self.profile.layers) + 1))[:, 0], shares.tolist())

    def tables(self, *, limited: bool = True) -> list[Floats]:
        """Return the seconds of every run of blocks as each stage, [first, end]; infinite if it does not fit."""
        number, (firsts, ends) = len(self.profile.layers), self.cuts.table.grid
        chain = self.cuts.chain(self.program) if limited else None
        is_run = np.where(firsts < ends, 0.0, np.inf)
        # All that a run takes depends either on its first block or on its end.
        up, down = self._whole(0, ends[0]), self._whole(firsts[:, 0], number)
        tables = []
        for stage, home in enumerate(self.program.placement.homes):
            seconds = down[:, stage, None] + (up[:, stage] - up[-1, stage]) + is_run
            if chain is not None and self.ranks.limits[home] < math.inf:
                seconds[chain.stage_bytes(stage) > self.ranks.limits[home]] = np.inf
            tables.append(seconds)
        return tables

    def _whole(self, firsts: Ints | int, ends: Ints | int) -> Floats:
        """Return the seconds of a microbatch, forward and backward, of each of these runs as every stage."""
        split = split_share(self.program)
        first, end = (np.atleast_1d(each)[:, None] for each in (firsts, ends))
        forward, backward, by_input, by_weight = self._seconds(first, end)
        seconds: Floats = forward + (1 - split) * backward + split * (by_input + by_weight)
        return seconds


@once_per_program
def split_share(program: Program) -> float:
    """Return the share of the program's backwards that are split into I and W."""
    ops = [part.op for part in program.work()]
    halves = ops.count(Op.BACKWARD_INPUT)
    return halves / max(halves + ops.count(Op.BACKWARD), 1)


def crossings(program: Program) -> tuple[Floats, Floats]:
    """Return, per stage, whether messages between it and the previous stage, and the next one, change ranks.

    >>> from drumline.schedules import generate
    >>> [ends.tolist() for ends in crossings(generate("zb-v", num_ranks=2, num_microbatches=2))]
    [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
    """
    crossed = np.array([a != b for a, b in pairwise(program.placement.homes)], dtype=float)
    return np.append(0.0, crossed), np.append(crossed, 0.0)
