"""An engine whose steps are captured as CUDA graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from drumline.core.errors import RunError
from drumline.core.program import Program
from drumline.engine.stages.engine import WHOLE_ROWS, Engine, JobsOf
from drumline.features.capture.capture import Capture
from drumline.features.capture.cuda import recorder_for
from drumline.model.weights.tied import Ties
from drumline.runtime.draft import Draft
from drumline.runtime.step import Step


class CapturingEngine(Engine):
    """An engine that captures steps as CUDA graphs and replays them while they stay the same on all ranks."""

    runs_one_program = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.repeats = False  # whether the training step replays graphs, the same on all ranks: no need to split it
        self.captured = self._capture()

    def _capture(self) -> Capture:
        recorder, agree = recorder_for(self.assembly.device), partial(self._crew.collect, "capture")
        return Capture(self.executors, self.assembly.randomness, recorder, agree)

    def run_by(self, number: int, program: Program) -> None:
        """Switch to another program, and capture it again."""
        super().run_by(number, program)
        self.captured = self._capture()

    def recut(self, counts: Sequence[int], program: Program, ties: Ties, number: int) -> None:
        """Give the stages other blocks, and capture them again."""
        super().recut(counts, program, ties, number)
        self.captured = self._capture()

    def at_call(self, step: Step) -> None:
        """Refuse requests that a graph cannot serve."""
        if step.wants_outputs:
            raise RunError("a captured step cannot return outputs", expected="outputs=False", fix="use capture=False")

    def taken(self, step: Step) -> None:
        """Decide with all other ranks whether the step can be replayed."""
        self.repeats = self.captured.fits(step)

    def run(self, step: Step, jobs_of: JobsOf = WHOLE_ROWS) -> None:
        """Replay a training step from graphs, or capture it while it runs."""
        if not step.train:
            super().run(step, jobs_of)
        else:
            self.assembly.randomness.step = step.draw
            drafts = step.drafts or [Draft(executor.rank) for executor in self.executors]
            self.captured.run(step, drafts, self._crew.drive)
