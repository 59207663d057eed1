"""What runs a step: this process's ranks with their stages, one executor each for training and for forwards alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from drumline.core.errors import RunError, UsageError
from drumline.core.lower import lower
from drumline.core.program import Program
from drumline.pipeline.assembly import Assembly, split_of
from drumline.pipeline.crew import Crew
from drumline.pipeline.lengths.programs import digest_of
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

Weighs = Literal["never", "first", "always"]  # the steps in which executors weigh what they hold


class Lineup:
    """The executors of one program, and the microbatches whose backward each stage runs in halves."""

    def __init__(self, program: Program, executors: list[Executor]) -> None:
        self.program = program
        self.executors = executors
        self.evaluators: list[Executor] | None = None
        stages = {index for one in executors for index in one.stages}
        self.split = {index: split_of(program, index) for index in stages}


class Engine(Observer):
    """The executors of this process's ranks, made from an assembly of all ranks' stages."""

    runs_one_program = ""  # why all steps run by one program

    def __init__(
        self, crew: Crew, assembly: Assembly, *, ahead: int, merge: bool, measure: bool, weigh: Weighs
    ) -> None:
        self._crew = crew
        self._ahead = ahead
        self._weigh = weigh
        self.assembly = assembly
        self.copies = self._copies()  # by rank, where all live in this process
        self.executors = [self._executor(channel, merge, measure) for channel in crew.channels]
        self.assembly = assembly.of_ranks(channel.rank for channel in crew.channels)
        self._lineups = {0: Lineup(self.assembly.program, list(self.executors))}
        self.number = 0  # of the program that runs

    def _copies(self) -> dict[int, Copies]:
        """Return, where all ranks live in this process, each one's copies of what is at home on another."""
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

    @property
    def evaluators(self) -> list[Executor]:
        """The executors of the program's forwards alone."""
        lineup = self._lineups[self.number]
        if lineup.evaluators is None:
            program = lower(forwards_of(lineup.program), ahead=self._ahead)
            each = [Executor(program, one.rank, one.stages, one.channel, one.clock) for one in self.executors]
            for evaluator, executor in zip(each, self.executors, strict=True):
                evaluator.code = executor.code
            lineup.evaluators = each
        return lineup.evaluators

    def take_up(self, program: Program) -> None:
        """Go on by another program with the same stages in the same places, alike on all ranks."""
        self._lineups = {}
        self.run_by(0, program)

    def run_by(self, number: int, program: Program) -> None:
        """Run the next steps by the program of a number, alike on all ranks; what it needs is made once."""
        lineup = self._lineups.get(number)
        if lineup is None:
            lineup = self._lineups[number] = self._lined_up(lower(program, ahead=self._ahead), number)
        scales = [executor.scale for executor in self.executors]
        self.number = number
        self.assembly = replace(self.assembly, program=lineup.program)
        for stage in self.stages():
            stage.split_only(lineup.split[stage.index])
        self.executors[:] = lineup.executors
        for executor, scale in zip(self.executors, scales, strict=True):
            executor.scale = scale

    def _lined_up(self, program: Program, number: int) -> Lineup:
        executors = [one.running(program) for one in self.executors]
        lineup = Lineup(program, executors)
        if number:
            for executor in executors:
                executor.code = int(digest_of(program)[:2], 16)
        compiled = self.assembly.compiler is not None
        if compiled and any(lineup.split[one.index] and not one.split for one in self.stages()):
            raise UsageError(
                f"the program {program.name!r} splits backwards of stages that are compiled without",
                expected="backwards that the pipeline's own program splits too, or compile=False",
            )
        return lineup

    def run(self, step: Step) -> None:
        """Run every rank of this process through its row, that of a step without training in eval mode."""
        randomness, executors, drafts = self.assembly.randomness, self.executors, step.drafts
        randomness.step = step.number
        if not step.train:
            executors, drafts = self.evaluators, [Draft(executor.rank) for executor in self.evaluators]
        modules = (block.module for stage in self.stages() for block in stage.blocks)
        with (
            nullcontext() if step.train else evaluating(modules),
            randomness.kept_aside(),
            # A backward that runs in this very thread saves handing it to another and back, for every action.
            torch.autograd.set_multithreading_enabled(False),
            self.assembly.precision.step(),
        ):
            self._crew.drive([one.run(step, draft) for one, draft in zip(executors, drafts, strict=True)])

    def end(self, step: Step) -> None:
        """Weigh no more after the first step, if that was all that was asked for."""
        if self._weigh == "first":
            for executor in self.executors:
                executor.scale = None

    def stages(self) -> Iterator[Stage]:
        """Yield the stages of this process, second copies included."""
        for executor in self.executors:
            yield from executor.stages.values()

    def renew(self) -> bool:
        """Follow what happened to the parameters since the last step; returns whether anything did."""
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
        """The action that this process is at, if it is in the middle of a step."""
        return next((str(one.current) for one in self.executors if one.current is not None), "")

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of all stages here, second copies included."""
        return [one for stage in self.stages() for one in stage.parameters]


class CapturingEngine(Engine):
    """The same, with steps captured as graphs and replayed as long as they stay alike on all ranks."""

    runs_one_program = "capture=True"

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.captured = self._capture()

    def _capture(self) -> Capture:
        recorder, agree = recorder_for(self.assembly.device), partial(self._crew.collect, "capture")
        return Capture(self.executors, self.assembly.randomness, recorder, agree)

    def take_up(self, program: Program) -> None:
        """Go on by another program, which is captured anew."""
        super().take_up(program)
        self.captured = self._capture()

    def called(self, step: Step) -> None:
        """Refuse what graphs do not leave behind."""
        if step.wants_outputs:
            raise RunError("outputs of a captured step", expected="a step that runs as ever", fix="use capture=False")

    def taken(self, step: Step) -> None:
        """Note whether the step can be replayed; asks all other ranks."""
        step.repeats = self.captured.fits(step)

    def run(self, step: Step) -> None:
        """Run a step that trains by graphs, or have it captured on its way."""
        if not step.train:
            super().run(step)
        else:
            self.assembly.randomness.step = step.number
            self.captured.run(step, step.drafts, self._crew.drive)
