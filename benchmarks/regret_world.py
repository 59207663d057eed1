"""A pipeline on a simulated clock, for `adapt_regret.py`: how slow ranks are, what steps take, and what an oracle does.

    true speed of a rank     mean slowness of the cell  x  lognormal noise, drawn for every rank and step
    a step                   the simulator's makespan of the program at those speeds and the cut of now
    a move                   a pause of 5% of a step at the start

The simulator times one step of many runs at once: runs are the columns of one compiled program.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import numpy as np

from drumline.adapt.rebalance import Layers
from drumline.core.action import Op
from drumline.core.graph import Floats
from drumline.core.program import Program
from drumline.core.simulate.by_stage import STAGE_OPS, makespans_by_stage
from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock
from drumline.schedules import generate

BLOCK = 1e-3  # seconds of a layer's forward; its backward takes twice as long
EACH = 16  # layers of a rank
PAUSE = 0.05  # of a step at the start
SINCE, LATE = 100, 3  # the step at which slowness begins; steps after which the oracle learns of a change
_OPS = {Op.FORWARD: 1.0, Op.BACKWARD: 2.0, Op.BACKWARD_INPUT: 1.0, Op.BACKWARD_WEIGHT: 1.0}
_WEIGHT = 300_000  # bytes of a layer: its first move is thought to cost about as much as it does


@dataclass(frozen=True)
class Kind:
    """How one rank gets slow: `times` as long, from step 100 to the end, for some steps, by a period, or gradually."""

    name: str
    times: float = 1.0
    lasts: int = 0  # 0: to the end
    period: int = 0  # slow for the first half
    slope: float = 0.0  # a step, up to `times`

    def at(self, steps: int) -> Floats:
        """Return the slow rank's mean slowness in every step."""
        since = np.arange(steps) - SINCE
        if self.slope:
            gradual: Floats = np.clip(1.0 + self.slope * since, 1.0, self.times)
            return gradual
        slow = since >= 0
        if self.period:
            slow &= since % self.period < self.period // 2
        elif self.lasts:
            slow &= since < self.lasts
        return np.where(slow, self.times, 1.0)

    @property
    def is_long(self) -> bool:
        """Whether a rank is slow for 40 steps or more."""
        return self.times > 1.0 and not self.period


def kinds() -> list[Kind]:
    """Return every kind of slowness."""
    found = [Kind("nothing slow")]
    for times in (1.25, 1.5, 3.0):
        found += [Kind(f"x{times:g} to the end", times), Kind(f"x{times:g} for 40 steps", times, lasts=40)]
        found += [Kind(f"x{times:g}, period {period}", times, period=period) for period in (8, 16, 40)]
    return [*found, Kind("1% slower a step, to x2", 2.0, slope=0.01)]


class SeenStep(SimpleNamespace):
    """What a decider reads of a measured step, without the records of ranks."""

    transfers = exchanges = packing = ()
    actions: dict[Any, list[float]] | None = None

    def action_seconds(self, *, halves: bool = False) -> dict[Any, list[float]]:
        """Return the seconds of every stage's ops."""
        if not self.actions:
            self.actions = self.world.action_seconds(self.stages)
        actions: dict[Any, list[float]] = self.actions
        return actions


