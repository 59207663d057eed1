"""Where to cut now: from what every layer took when it was timed, and how fast each rank is by now.

    timed once      layer 0 .. 15, seconds of F, I, W each                    the profile
    measured now    stage 0: 8.1 ms    stage 1: 12.3 ms                       -> rank 1 has two thirds of its speed
    solved          9 | 7: 9.1 ms and 10.7 ms                                 simulated with the program, within memory

A stage that takes longer than its layers did is taken for a slow rank. If the layers themselves have become slow, as
those of busy experts do, a move shows it: the next measurement corrects the ranks' speeds, and with them the cut.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from drumline.core.costs import Costs
from drumline.core.graph import Floats
from drumline.core.program import Program
from drumline.plan.cut.cuts import Counts, ends_of
from drumline.plan.cut.timed import TimedCut
from drumline.plan.device.blocks import OpTimes, Profile, ProfiledBlock
from drumline.plan.device.overheads import Overheads
from drumline.plan.device.ranks import Ranks
from drumline.plan.device.stages import Stages, split_share

_STATES = 2  # tensors that an optimizer keeps for every parameter, as Adam does


@dataclass(frozen=True)
class Layers:
    """A model's layers as they were timed, on the ranks of a program as they are now.

    `speeds` are relative to those at the time of the profile; `max_bytes` is what each rank may hold.

    >>> each = [ProfiledBlock(str(at), OpTimes(1.0, 2.0, 1.0, 1.0), 0, 0, 0, 8, 8, 0) for at in range(6)]
    >>> profile = Profile(tuple(each), OpTimes(0, 0, 0, 0), "cpu", 1)
    >>> from drumline.schedules import generate
    >>> layers = Layers(profile, generate("1f1b", num_ranks=2, num_microbatches=8))
    >>> slow = layers.measured((3, 3), [9.0, 18.0])
    >>> slow.speeds, slow.best().counts, slow.half((3, 3), slow=1, beside=0)
    ((1.0, 0.5), (4, 2), (4, 2))
    """

    profile: Profile
    program: Program
    speeds: tuple[float, ...] = ()
    max_bytes: float | None = None
    recompute: bool = False
    latency: float = 0.0

    def measured(self, counts: Counts, seconds: Sequence[float], *, latency: float = 0.0) -> Layers:
        """Return the same layers on ranks whose stages take these seconds for a microbatch."""
        sums = zip(self.rank_seconds(counts), self.rank_seconds(counts, seconds), strict=True)
        speeds = tuple(value / now if now > 0 and value > 0 else 1.0 for value, now in sums)
        return replace(self, speeds=speeds, latency=latency)

    def rank_seconds(self, counts: Counts, seconds: Sequence[float] | None = None) -> list[float]:
        """Return every rank's sum over its stages: of what layers took when they were timed, or of `seconds`."""
        sums = [0.0] * self.program.num_ranks
        each = self.stage_seconds(counts) if seconds is None else seconds
        for value, home in zip(each, self.program.placement.homes, strict=True):
            sums[home] += value
        return sums

    def steps(self, counts: Counts, slowness: Floats) -> Floats:
        """Return the simulated step of a cut for every row of `slowness`: how many times as long each rank takes."""
        return self._as_timed.steps_on(counts, slowness)

    def stage_seconds(self, counts: Counts) -> list[float]:
        """Return what a microbatch took in every stage of a cut when layers were timed."""
        share = split_share(self.program)
        own_overhead = self.profile.overhead.total(split=share)
        stages = [self.profile.layers[i:j] for i, j in pairwise(ends_of(counts))]
        return [own_overhead + sum(block.times.total(split=share) for block in stage) for stage in stages]

    @cached_property
    def _stages(self) -> Stages:
        return self._on(self.speeds)

    @cached_property
    def _as_timed(self) -> Stages:
        return self._on(())

    def _on(self, speeds: Sequence[float]) -> Stages:
        num_ranks = self.program.num_ranks
        ranks = Ranks.of(num_ranks, memory_bytes=self.max_bytes, headroom=0.0, rank_speeds=speeds or [1.0] * num_ranks)
        recompute = (self.recompute,) * self.program.num_stages
        return Stages(self.profile, self.program, ranks, Overheads(flight=self.latency), recompute, _STATES)

    def seconds(self, counts: Counts) -> float:
        """Return the simulated step of a cut on the ranks as they are."""
        return self._stages.cuts.timed([counts])[0].seconds

    def best(self) -> TimedCut:
        """Return the cut with the shortest simulated step in which every rank stays within its memory."""
        return self._stages.best()[0]

    def fits(self, counts: Counts) -> bool:
        """Whether every rank stays within its memory."""
        return self._stages.cuts.timed([counts])[0].excess == 0

    def costs(self, counts: Counts) -> Costs:
        """Return the costs of a cut's stages on the ranks as they are."""
        return self._stages.costs(counts)

    def half(self, counts: Counts, *, slow: int, beside: int) -> Counts | None:
        """Return the cut in which half of the slow rank's layers went to its neighbour; None if it has one layer.

        Of a rank with several stages, the stage that borders on the neighbour's gives.
        """
        homes = self.program.placement.homes
        for at, (left, right) in enumerate(pairwise(homes)):
            if {left, right} == {slow, beside}:
                giver, taker = (at, at + 1) if left == slow else (at + 1, at)
                num_given = counts[giver] // 2
                if not num_given:
                    return None
                moved = list(counts)
                moved[giver] -= num_given
                moved[taker] += num_given
                return tuple(moved)
        return None

    def moved_bytes(self, before: Counts, after: Counts) -> int:
        """Return what moves between ranks from one cut to another: parameters and their optimizer's state."""
        homes = self.program.placement.homes
        return sum(
            _size(layer)
            for layer, old, new in zip(self.profile.layers, _owners(before, homes), _owners(after, homes), strict=True)
            if old != new
        )


def _size(layer: ProfiledBlock) -> int:
    return layer.weight_bytes + _STATES * layer.gradient_bytes


def _owners(counts: Counts, homes: Sequence[int]) -> list[int]:
    """Return the rank of every layer.

    >>> _owners((2, 1), (0, 1))
    [0, 0, 1]
    """
    return [home for count, home in zip(counts, homes, strict=True) for _ in range(count)]


def guessed(names: Sequence[str], costs: Sequence[float], sizes: Sequence[tuple[int, int]], seconds: float) -> Profile:
    """Return a profile of layers that nobody timed: `seconds` of a microbatch, divided by their guessed costs.

    `sizes` are each layer's bytes of weights and of gradients. Activations are not known, so that a limit of bytes
    counts weights, gradients and the optimizer's state alone.

    >>> [layer.times.forward for layer in guessed(["0", "1"], [1.0, 3.0], [(8, 8), (8, 8)], 12.0).layers]
    [1.0, 3.0]
    """
    unit = seconds / math.fsum(costs)
    nothing = OpTimes(0.0, 0.0, 0.0, 0.0)
    layers = [
        ProfiledBlock(name, OpTimes(third, 2 * third, third, third), 0, 0, 0, weight, gradient, 0)
        for name, (weight, gradient), third in zip(names, sizes, (cost * unit / 3 for cost in costs), strict=True)
    ]
    return Profile(tuple(layers), nothing, "not timed", 0)
