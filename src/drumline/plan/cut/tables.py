"""Runs of a profiled chain's blocks as stages: seconds and bytes of many at once, as differences of prefix sums."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from drumline.core.action import Op
from drumline.core.program import Program
from drumline.core.simulate.graph import Floats, Ints
from drumline.plan.cut.peaks import PairSizes
from drumline.plan.device.blocks import Profile, Times
from drumline.plan.device.overheads import Overheads

OPS = (Op.FORWARD, Op.BACKWARD, Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)
FIELD = dict(zip(OPS, ("forward", "backward", "backward_input", "backward_weight"), strict=True))


class RunTable:
    """Runs of blocks from `firsts` to before `ends`, in arrays of any shape; all else has the same shape."""

    def __init__(self, profile: Profile, firsts: Ints, ends: Ints) -> None:
        self.profile, self.firsts, self.ends = profile, firsts, ends

    def _sum(self, values: Sequence[float]) -> Floats:
        sums = np.array(list(accumulate(values, initial=0.0)))
        found: Floats = sums[self.ends] - sums[self.firsts]
        return found

    def _of_layers(self, name: str) -> Floats:
        return self._sum([getattr(one, name) for one in self.profile.layers])

    def seconds(self, op: Op, *, split: float) -> Floats:
        """Return the seconds of an op, with what calling a stage adds; `split` is the share of backwards in halves."""

        def taken(times: Times) -> float:
            return times.forward_for(split=split) if op is Op.FORWARD else float(getattr(times, FIELD[op]))

        return self._sum([taken(one.times) for one in self.profile.layers]) + taken(self.profile.overhead)

    def handled(
        self,
        overheads: Overheads,
        speed: float | Floats,
        again: bool | npt.NDArray[np.bool_],
        *,
        earlier: float | Floats,
        later: float | Floats,
        split: float,
    ) -> Floats:
        """Return the seconds of each op with its handling, and of F where a backward runs it `again`, ops first.

        `speed` is that of the rank, `earlier` and `later` tell whether messages from and to it change ranks.
        """
        plain = {op: self.seconds(op, split=split) / speed for op in OPS}
        send, take, sent, received = overheads.send, overheads.take, self.sent, self.received
        # A stage sends its gradient where its input came from.
        back = plain[Op.FORWARD] * again + take.at(sent) * later + send.at(received) * earlier
        ahead = send.at(sent) * later + take.at(received) * earlier
        extra = dict(zip(OPS, (ahead, back, back, np.zeros_like(back)), strict=True))
        return np.stack([plain[op] + extra[op] + overheads.action for op in OPS])

    @cached_property
    def _outputs(self) -> Floats:
        return np.array([0.0, *(float(one.output_bytes) for one in self.profile.layers)])

    @property
    def sent(self) -> Floats:
        """What a run hands on; nothing where it is the last."""
        found: Floats = np.where(self.ends < len(self.profile.layers), self._outputs[self.ends], 0.0)
        return found

    @property
    def received(self) -> Floats:
        """What a run is handed; nothing where it is the first."""
        found: Floats = self._outputs[self.firsts]
        return found

    def _of_last(self, name: str) -> Floats:
        """Return a number of the last block of each run."""
        found: Floats = np.array([float(getattr(one, name)) for one in self.profile.layers])[self.ends - 1]
        return found

    def full(self, again: bool | npt.NDArray[np.bool_]) -> Floats:
        """Return what a pair holds in its backward."""
        start = np.array([float(one.start_bytes) for one in self.profile.layers])[self.firsts]
        found: Floats = self._of_layers("activation_bytes") + start + self._of_last("again_bytes") * again
        return found

    def kept(self, again: bool | npt.NDArray[np.bool_]) -> Floats:
        """Return what a pair holds until its backward."""
        found: Floats = np.where(again, self.received + self._of_last("checkpoint_bytes"), self.full(False))
        return found

    @property
    def until_weight(self) -> Floats:
        """What a pair holds from I to W."""
        return self._of_layers("held_until_weight_bytes")

    @property
    def gradient_bytes(self) -> Floats:
        """The gradients of a run."""
        return self._of_layers("gradient_bytes")

    def static(self, optimizer_states: int) -> Floats:
        """Return weights, gradients and optimizer state of a run, what is tied inside it once."""
        whole = self._of_layers("weight_bytes") + (1 + optimizer_states) * self.gradient_bytes
        for size, uses in self.tied(optimizer_states):
            whole = whole - size * np.maximum(uses - 1, 0.0)
        return whole

    def tied(self, optimizer_states: int) -> list[tuple[float, Floats]]:
        """Return, for every tied tensor, its bytes and how often a run holds it."""
        layers = self.profile.layers
        sizes = {name: w + (1 + optimizer_states) * g for one in layers for name, w, g in one.tied}
        return [
            (float(size), self._sum([any(name == each for each, _, _ in one.tied) for one in layers]))
            for name, size in sizes.items()
        ]


class CutTable:
    """Many cuts for one program; arrays are (cuts, stages), of ranks (cuts, ranks)."""

    def __init__(self, profile: Profile, program: Program, many: Sequence[Sequence[int]]) -> None:
        self.many = [tuple(counts) for counts in many]
        self.program = program
        ends = np.cumsum(np.array(self.many), axis=1)
        self.runs = RunTable(profile, np.concatenate([np.zeros((len(ends), 1), dtype=int), ends[:, :-1]], axis=1), ends)
        self._held = [list(program.placement.stages_of(rank)) for rank in range(program.num_ranks)]

    def _by_rank(self, of_stages: Floats) -> Floats:
        return np.stack([of_stages[:, stages].sum(axis=1) for stages in self._held], axis=1)

    @cached_property
    def gradients(self) -> Floats:
        """Every rank's bytes of gradients."""
        return self._by_rank(self.runs.gradient_bytes)

    def static(self, optimizer_states: int) -> Floats:
        """Return every rank's bytes of weights, gradients and optimizer state, what is tied once on each."""
        runs = self.runs
        whole = self._by_rank(runs._of_layers("weight_bytes")) + (1 + optimizer_states) * self.gradients
        for size, uses in runs.tied(optimizer_states):
            whole = whole - size * np.maximum(self._by_rank(uses) - 1, 0.0)
        return whole

    def sizes(self, recompute: Sequence[bool]) -> PairSizes:
        """Return what a pair of each stage holds."""
        again = np.array(recompute)[None, :]
        return PairSizes(self.runs.kept(again), self.runs.full(again), self.runs.until_weight)

    def seconds(self, overheads: Overheads, speeds: Floats, recompute: Sequence[bool], *, split: float) -> Floats:
        """Return the seconds of each op with its handling, (ops, cuts, stages)."""
        earlier, later = crossings(self.program)
        return self.runs.handled(overheads, speeds, np.array(recompute), earlier=earlier, later=later, split=split)


def crossings(program: Program) -> tuple[Floats, Floats]:
    """Return for every stage whether messages between it and the stage before it, and behind it, change ranks.

    >>> from drumline.schedules import generate
    >>> [ends.tolist() for ends in crossings(generate("zb-v", num_ranks=2, num_microbatches=2))]
    [[0.0, 1.0, 0.0, 1.0], [1.0, 0.0, 1.0, 0.0]]
    """
    crossed = np.array([a != b for a, b in pairwise(program.placement.homes)], dtype=float)
    return np.append(0.0, crossed), np.append(crossed, 0.0)
