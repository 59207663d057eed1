"""The microbatch that the whole model runs for the first step: cut here, or passed on by the ranks that have it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from drumline.pipeline.check.lines import LineParts
from drumline.pipeline.crew import Crew
from drumline.pipeline.intake import Intake
from drumline.pipeline.verify.plain_step import Slice
from drumline.runtime.step import Step
from drumline.runtime.values import moved

_HOST = torch.device("cpu")


@dataclass(frozen=True)
class Sample:
    """What this process was given for a step; `sequences` are batch and target with whole ones, if lines have parts."""

    crew: Crew
    intake: Intake
    parts: LineParts
    number: int
    called: Any
    target: Any
    sequences: tuple[Any, Any] | None

    def cut(self) -> Slice | None:
        """Return a microbatch that counts, where this rank was given all of it."""
        if self.called is None or (self.target is None and not self.intake.own):
            return None
        step, at = self._taken({"first", "last"})
        given = step.inputs[at], step.targets[at], float(step.shares[at]), self.intake.factors_of(at)
        return self._with_sequences(Slice(at, *given, seen_share=lambda: float(step.shares[at])), step.order)

    def passed_on(self, ends: Collection[str]) -> Slice:
        """Return a microbatch of which ranks have only parts: the last stage's rank chooses it, the first's has it.

        All ranks call it; `ends` are those of the pipeline that are in this process.
        """
        step, at = self._taken(ends)
        chosen = None
        if "last" in ends:
            given = Slice(at, None, step.targets[at], float(step.shares[at]), self.intake.factors_of(at))
            given = self._with_sequences(given, step.order)
            chosen = at, moved(given.target, _HOST), given.share, given.factors
        told = self.crew.collect("check target", chosen)
        microbatch, wanted, share, factors = next(one for one in told if one is not None)
        first = None
        if "first" in ends:
            given = self._with_sequences(Slice(microbatch, step.inputs[microbatch], None, share), step.order)
            first = moved(given.inputs, _HOST)
        inputs = next(one for one in self.crew.collect("check input", first) if one is not None)
        return Slice(microbatch, inputs, wanted, share, factors)

    def _taken(self, ends: Collection[str]) -> tuple[Step, int]:
        """Return the step, cut into microbatches, and the first of them that counts."""
        step = Step(self.number)
        self.intake.take(step, self.called, self.target, ends, self.crew.called.one(self.crew.rank))
        self.intake.cut(step)
        return step, self.parts.first(step.shares, self.intake.device)

    def _with_sequences(self, given: Slice, order: Sequence[int]) -> Slice:
        """Return a microbatch with whole sequences, if lines of a mesh have parts of them.

        `order` says which of the given microbatches runs in each slot, if that was chosen.
        """
        if self.sequences is None:
            return given
        batch, target = self.sequences
        at = order[given.microbatch] if order else given.microbatch
        inputs = None if given.inputs is None else self.intake.cut_batch(batch)[at]
        if given.target is not None:
            own = batch if self.intake.own else target
            targets = self.intake.cut_batch(own, what="the batch" if self.intake.own else "the target")
            given = replace(given, target=targets[at])
        # What part of the loss whole sequences are is known after the step, when all lines have counted theirs.
        return replace(given, inputs=inputs, share=1.0 / self.intake.num_microbatches, seen_share=None)
