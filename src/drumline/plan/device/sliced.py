"""Candidates in slices of sequences: where microbatches are few, slices fill the pipeline instead.

A candidate's cut is the best of three: that of the candidate that it divides, the most even one by time, and by numbers
of blocks. Its slices take the parts of a whole sequence's seconds that the profile's curve says, so what short slices
cost enters the objective. Its peak is that of the simulator: slices held, and the gradients of keys and values that
backwards add up.

    tried     schedules with a formula for slices      2, 4, 8, ... slices, not shorter than any that was measured
    lengths   equal, and those that take the same time
    where     M is below 4 P, every block trains, and lengths of slices are known: the profile has slices
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from drumline.core.costs import Costs, PerSlice
from drumline.core.errors import ScheduleError
from drumline.core.graph import Floats
from drumline.core.memory import holdings
from drumline.core.program import Program
from drumline.core.simulate.simulate import makespans, simulate
from drumline.plan.cut.cuts import Counts, even_cut, shortest_largest
from drumline.plan.cut.timed import TimedCuts
from drumline.plan.device.candidate import Candidate
from drumline.plan.device.combinations import Question
from drumline.plan.device.model_profile import ModelProfile
from drumline.plan.device.plan import Plan, RankBytes, StepSeconds
from drumline.plan.device.slice_profile import SliceProfile
from drumline.plan.device.stages import Stages
from drumline.plan.slices.lengths import equal_lengths, shortest_longest
from drumline.plan.slices.orders import NUMBERS, are_few, is_tried
from drumline.schedules import find

_MULTIPLES = (64, 16, 1)  # of tokens, the largest that leaves slices some choice
_CHOICE = 4  # so many multiples in a slice


@dataclass(frozen=True)
class SlicedStages(Stages):
    """The stages of a program in slices of these lengths."""

    slices: SliceProfile | None = None
    lengths: tuple[int, ...] = ()
    rows: int = 1

    @cached_property
    def cuts(self) -> TimedCuts:
        """The cuts, with what the simulator says that ranks hold."""
        plain = super().cuts
        return _SlicedCuts(plain.blocks, plain.program, plain.steps, plain.limits, plain.recompute, self)

    def costs(self, counts: Counts, *, messages: bool = True, split: float | None = None) -> Costs:
        """Return the costs of whole microbatches and the parts of each slice."""
        assert self.slices is not None, "slices were profiled"
        plain = super().costs(counts, messages=messages, split=split)
        bytes_of_block = self.slices.key_value_bytes * self.rows / self.slices.rows / sum(counts)
        return replace(
            plain,
            slice_lengths=tuple(map(float, self.lengths)),
            slice_factor=self._factors(self.slices, counts),
            key_value_bytes=[bytes_of_block * count for count in counts],
        )

    def _factors(self, slices: SliceProfile, counts: Counts) -> PerSlice:
        """Return the part of each slice, in each stage if blocks were measured by slice length."""
        action, call = self.overheads.action, self.profile.overhead
        if not slices.knows_blocks(counts):
            # What every action takes, however short, once for F and once for B of each stage, as a part of the model's.
            own_overhead = action + (call.forward + call.backward) / 2
            return slices.factors(self.lengths, more=2 * len(counts) * own_overhead)
        curves = slices.stage_curves(counts)  # with the calls of stages
        return [slices.factors(self.lengths, more=2 * action, curve=curve) for curve in curves]

    def _steps(self, program: Program, many: Sequence[Counts]) -> Floats:
        each = [self.costs(counts) for counts in many]
        around = np.array([self.around(costs, program) for costs in each])
        steps: Floats = makespans(program, each) + around
        return steps


@dataclass(frozen=True)
class _SlicedCuts(TimedCuts):
    """Cuts whose ranks hold slices."""

    stages: SlicedStages | None = None

    def _weighed(self, program: Program, cuts: Sequence[Counts]) -> list[tuple[tuple[float, ...], float]]:
        assert self.stages is not None, "cuts of slices have stages"
        weighed = []
        for counts in cuts:
            peaks = [rank.peak_bytes or 0.0 for rank in holdings(program, self.stages.costs(counts))]
            over = [max(peak / limit - 1.0, 0.0) for peak, limit in zip(peaks, self.limits, strict=True)]
            weighed.append((tuple(peaks), max(over)))
        return weighed


@dataclass(frozen=True)
class SlicedCandidate(Candidate):
    """A candidate whose microbatches run in slices."""

    lengths: tuple[int, ...] = ()

    @cached_property
    def seconds(self) -> StepSeconds:
        """The step, item by item; what short slices take more counts as the executor's."""
        ranks = self.program.num_ranks
        bare = self.stages.costs(self.cut.counts, messages=False)
        with_messages, free = self.timeline(), simulate(self.program, bare)
        plain = replace(bare, slice_factor=None)
        whole = sum(simulate(self.program, plain).busy) / ranks
        no_again = replace(plain, recompute=False)
        compute = sum(simulate(self.program, no_again).busy) / ranks
        busy = sum(free.busy) / ranks
        return StepSeconds(
            compute=compute,
            recompute=whole - compute,
            executor=busy - whole,
            communication=with_messages.makespan - free.makespan,
            bubble=free.makespan - busy,
            around=self.step_seconds - with_messages.makespan,
        )

    @cached_property
    def rank_bytes(self) -> tuple[RankBytes, ...]:
        """Every rank's peak; activations include what came from other stages, and gradients of keys and values."""
        costs, stages = self.costs, self.program.num_stages
        weight, gradient, optimizer = (
            costs.per_stage(f"{name}_bytes", stages) for name in ("weight", "gradient", "optimizer")
        )
        entries = []
        for rank, holding in enumerate(holdings(self.program, costs)):
            here = self.program.placement.stages_of(rank)
            weights, gradients, states = (sum(each[stage] for stage in here) for each in (weight, gradient, optimizer))
            activations = (holding.peak_bytes or 0.0) - weights - gradients - states
            entries.append(RankBytes(weights, gradients, states, activations, 0.0))
        return tuple(entries)

    def plan(self, profile: ModelProfile, optimizer: str) -> Plan:
        """Return the candidate as a plan with the lengths of its slices."""
        return replace(super().plan(profile, optimizer), slices=self.lengths)

    @property
    def name(self) -> str:
        """The schedule and its slices."""
        is_equal = len(set(self.lengths)) == 1
        return self.program.name if is_equal else f"{self.program.name} of {' '.join(map(str, self.lengths))} tokens"

    def summary(self, best: Candidate | None = None) -> dict[str, object]:
        """Return the candidate as plain values, with the tokens of its slices."""
        return super().summary(best) | {"slices": list(self.lengths)}


