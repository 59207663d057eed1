"""One way to run a step: a program with its cut, its cost item by item, and why another one is better."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from drumline.core.action import Op
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.plan.cut.cuts import ends_of
from drumline.plan.cut.peaks import held_by
from drumline.plan.cut.timed import TimedCut
from drumline.plan.device.advice import Remedy, lost_and_saved
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.plan import Plan, RankBytes, StepSeconds
from drumline.plan.device.stages import FIELD, Stages

EQUAL = 0.01  # steps or peaks that differ by a smaller share count as equal
_MIB = 2**20
_SAID = {
    "compute": "computes {} longer",
    "recompute": "recomputes {} longer",
    "executor": "more actions, {} longer",
    "communication": "communicates {} longer",
    "bubble": "bubble {} longer",
    "around": "begin and end {} longer",
}


@dataclass(frozen=True)
class Candidate:
    """A program on its ranks, with a cut and microbatches of `rows`."""

    stages: Stages
    cut: TimedCut
    rows: int
    batch: int
    searched: bool = False

    @property
    def program(self) -> Program:
        """The program, including every backward."""
        return self.stages.program

    @property
    def fits(self) -> bool:
        """Whether every rank is within its limit."""
        return self.cut.excess == 0

    @property
    def step_seconds(self) -> float:
        """The predicted step."""
        return self.cut.seconds

    @cached_property
    def costs(self) -> Costs:
        """The costs of its stages, including message handling."""
        return self.stages.costs(self.cut.counts)

    def timeline(self) -> Simulation:
        """Simulate the predicted step."""
        return simulate(self.stages.cuts.pruned(self.cut.counts), self.costs)

    @cached_property
    def makespan(self) -> float:
        """The predicted step without the time before its first action and after its last."""
        return self.step_seconds - self.stages.around(self.costs, self.program)

    @cached_property
    def sent_bytes(self) -> float:
        """The bytes sent between ranks in a step, activations and gradients."""
        layers, homes = self.stages.profile.layers, self.program.placement.homes
        ends = list(accumulate(self.cut.counts))[:-1]
        crossed = (
            layers[end - 1].output_bytes for end, pair in zip(ends, pairwise(homes), strict=True) if len(set(pair)) > 1
        )
        return 2.0 * self.program.num_microbatches * sum(crossed)

    @property
    def peak(self) -> float:
        """The bytes of the rank that holds the most."""
        return max(self.cut.rank_bytes)

    @property
    def largest_share(self) -> float:
        """The share of its limit that the fullest rank uses."""
        return max(size / limit for size, limit in zip(self.cut.rank_bytes, self.stages.ranks.limits, strict=True))

    @property
    def over(self) -> tuple[int, float]:
        """The rank that exceeds its limit the most, and by how many bytes."""
        limits = self.stages.ranks.limits
        each = [size - limit for size, limit in zip(self.cut.rank_bytes, limits, strict=True)]
        rank = int(np.argmax(each))
        return rank, each[rank]

    @cached_property
    def seconds(self) -> StepSeconds:
        """The step, item by item."""
        counts, ranks = self.cut.counts, self.program.num_ranks
        program = self.stages.cuts.pruned(counts)
        work = Counter((part.op, part.stage) for part in program.work())
        plain = replace(self.stages, overheads=type(self.stages.overheads)()).costs(counts)

        def total(ops: dict[Op, str]) -> float:
            each = {op: plain.per_stage(name, program.num_stages) for op, name in ops.items()}
            return sum(number * each[op][stage] for (op, stage), number in work.items() if op in each) / ranks

        compute = total(FIELD)
        forward = plain.per_stage("forward", program.num_stages)
        again = sum(
            number * forward[stage]
            for (op, stage), number in work.items()
            if op in (Op.BACKWARD, Op.BACKWARD_INPUT) and self.stages.recompute[stage]
        )
        free = simulate(program, self.stages.costs(counts, messages=False))
        busy = sum(free.busy) / ranks
        return StepSeconds(
            compute=compute,
            recompute=again / ranks,
            executor=busy - compute - again / ranks,
            communication=self.makespan - free.makespan,
            bubble=free.makespan - busy,
            around=self.step_seconds - self.makespan,
        )

    @cached_property
    def rank_bytes(self) -> tuple[RankBytes, ...]:
        """Every rank's peak, item by item."""
        counts, stages = self.cut.counts, self.program.num_stages
        program, table = self.stages.cuts.pruned(counts), self.stages.cuts.table
        ends, held_pairs = np.array(ends_of(counts)), held_by(program)
        pairs = table.pairs(ends[:-1], ends[1:], np.array(self.stages.recompute))
        received = table.received(ends[:-1])[:, None]
        kept_bytes, running, until = np.split(pairs, 3, axis=-1)
        bare = [np.maximum(array - received, 0.0) for array in (kept_bytes, kept_bytes + running, until)]
        own_pairs = np.concatenate([bare[0], bare[1] - bare[0], bare[2]], axis=-1)
        whole, own_bytes = (
            [float(rank.stash(array[list(rank.stages)])) for rank in held_pairs] for array in (pairs, own_pairs)
        )
        trained = [kind.name == "WHOLE" for kind in program.backwards]
        weight, gradient, optimizer = (
            self.costs.per_stage(f"{name}_bytes", stages) for name in ("weight", "gradient", "optimizer")
        )
        return tuple(
            RankBytes(
                sum(weight[number] for number in here),
                sum(gradient[number] * trained[number] for number in here),
                sum(optimizer[number] * trained[number] for number in here),
                own_bytes[rank],
                whole[rank] - own_bytes[rank],
            )
            for rank, here in enumerate(each.stages for each in held_pairs)
        )

    def plan(self, profile: ModelProfile, optimizer: str) -> Plan:
        """Return the candidate as a plan."""
        starts = list(accumulate(self.cut.counts))[:-1]
        limited = self.stages.ranks.is_limited
        return Plan(
            profile.model,
            self.program,
            self.cut.counts,
            tuple(self.stages.profile.layers[start].name for start in starts),
            self.batch,
            self.rows,
            self.stages.recompute,
            self.seconds,
            self.rank_bytes,
            self.stages.ranks.limits if limited else None,
            optimizer,
            self.searched,
        )

    def why_not(self, best: Candidate) -> Remedy:
        """Return why another one was chosen, and how much of its step this one would save."""
        gain = 1 - self.step_seconds / best.step_seconds if best.step_seconds else 0.0
        return Remedy(self.program.name, self._against(best), gain)

    def _against(self, best: Candidate) -> str:
        if not self.fits:
            rank, size = self.over
            return f"rank {rank} is {size / _MIB:.1f} MiB over"
        if self.step_seconds <= best.step_seconds:
            more = self.peak - best.peak
            if more > EQUAL * best.peak:
                return f"<1% faster, but holds {more / _MIB:.1f} MiB more"
            if self.sent_bytes > best.sent_bytes:
                return f"<1% faster, but sends {(self.sent_bytes - best.sent_bytes) / _MIB:.1f} MiB more"
            return "<1% faster"
        item, more = lost_and_saved(best.seconds, self.seconds)[0][0]
        return _SAID[item].format(f"{more * 1e3:.1f} ms")

    def summary(self, best: Candidate | None = None) -> dict[str, Any]:
        """Return the candidate as plain values, with why `best` is better."""
        placement = self.program.placement
        summary = {
            "schedule": self.program.name,
            "searched": self.searched,
            "stages": self.program.num_stages,
            "placement": [list(placement.stages_of(rank)) for rank in range(self.program.num_ranks)],
            "microbatches": self.program.num_microbatches,
            "microbatch_size": self.rows,
            "counts": list(self.cut.counts),
            "checkpoint": ["full" if again else "none" for again in self.stages.recompute],
            "fits": self.fits,
            "step_seconds": self.step_seconds,
            "rank_bytes": list(self.cut.rank_bytes),
            "sent_bytes": self.sent_bytes,
        }
        return summary if best is None or best is self else {**summary, "why_not": str(self.why_not(best))}