@dataclass
class World:
    """A program of P ranks with 16 equal layers each; the slow rank is the middle one."""

    schedule: str
    num_ranks: int
    microbatches: int = 0
    cuts: dict[tuple[float, ...], tuple[int, ...]] = field(default_factory=dict)
    paths: dict[tuple[Kind, int], tuple[list[tuple[int, ...]], int]] = field(default_factory=dict)

    @cached_property
    def program(self) -> Program:
        """The program that runs."""
        number = self.microbatches or 4 * self.num_ranks
        return generate(self.schedule, num_ranks=self.num_ranks, num_microbatches=number)

    @cached_property
    def layers(self) -> Layers:
        """The layers as they were timed."""
        times = OpTimes(BLOCK, 2 * BLOCK, BLOCK, BLOCK)
        each = (ProfiledBlock(str(at), times, 0, 0, 0, _WEIGHT, _WEIGHT, 0) for at in range(EACH * self.num_ranks))
        return Layers(Profile(tuple(each), OpTimes(0.0, 0.0, 0.0, 0.0), "cpu", 1), self.program)

    @cached_property
    def home(self) -> tuple[int, ...]:
        """The cut at the start."""
        stages = self.program.num_stages
        return (EACH * self.num_ranks // stages,) * stages

    @cached_property
    def pause(self) -> float:
        """The seconds of a move."""
        return PAUSE * float(self.seconds(np.array([self.home]), np.ones((1, self.num_ranks)))[0])

    @cached_property
    def slow_rank(self) -> int:
        """The rank that gets slow."""
        return self.num_ranks // 2

    @cached_property
    def _ops(self) -> list[tuple[int, Op, int, float]]:
        """Every stage's ops, how often each runs, and its seconds for a layer."""
        seen: dict[tuple[int, Op], int] = {}
        for part in self.program.work():
            seen[part.stage, part.op] = seen.get((part.stage, part.op), 0) + 1
        return [(*key, number, _OPS[key[1]]) for key, number in sorted(seen.items())]

    def stage_seconds(self, counts: Floats, speeds: Floats) -> Floats:
        """Return the seconds of a forward in every stage, for rows of cuts and of ranks' slowness."""
        seconds: Floats = BLOCK * counts * speeds[:, list(self.program.placement.homes)]
        return seconds

    def seconds(self, counts: Floats, speeds: Floats) -> Floats:
        """Return the step of every row of cuts and of ranks' slowness."""
        each = self.stage_seconds(counts, speeds).T
        return makespans_by_stage(self.program, np.stack([_OPS[op] * each for op in STAGE_OPS]))

    def action_seconds(self, stages: list[float]) -> dict[Any, list[float]]:
        """Return the seconds of all actions by stage and op, for the seconds of a forward in every stage."""
        return {(stage, op): [each * stages[stage]] * number for stage, op, number, each in self._ops}

    def seen(self, step: int, makespan: float, stages: Sequence[float]) -> SeenStep:
        """Return a step as a decider sees it."""
        busy = [0.0] * self.num_ranks
        homes = self.program.placement.homes
        for stage, _, number, each in self._ops:
            busy[homes[stage]] += each * number * stages[stage]
        return SeenStep(
            world=self, program=self.program, records=[SimpleNamespace(step=step)], makespan=makespan,
            busy=tuple(busy), stages=stages,
        )  # fmt: skip

    def slowness(self, kind: Kind, steps: int) -> Floats:
        """Return the mean slowness of every rank in every step."""
        table = np.ones((steps, self.num_ranks))
        table[:, self.slow_rank] = kind.at(steps)
        return table

    def best(self, slowness: Floats) -> tuple[int, ...]:
        """Return the best cut at these mean speeds."""
        key = tuple(slowness.tolist())
        if key not in self.cuts:
            whole = self.layers.stage_seconds(self.home)
            slow = [value * slowness[home] for value, home in zip(whole, self.program.placement.homes, strict=True)]
            self.cuts[key] = self.layers.measured(self.home, slow).best().counts
        return self.cuts[key]

    def oracle(self, kind: Kind, steps: int) -> tuple[list[tuple[int, ...]], int]:
        """Return the oracle's cut in every step, and the number of its moves.

        Before each step it keeps its cut or takes the best one at the mean speeds of three steps ago, whichever takes
        least until the end: it knows how long each state lasts. Found backwards over (step, cut).
        """
        if (kind, steps) in self.paths:
            return self.paths[kind, steps]
        table = self.slowness(kind, steps)
        wanted = [self.best(table[max(step - LATE, 0)]) for step in range(steps)]
        cuts = list(dict.fromkeys([self.home, *wanted]))
        rows = np.array([cut for cut in cuts for _ in range(steps)])
        taken = self.seconds(rows, np.tile(table, (len(cuts), 1))).reshape(len(cuts), steps)
        rest, moves = np.zeros(len(cuts)), np.zeros((steps, len(cuts)), bool)
        for step in reversed(range(steps)):
            here = taken[:, step] + rest
            other = here[cuts.index(wanted[step])] + self.pause
            moves[step] = other < here
            rest = np.minimum(here, other)
        path, at, num_moves = [], 0, 0
        for step in range(steps):
            if moves[step, at]:
                at, num_moves = cuts.index(wanted[step]), num_moves + 1
            path.append(cuts[at])
        self.paths[kind, steps] = path, num_moves
        return self.paths[kind, steps]


def noise(seed: int, steps: int, num_ranks: int, sigma: float) -> Floats:
    """Return the noise of every rank and step; the same draws for every sigma."""
    return np.exp(sigma * np.random.default_rng(seed).standard_normal((steps, num_ranks)))
