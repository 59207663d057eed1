"""Cuts of a profiled model for one program and one size of microbatch: what each takes, and the best that fits.

Where there are few cuts, all are simulated. Otherwise the cuts of `exact` are where to begin (the shortest largest
stage, and the shortest sum + (M - 1) x largest, of those whose every stage fits its rank), and boundaries are moved for
as long as that makes the simulated step shorter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.program import Program, once_per_program
from drumline.core.prove.frozen import prune
from drumline.core.simulate.graph import Floats
from drumline.core.simulate.simulate import makespans
from drumline.plan.cut.cuts import (
    Counts,
    by_training,
    climb,
    even_cut,
    every_cut,
    shortest_largest,
    shortest_step,
    trained,
)
from drumline.plan.cut.peaks import Peaks
from drumline.plan.cut.tables import FIELD, OPS, CutTable, RunTable, crossings
from drumline.plan.device.blocks import Profile
from drumline.plan.device.overheads import Line, Overheads
from drumline.plan.device.ranks import Ranks

_EVERY = 130  # so many cuts are all simulated
_ROUNDS = 12  # of moving boundaries


@dataclass(frozen=True, slots=True)
class Cut:
    """A cut, the seconds of its step, every rank's peak, and by how much of the limits ranks are over it, summed."""

    counts: Counts
    seconds: float
    rank_bytes: tuple[float, ...]
    excess: float

    @property
    def order(self) -> tuple[float, float]:
        """Less is better: what is over the limits first, then seconds."""
        return self.excess, self.seconds


