"""The microbatches that the whole model runs for a checked step: cut here, or passed on by the ranks that have them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from drumline.engine.ranks.crew import Crew
from drumline.engine.stages.intake import Intake
from drumline.engine.unsplit.parts import Parts
from drumline.engine.unsplit.unsplit_step import UnsplitMicrobatch
from drumline.features.check.units.units import Units
from drumline.model.loss.factors import Factors
from drumline.model.values import moved, pack
from drumline.runtime.step import Step

_HOST = torch.device("cpu")


def chosen(counts: Sequence[float], copies: Sequence[int], num_microbatches: int) -> list[int]:
    """Return the microbatches to look at, of those that count most: the first, or the middle one of every copy.

    If stages have copies, microbatches in different copies overtake each other, mostly in the middle of a step. A value
    that a block leaves for a later one then belongs to another microbatch.

    >>> chosen([0, 1, 1, 1], [0, 0, 0, 0], 2), chosen([1], [0], 2), chosen([1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1], 2)
    ([1, 2], [0], [1, 4])
    """
    if not counts:
        return [0]
    first = counts.index(max(counts))
    if len(set(copies)) == 1:
        rest = [at for at in (*range(first + 1, len(counts)), *range(first)) if counts[at] > 0]
        return sorted([first, *rest[: num_microbatches - 1]])
    middles = [_middle(counts, [at for at, copy in enumerate(copies) if copy == n]) for n in dict.fromkeys(copies)]
    return sorted([at for at in middles if counts[at] > 0][:num_microbatches]) or [first]


def _middle(counts: Sequence[float], places: Sequence[int]) -> int:
    most = max(counts[at] for at in places)
    places_with_most = [at for at in places if counts[at] == most]
    return places_with_most[len(places_with_most) // 2]


def likely(targets: Sequence[Any]) -> list[float]:
    """Return 1 for targets in which something seems to count, 0 for others: their values tell most.

    What a loss counts may be known only once it has run. A microbatch without it would tell nothing of the model.

    >>> likely([torch.tensor([-100, -100]), torch.tensor([3, -100])])
    [0.0, 1.0]
    """
    amounts = [
        sum(int((value != value.flatten()[0]).any()) + int(value.any()) for value in pack(target)[0] if value.numel())
        for target in targets
    ]
    return [float(number == max(amounts)) for number in amounts]


@dataclass(frozen=True)
class StepSample:
    """What this process was given for a step; `sequences` are batch and target with whole ones, if lines have parts.

    `copies` says by which copy of the stages each microbatch runs, and `num_microbatches` how many are looked at. Where
    microbatches run in several units, they have the numbers of their first.
    """

    crew: Crew
    intake: Intake
    parts: Parts
    number: int
    arguments: Any
    target: Any
    sequences: tuple[Any, Any] | None
    copies: Sequence[int]
    num_microbatches: int

    def cut(self) -> list[UnsplitMicrobatch] | None:
        """Return microbatches that count, where this rank was given all of them."""
        if self.arguments is None or (self.target is None and not self.intake.has_own_loss):
            return None
        step, places = self._taken({"first", "last"})
        return [self._with_sequences(self._microbatch(step, at), step) for at in places]

    def _microbatch(self, step: Step, at: int) -> UnsplitMicrobatch:
        arguments = step.inputs[at], step.targets[at], float(step.shares[at]), self.intake.factors_of(at)
        return UnsplitMicrobatch(at, *arguments, seen_share=lambda: float(step.shares[at]))

    def passed_on(self, ends: Collection[str]) -> list[UnsplitMicrobatch]:
        """Return microbatches of which ranks have only parts: the last stage's rank chooses them, the first's has them.

        All ranks call it; `ends` are those of the pipeline that are in this process.
        """
        step, places = self._taken(ends)
        chosen = None
        if "last" in ends:
            each = [
                UnsplitMicrobatch(at, None, step.targets[at], float(step.shares[at]), self.intake.factors_of(at))
                for at in places
            ]
            each = [self._with_sequences(microbatch, step) for microbatch in each]
            chosen = [(sent.number, moved(sent.target, _HOST), sent.share, sent.factors) for sent in each]
        target = next(value for value in self.crew.collect("check target", chosen) if value is not None)
        first = None
        if "first" in ends:
            each = [UnsplitMicrobatch(at, step.inputs[at], None, share) for at, _, share, _ in target]
            first = [moved(self._with_sequences(microbatch, step).inputs, _HOST) for microbatch in each]
        inputs = next(value for value in self.crew.collect("check input", first) if value is not None)
        pairs = zip(target, inputs, strict=True)
        return [UnsplitMicrobatch(at, value, wanted, share, factors) for (at, wanted, share, factors), value in pairs]

    def _taken(self, ends: Collection[str]) -> tuple[Step, list[int]]:
        """Return the step, cut into microbatches, and those of them that are looked at."""
        step = Step(self.number)
        self.intake.take(step, self.arguments, self.target, ends, self.crew)
        self.intake.cut(step)
        counts = self.parts.counts(
            likely(step.targets) if self.intake.is_open and step.targets else step.shares, self.intake.device
        )
        each = self.intake.num_slices
        together = [sum(counts[at : at + each]) for at in range(0, len(counts), each)]
        return step, [at * each for at in chosen(together, self.copies[::each], self.num_microbatches)]

    def _with_sequences(self, sent: UnsplitMicrobatch, step: Step) -> UnsplitMicrobatch:
        """Return a microbatch with whole sequences, if lines of a mesh or units of a step have parts of them.

        The step's order says which of the given microbatches runs in each slot, if that was chosen.
        """
        if self.sequences is None:
            return sent
        batch, target = self.sequences
        at = (step.order[sent.number] if step.order else sent.number) // self.intake.num_slices
        inputs = None if sent.inputs is None else self.intake.cut_batch(batch)[at]
        if sent.target is not None:
            own_values = batch if self.intake.has_own_loss else target
            targets = self.intake.cut_batch(own_values, what="the batch" if self.intake.has_own_loss else "the target")
            factors: Factors = ()
            if self.intake.has_own_loss:
                units = Units(sent.number, self.intake.num_slices)
                mine = units.factors(step, {number: self.intake.factors_of(number) for number in units.numbers})
                factors = self.parts.factors(sent.share, mine, self.intake.device)
            sent = replace(sent, target=targets[at], factors=factors)
        # What part of the loss whole sequences are is known after the step, when all lines have counted theirs.
        return replace(sent, inputs=inputs, share=1.0 / self.intake.num_microbatches, seen_share=None)