def sliced_candidates(question: Question, candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """Yield candidates in slices, for each of these that has few microbatches and the best cut of its schedule."""
    profile = question.profile.slices
    if profile is None or not all(layer.trains or not layer.weight_bytes for layer in question.profile.layers):
        return
    done = set[tuple[object, ...]]()
    for candidate in candidates:
        program = candidate.program
        key = (program, candidate.rows, candidate.stages.recompute)
        if not is_tried(program.name) or not are_few(program) or key in done:
            continue
        done.add(key)
        for lengths in lengths_of(profile):
            divided = _divided(program, len(lengths))
            if divided is not None:
                yield _sliced(question, candidate, divided, profile, lengths)


def lengths_of(profile: SliceProfile) -> list[tuple[int, ...]]:
    """Return the lengths to try: equal ones, and those that take the same time, none shorter than was measured.

    >>> from drumline.plan.device.slice_profile import TimedSlice
    >>> timed = [TimedSlice(0, 128, 4.0, 8.0), TimedSlice(0, 64, 1.5, 3.0), TimedSlice(64, 128, 2.5, 5.0)]
    >>> lengths_of(SliceProfile(1, 128, tuple(timed)))
    [(64, 64)]
    >>> timed.append(TimedSlice(0, 32, 0.7, 1.4))
    >>> lengths_of(SliceProfile(1, 128, tuple(timed)))
    [(64, 64), (80, 48), (32, 32, 32, 32)]
    """
    lengths = []
    for number in NUMBERS:
        if profile.tokens // number < profile.shortest or profile.tokens % number:
            continue
        lengths.append(equal_lengths(profile.tokens, number))
        each = profile.tokens // number
        multiple = next(m for m in _MULTIPLES if m == 1 or (profile.tokens % m == 0 and each >= _CHOICE * m))
        even = shortest_longest(profile.curve, profile.tokens, number, multiple)[0]
        if min(even) >= profile.shortest:
            lengths.append(even)
    return list(dict.fromkeys(lengths))


def _divided(program: Program, num_slices: int) -> Program | None:
    """Return the program of the same schedule in slices; None if it is another order, or has none."""
    per_rank = program.num_stages // program.num_ranks
    try:
        plain = find(program.name).build(program.num_ranks, program.num_microbatches, per_rank)
        if plain.rows != program.rows:  # ranks in another order, or whole backwards in a schedule that splits them
            return None
        return find(program.name).build(program.num_ranks, program.num_microbatches, per_rank, slices=num_slices)
    except ScheduleError:
        return None


def _sliced(
    question: Question, candidate: Candidate, program: Program, profile: SliceProfile, lengths: tuple[int, ...]
) -> Candidate:
    stages = candidate.stages
    sliced_stages = SlicedStages(
        stages.profile,
        program,
        stages.ranks,
        stages.overheads,
        stages.recompute,
        stages.optimizer_states,
        profile,
        lengths,
        candidate.rows,
    )
    even = even_cut(len(stages.profile.layers), program.num_stages)
    cuts = candidate.cut.counts, even, shortest_largest(sliced_stages.tables()), shortest_largest(stages.tables())
    timed_cuts = sliced_stages.cuts.timed([counts for counts in dict.fromkeys(cuts) if counts is not None])
    cut = min(timed_cuts, key=lambda timed_cut: timed_cut.order)
    return SlicedCandidate(sliced_stages, cut, candidate.rows, question.batch, lengths=lengths)