@dataclass(frozen=True)
class Stages:
    """A program, the blocks at its size of microbatch, and the stages that are recomputed."""

    profile: Profile
    program: Program
    ranks: Ranks
    overheads: Overheads
    recompute: tuple[bool, ...]
    optimizer_states: int = 2

    def costs_for_search(self, counts: Counts) -> Costs:
        """Return what the stages of a cut take where it is open which backwards are split: the tape counts with I."""
        plain, taped = (self.costs(counts, split=share) for share in (0.0, 1.0))
        names = ("forward", "backward_input")
        stages = self.program.num_stages
        (forward, own), (longer, _) = ([one.per_stage(name, stages) for name in names] for one in (plain, taped))
        tape = [max(b - a, 0.0) for a, b in zip(forward, longer, strict=True)]
        return replace(plain, backward_input=[one + more for one, more in zip(own, tape, strict=True)])

    def costs(self, counts: Counts, *, messages: bool = True, split: float | None = None) -> Costs:
        """Return what the stages of a cut take, handling included; without `messages`, as if those were free.

        `split` is the share of forwards that keep a tape, the program's own unless given.
        """
        overheads = self.overheads
        if not messages:
            overheads = replace(overheads, send=Line(), take=Line(), flight=0.0)
        table = CutTable(self.profile, self.program, [counts])
        share = split_share(self.program) if split is None else split
        each = table.seconds(overheads, self._speeds, self.recompute, split=share)[:, 0]
        seconds: dict[str, Any] = dict(zip(FIELD.values(), each.tolist(), strict=True))
        for name in ("backward", "backward_input"):  # here the simulator adds the F that runs again, handling and all
            less = zip(seconds[name], seconds["forward"], self.recompute, strict=True)
            seconds[name] = [max(back - forward, 0.0) if again else back for back, forward, again in less]
        costs = self.profile.costs(
            counts, optimizer_states=self.optimizer_states, placement=self.program.placement, recompute=self.recompute
        )
        costs = replace(costs, **seconds, comm=overheads.flight)
        if not messages or not self.ranks.edges:
            return replace(costs, message_bytes=0.0)  # copying them is in the actions
        edges = {ends: replace(edge, latency=edge.latency + costs.comm) for ends, edge in self.ranks.edges.items()}
        return replace(costs, edges=edges)

    @property
    def _speeds(self) -> Floats:
        """The speed of every stage's rank."""
        return np.array([self.ranks.speeds[home] for home in self.program.placement.homes])

    def pruned(self, counts: Counts) -> Program:
        """Return the program without the backwards that stages of this cut do not need."""
        return _pruned(self.program, trained([one.trains for one in self.profile.layers], counts))[0]

    def cuts(self, many: Sequence[Counts]) -> list[Cut]:
        """Return what each of these cuts takes, all timed at once."""
        found: dict[int, Cut] = {}
        limits = np.array(self.ranks.limits)
        for stages, places in by_training([one.trains for one in self.profile.layers], many).items():
            program, peaks = _pruned(self.program, stages)
            table = CutTable(self.profile, program, [many[at] for at in places])
            seconds = self._makespans(program, table) + [self._around(one) for one in table.gradients.max(axis=1)]
            sizes = peaks.stash(table.sizes(self.recompute)) + table.static(self.optimizer_states)
            over = (np.maximum(sizes - limits, 0.0) / np.where(np.isfinite(limits), limits, 1.0)).max(axis=1)
            for at, one, size, excess in zip(places, seconds.tolist(), sizes.tolist(), over.tolist(), strict=True):
                found[at] = Cut(many[at], one, tuple(size), excess)
        return [found[at] for at in range(len(many))]

    def _makespans(self, program: Program, table: CutTable) -> Floats:
        """Return the simulated step of every cut."""
        if self.ranks.edges:
            return makespans(program, [self.costs(counts) for counts in table.many])
        seconds = table.seconds(self.overheads, self._speeds, self.recompute, split=split_share(self.program))
        ops, stages = _work(program)
        unit = Costs(backward=1.0, comm=self.overheads.flight)
        return makespans(program, unit, factors=seconds[ops, :, stages].T)

    def around(self, costs: Costs, program: Program) -> float:
        """Return what a step takes before its first action and behind its last one."""
        gradients = costs.per_stage("gradient_bytes", program.num_stages)
        held = (program.placement.stages_of(rank) for rank in range(program.num_ranks))
        return self._around(max(sum(gradients[stage] for stage in stages) for stages in held))

    def _around(self, gradient_bytes: float) -> float:
        return self.overheads.begin + self.overheads.end.at(gradient_bytes)

    def best(self) -> tuple[Cut, Cut]:
        """Return the best cut within the limits and the best of all, which may be the same.

        Where none was found within them, the first is the one that is over by the least.
        """
        num_blocks, num_stages = len(self.profile.layers), self.program.num_stages
        if math.comb(num_blocks - 1, num_stages - 1) <= _EVERY:
            found = self.cuts(every_cut(num_blocks, num_stages))
            return min(found, key=lambda one: one.order), min(found, key=lambda one: one.seconds)
        free = self._climbed(even_cut(num_blocks, num_stages), self.tables(limited=False), lambda one: one.seconds)
        if free.excess == 0:
            return free, free
        return self._climbed(free.counts, self.tables(), lambda one: one.order), free

    def _climbed(self, begun: Counts, tables: Sequence[Floats], value: Callable[[Cut], Any]) -> Cut:
        """Return the best cut from the exact ones on, moving to the best neighbour for as long as that helps."""
        exact = shortest_largest(tables), shortest_step(tables, self.program.num_microbatches)
        tried: dict[Counts, Cut] = {}

        def values(many: Sequence[Counts]) -> list[Any]:
            found = self.cuts(many)
            tried.update((one.counts, one) for one in found)
            return [value(one) for one in found]

        starts = dict.fromkeys(one for one in (begun, *exact) if one is not None)
        return tried[climb(list(starts), values, rounds=_ROUNDS, singly=True)]

    def tables(self, *, limited: bool = True) -> list[Floats]:
        """Return the seconds of every run of blocks as each stage, [first, end]; infinite where it does not fit."""
        program, num_blocks = self.program, len(self.profile.layers)
        firsts, ends = np.arange(num_blocks)[:, None], np.arange(num_blocks + 1)[None, :]
        runs = RunTable(self.profile, firsts, ends)
        (_, peaks), split = _pruned(program, (True,) * program.num_stages), split_share(program)
        homes, crossed = program.placement.homes, list(zip(*crossings(program), strict=True))
        found = []
        for stage, home in enumerate(homes):
            again, (earlier, later) = self.recompute[stage], crossed[stage]
            forward, backward, by_input, by_weight = runs.handled(
                self.overheads, self.ranks.speeds[home], again, earlier=earlier, later=later, split=split
            )
            seconds = forward + (1 - split) * backward + split * (by_input + by_weight)
            size = runs.kept(again), runs.full(again), runs.until_weight
            moments = peaks.of_stage(stage).tolist()
            held = np.max([a * size[0] + b * (size[1] - size[0]) + c * size[2] for a, b, c in moments], axis=0)
            fits = held + runs.static(self.optimizer_states) <= (self.ranks.limits[home] if limited else math.inf)
            found.append(np.where(fits & (firsts < ends), seconds, np.inf))
        return found


@once_per_program
def _pruned(program: Program, trained: tuple[bool, ...]) -> tuple[Program, Peaks]:
    """Return the program for stages of which these are trained, and its peaks."""
    pruned = prune(program, trained)
    return pruned, Peaks(pruned)


@once_per_program
def _work(program: Program) -> tuple[list[int], list[int]]:
    """Return op and stage of every plain action, row by row."""
    parts = [(OPS.index(part.op), part.stage) for part in program.work() if part.op in OPS]
    return [op for op, _ in parts], [stage for _, stage in parts]


@once_per_program
def split_share(program: Program) -> float:
    """Return the share of the program's backwards that are split into I and W."""
    ops = [part.op for part in program.work()]
    halves = ops.count(Op.BACKWARD_INPUT)
    return halves / max(halves + ops.count(Op.BACKWARD), 1)
