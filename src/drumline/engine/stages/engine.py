"""Run a step: the stages of this process's ranks, with one executor per rank for training and one for inference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Literal

import torch
from torch import nn

from drumline.channel.channel import Channel
from drumline.core.action import Op
from drumline.core.errors import ModelError, UsageError
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.core.state_actions import with_state
from drumline.engine.model.blocks import evaluating
from drumline.engine.program.find import forwards_of
from drumline.engine.program.programs import digest_of
from drumline.engine.ranks.crew import Crew
from drumline.engine.ranks.observer import Observer
from drumline.engine.stages.assembly import Assembly, split_of
from drumline.engine.stages.chain import Chain
from drumline.model.block import Block
from drumline.model.weights.tied import TiedCopies, Ties
from drumline.runtime.clocks import clock_for
from drumline.runtime.draft import Clock, Draft, NoClock
from drumline.runtime.execute.executor import Executor
from drumline.runtime.execute.jobs import Job
from drumline.runtime.gradients.lines import Shards, Sums
from drumline.runtime.stage import Stage
from drumline.runtime.stash import Scale
from drumline.runtime.step import Step

JobsOf = Callable[[Executor], Iterable[Job]]  # which jobs a step runs on a rank
WHOLE_ROWS: JobsOf = attrgetter("jobs")
Around = Callable[[], AbstractContextManager[object]]
Weighs = Literal["never", "first", "always"]  # in which steps executors count the bytes they hold


@dataclass(frozen=True, slots=True)
class Attachments:
    """What features change of an engine: what runs a row, what sums gradients over lines, what is around a step."""

    executor: type[Executor] = Executor
    summing: Callable[[Sequence[nn.Parameter]], Sums | None] = lambda parameters: None
    around: Sequence[Around] = ()


_NOTHING = Attachments()


class Lineup:
    """The executors of one program, and the microbatches whose backward each stage runs in halves."""

    def __init__(self, program: Program, executors: list[Executor]) -> None:
        self.program = program
        self.executors = executors
        self.evaluators: list[Executor] | None = None
        stages = {index for executor in executors for index in executor.stages}
        self.split = {index: split_of(program, index) for index in stages}

    @cached_property
    def forwards(self) -> Program:
        """The forwards alone, which evaluations run."""
        return forwards_of(self.program)


class Engine(Observer):
    """The executors of this process's ranks, built from an assembly of all ranks' stages."""

    runs_one_program = False  # because steps are captured

    def __init__(
        self,
        crew: Crew,
        assembly: Assembly,
        *,
        ahead: int,
        merge: bool,
        measure: bool,
        weigh: Weighs,
        attached: Attachments = _NOTHING,
    ) -> None:
        self._crew = crew
        self._attached = attached
        self._ahead = ahead
        self._weigh = weigh
        self._merge = merge
        self.assembly = assembly
        self.copies = self._copies()  # by rank, if all ranks are in this process
        clocks = [clock_for(assembly.device) if measure else NoClock() for _ in crew.channels]
        self.executors = [self._executor(*each) for each in zip(crew.channels, clocks, strict=True)]
        self.chain = self._chained()
        self.assembly = assembly.of_ranks(channel.rank for channel in crew.channels)
        self._note_stages()
        self._lineups = {0: Lineup(self.assembly.program, list(self.executors))}
        # What others know of errors: what to raise in place of one.
        self.explanations: list[Callable[[LookupError], ModelError | None]] = []
        self.number = 0  # of the program that runs
        self._has_trained = False
        # Whether overlapped pairs exchange tokens of one half while the other computes. All lines decide alike: in the
        # first step some of them may watch each half.
        self.takes_turns = crew.axes.size("ep") > 1 and crew.axes.size("cp") == 1 and weigh != "always"
        self.takes_turns &= not assembly.checkpointed

    def _note_stages(self) -> None:
        """Note the stages of this process, and which ends of the model it holds: "first", "last"."""
        self._stages = [stage for executor in self.executors for stage in executor.stages.values()]
        held_stages, last = {stage.index for stage in self._stages}, self.assembly.program.num_stages - 1
        self.ends = {end for end, at in (("first", 0), ("last", last)) if at in held_stages}

    def _copies(self) -> dict[int, TiedCopies]:
        """If all ranks are in this process, return each rank's copies of blocks that belong to another rank."""
        if not self._crew.alone:
            return {}
        ties, cuts = self.assembly.ties, self.assembly.cuts
        return {channel.rank: TiedCopies(channel.rank, ties, cuts) for channel in self._crew.channels}

    def _chained(self) -> Chain:
        """Return all blocks of the model, those of other processes without their memory."""
        cuts, placement = self.assembly.cuts, self.assembly.program.placement
        held_stages = {stage for channel in self._crew.channels for stage in placement.stages_of(channel.rank)}
        return Chain(cuts, held_stages, self.assembly.ties.first, self.assembly.device)

    def _executor(self, channel: Channel, clock: Clock, known: Mapping[int, Stage] | None = None) -> Executor:
        stages = self.assembly.stages_of(channel.rank, self.copies.get(channel.rank), known)
        return self._attached.executor(
            self.assembly.program,
            channel.rank,
            stages,
            channel,
            clock,
            merge_weight_gradients=self._merge,
            scale=None if self._weigh == "never" else Scale(stages.values()),
            ties=self.assembly.ties,
            reducer=self._attached.summing([param for stage in stages.values() for param in stage.parameters]),
        )

    def recut(self, counts: Sequence[int], program: Program, ties: Ties, number: int) -> None:
        """Give the stages so many blocks each, and run by the program of a number; all ranks call it.

        What comes here has its memory already.
        """
        ranks = [channel.rank for channel in self._crew.channels]
        held_stages = {stage for rank in ranks for stage in program.placement.stages_of(rank)}
        cuts = self.chain.cut(counts, held_stages)
        self.assembly = replace(self.assembly, program=lower(program, ahead=self._ahead), cuts=cuts, ties=ties)
        self.copies = self._copies()
        before = list(self.executors)
        for at, (channel, old) in enumerate(zip(self._crew.channels, before, strict=True)):
            self.executors[at] = executor = self._executor(channel, old.clock, old.stages)
            executor.takes_turns, executor.scale = old.takes_turns, executor.scale if old.scale is not None else None
            executor.replace_jobs()
        self._note_stages()
        self._lineups = {number: self._coded(Lineup(self.assembly.program, list(self.executors)), number)}
        self.number = number

    def divide(self, shards: Shards) -> None:
        """Divide the parameters of some stages between the lines of a mesh."""
        for executor in self.executors:
            executor.divide(shards)

    def divide_again(self, shards: Shards) -> None:
        """Divide the same parameters after layers have moved."""
        shards.recut({stage.index: stage.all_parameters for stage in self.stages()})
        self.divide(shards)

    @property
    def evaluators(self) -> list[Executor]:
        """The executors of the program's forwards alone."""
        lineup = self._lineups[self.number]
        if lineup.evaluators is None:
            forwards = lineup.forwards
            if Op.UNSHARD in lineup.program.columns.ops:
                divided = {action.stage for row in lineup.program.rows for action in row if action.op is Op.UNSHARD}
                forwards = with_state(forwards, frozenset({Op.UNSHARD, Op.RESHARD}), frozenset(divided), ahead=1)
            program = lower(forwards, ahead=self._ahead)
            each = [
                Executor(program, runner.rank, runner.stages, runner.channel, runner.clock, shards=runner.shards)
                for runner in self.executors
            ]
            for evaluator, executor in zip(each, self.executors, strict=True):
                evaluator.code = executor.code
            lineup.evaluators = each
        return lineup.evaluators

    @property
    def forwards(self) -> Program:
        """The program that evaluations run."""
        return self._lineups[self.number].forwards

    def run_by(self, number: int, program: Program) -> None:
        """Run the next steps with the program of a number; all ranks call it. Executors are created once."""
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
            executor.scale, executor.takes_turns = scale, self.takes_turns and self._has_trained
            executor.replace_jobs()

    def _lined_up(self, program: Program, number: int) -> Lineup:
        self.refuse(program)
        return self._coded(Lineup(program, [executor.running(program) for executor in self.executors]), number)

    @staticmethod
    def _coded(lineup: Lineup, number: int) -> Lineup:
        """Let every message say by which program it was sent, unless that is the first."""
        for executor in lineup.executors if number else ():
            executor.code = int(digest_of(lineup.program)[:2], 16)
        return lineup

    def refuse(self, program: Program) -> None:
        """Refuse a program that this process's stages cannot run."""
        compiled = self.assembly.compiler is not None
        if compiled and any(split_of(program, stage.index) and not stage.split for stage in self.stages()):
            raise UsageError(
                f"the program {program.name!r} splits the backward of stages that were compiled without a split",
                expected="backwards that the pipeline's own program splits too, or compile=False",
            )

    def run(self, step: Step, jobs_of: JobsOf = WHOLE_ROWS) -> None:
        """Run every rank of this process through the jobs of its row, in eval mode if the step does not train."""
        executors = self.executors if step.train else self.evaluators
        self.assembly.randomness.step = step.draw
        self.seed_lines()
        drafts = step.drafts or [Draft(executor.rank) for executor in executors]  # where nobody records
        with ExitStack() as stack:
            for around in self._attached.around:
                stack.enter_context(around())
            if not step.train:
                stack.enter_context(evaluating(block.module for block in self.blocks()))
            stack.enter_context(self._computing())
            runs = zip(executors, drafts, strict=True)
            try:
                self._crew.drive([executor.run(step, draft, jobs_of(executor)) for executor, draft in runs])
            except AttributeError as error:
                for copies in self.copies.values():
                    if (lack := copies.lacks(error)) is not None:
                        raise lack from error
                raise
            except LookupError as error:
                for explain in self.explanations:
                    if (refusal := explain(error)) is not None:
                        raise refusal from error
                raise

    @contextmanager
    def _computing(self) -> Iterator[None]:
        with (
            self.assembly.randomness.kept_aside(),
            # Running the backward in this thread avoids two thread switches per action.
            torch.autograd.set_multithreading_enabled(False),
            self.assembly.precision.step(),
            self._crew.running(),
        ):
            yield

    def between(self, what: str) -> None:
        """Pause or drain a program without a flush, on every rank of this process."""
        with self._computing():
            self._crew.drive([getattr(executor, what)(Draft(executor.rank)) for executor in self.executors])

    def seed_lines(self) -> None:
        """Let this line draw random numbers for its own microbatches; those with other parts of sequences, others."""
        self.assembly.randomness.first = self._crew.axes.tokens * self.assembly.program.num_units

    def weigh_next(self) -> None:
        """Count the bytes of the next step, in a pipeline that otherwise counts those of its first one alone."""
        if self._weigh == "first":
            for executor in self.executors:
                executor.scale = executor.scale or Scale(executor.stages.values())
                executor.replace_jobs()

    def end(self, step: Step) -> None:
        """Stop counting bytes after the first step, if only that step was requested; from now on, pairs take turns."""
        if not self._has_trained:
            self._has_trained = True
            self.take_turns(self.takes_turns)
        if self._weigh == "first":
            for executor in self.executors:
                if executor.scale is not None:
                    executor.scale = None
                    executor.replace_jobs()

    def take_turns(self, turns: bool) -> None:
        """Have overlapped pairs exchange tokens of one half while the other computes, or not."""
        self.takes_turns = turns
        for executor in self.executors:
            executor.takes_turns = turns
            executor.replace_jobs()

    def stages(self) -> list[Stage]:
        """Return the stages of this process, including second copies."""
        return self._stages

    def blocks(self) -> list[Block]:
        """Return the blocks of these stages."""
        return [block for stage in self._stages for block in stage.blocks]

    def renew(self) -> bool:
        """Adopt changes of the parameters since the last step; return whether there were any."""
        renewed = [stage.renew() for stage in self._stages]
        if any(renewed):
            for executor in self.executors:
                executor.exchange.renew()
        return any(renewed)

    @property
    def action(self) -> str:
        """The action that this process is running, if it is in the middle of a step."""
        return next((str(executor.current) for executor in self.executors if executor.current is not None), "")

    def parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of all stages here, including second copies."""
        return [param for stage in self.stages() for param in stage.parameters]
