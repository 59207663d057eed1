"""Run a step: the stages of this process's ranks, with one executor per rank for training and one for inference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from drumline.core.errors import RunError
from drumline.core.lower import lower
from drumline.core.program import Program
from drumline.pipeline.assembly import Assembly
from drumline.pipeline.crew import Crew
from drumline.pipeline.model.blocks import evaluating
from drumline.pipeline.observer import Observer
from drumline.pipeline.programs import forwards_of
from drumline.runtime.capture.capture import Capture
from drumline.runtime.capture.cuda import clock_for, recorder_for
from drumline.runtime.channel.channel import Channel
from drumline.runtime.draft import Draft, NoClock
from drumline.runtime.executor import Executor, Step
from drumline.runtime.stage import Stage
from drumline.runtime.stash import Scale
from drumline.runtime.weights.tied import Copies

Weighs = Literal["never", "first", "always"]  # in which steps executors count the bytes they hold


class Engine(Observer):
    """The executors of this process's ranks, built from an assembly of all ranks' stages."""

    def __init__(
        self, crew: Crew, assembly: Assembly, *, ahead: int, merge: bool, measure: bool, weigh: Weighs
    ) -> None:
        self._crew = crew
        self._ahead = ahead
        self._weigh = weigh
        self.assembly = assembly
        self.copies = self._copies()  # by rank, if all ranks are in this process
        self.executors = [self._executor(channel, merge, measure) for channel in crew.channels]
        self.assembly = assembly.of_ranks(channel.rank for channel in crew.channels)
        self.evaluators = self._evaluators()

    def _copies(self) -> dict[int, Copies]:
        """If all ranks are in this process, return each rank's copies of blocks that belong to another rank."""
        if not self._crew.alone:
            return {}
        ties, cuts = self.assembly.ties, self.assembly.cuts
        return {one.rank: Copies(one.rank, ties, cuts) for one in self._crew.channels}

    def _executor(self, channel: Channel, merge: bool, measure: bool) -> Executor:
        stages = self.assembly.stages_of(channel.rank, self.copies.get(channel.rank))
        return Executor(
            self.assembly.program,
            channel.rank,
            stages,
            channel,
            clock_for(self.assembly.device) if measure else NoClock(),
            merge_weight_gradients=merge,
            scale=None if self._weigh == "never" else Scale(stages.values()),
            ties=self.assembly.ties,
        )

    def _evaluators(self) -> list[Executor]:
        self.forwards = forwards_of(self.assembly.program)  # what evaluations run
        program = lower(self.forwards, ahead=self._ahead)
        return [Executor(program, one.rank, one.stages, one.channel, one.clock) for one in self.executors]

    def take_up(self, program: Program) -> None:
        """Switch to another program with the same stages on the same ranks; all ranks call it."""
        self.assembly = replace(self.assembly, program=lower(program, ahead=self._ahead))
        for stage in self.stages():
            stage.split_only(self.assembly.split_of(stage.index))
        self.executors[:] = [one.running(self.assembly.program) for one in self.executors]

    def run(self, step: Step) -> None:
        """Run every rank of this process through its row, in eval mode if the step does not train."""
        randomness, executors, drafts = self.assembly.randomness, self.executors, step.drafts
        randomness.step = step.draw
        if not step.train:
            executors = self.evaluators
            drafts = step.drafts or [Draft(executor.rank) for executor in executors]
        modules = (block.module for stage in self.stages() for block in stage.blocks)
        with (
            nullcontext() if step.train else evaluating(modules),
            randomness.kept_aside(),
            # Running the backward in this thread avoids two thread switches per action.
            torch.autograd.set_multithreading_enabled(False),
            self.assembly.precision.step(),
        ):
            self._crew.drive([one.run(step, draft) for one, draft in zip(executors, drafts, strict=True)])

    def end(self, step: Step) -> None:
        """Stop counting bytes after the first step, if only that step was requested."""
        if self._weigh == "first":
            for executor in self.executors:
                executor.scale = None

    def stages(self) -> Iterator[Stage]:
        """Yield the stages of this process, including second copies."""
        for executor in self.executors:
            yield from executor.stages.values()

    def renew(self) -> bool:
        """Adopt changes of the parameters since the last step; return whether there were any."""
        renewed = [stage.renew() for stage in self.stages()]
        if any(renewed):
            for executor in self.executors:
                executor.exchange.renew()
        return any(renewed)

    @property
    def ends(self) -> set[str]:
        """Which ends of the model this process holds: "first", "last"."""
        held = {stage.index for stage in self.stages()}
        return {end for end, at in (("first", 0), ("last", self.assembly.program.num_stages - 1)) if at in held}

    @property
    def action(self) -> str:
        """The action that this process is running, if it is in the middle of a step."""
        return next((str(one.current) for one in self.executors if one.current is not None), "")

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of all stages here, including second copies."""
        return [one for stage in self.stages() for one in stage.parameters]


class CapturingEngine(Engine):
    """An engine that captures steps as CUDA graphs and replays them while they stay the same on all ranks."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.captured = self._capture()

    def _capture(self) -> Capture:
        recorder, agree = recorder_for(self.assembly.device), partial(self._crew.collect, "capture")
        return Capture(self.executors, self.assembly.randomness, recorder, agree)

    def take_up(self, program: Program) -> None:
        """Switch to another program, and capture it again."""
        super().take_up(program)
        self.captured = self._capture()

    def called(self, step: Step) -> None:
        """Refuse requests that a graph cannot serve."""
        if step.wants_outputs:
            raise RunError("a captured step cannot return outputs", expected="outputs=False", fix="use capture=False")

    def taken(self, step: Step) -> None:
        """Decide with all other ranks whether the step can be replayed."""
        step.repeats = self.captured.fits(step)

    def run(self, step: Step) -> None:
        """Replay a training step from graphs, or capture it while it runs."""
        if not step.train:
            super().run(step)
        else:
            self.assembly.randomness.step = step.draw
            self.captured.run(step, step.drafts, self._crew.drive)
