"""Adapt a running pipeline: rank 0 looks at each step and decides, and all ranks change alike before the next one.

    step n ends      every rank tells all others what it measured
    before n+1       rank 0 looks at step n, and tells all ranks what to change, if anything
                     all ranks take up a program, or move layers, and continue

Deciding is `drumline.adapt`, which knows no pipeline. What was decided, and what came of it, goes to stderr and to the
run's folder.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

from drumline.adapt.decide import Decider
from drumline.adapt.microbatches import Build
from drumline.adapt.proposal import CUT, Arrangement, Proposal
from drumline.adapt.rebalance import Layers, guessed
from drumline.adapt.settings import BATCH, Adapt
from drumline.core.errors import DrumlineError, ModelError, RunError, UsageError
from drumline.core.program import Program
from drumline.core.prove.validate import validate
from drumline.core.prove.violation import InvalidProgram
from drumline.core.timeline.idle import Limit
from drumline.engine.ranks.observer import Observer
from drumline.engine.site import Site
from drumline.engine.stages.assembly import LossHolder
from drumline.model.block import Block
from drumline.model.blocks.cut import guessed_costs
from drumline.model.quantised.packed import num_bytes
from drumline.plan.device.blocks import Profile
from drumline.runtime.step import CalledWith, Step
from drumline.schedules import generate, schedules

_EVERY = 4  # steps between two looks if several lines of a mesh have to agree


class Adapting(Observer):
    """Watches the steps of a pipeline on the first rank, and changes it on all of them."""

    order: ClassVar[int] = -2  # what is changed before a step is what others see of it

    def __init__(self, settings: Adapt, site: Site, decider: Decider | None, build: Build | None = None) -> None:
        self.settings = settings
        self._build = build if settings.microbatches == BATCH else None
        self._first_number = site.frozen.program.num_microbatches
        self._num_rows = 0  # of the batch of this step, as far as this rank knows
        self._fewer: dict[int, Program | None] = {}  # programs for batches of few rows
        self._crew, self._ledger, self._recording, self._engine = site.crew, site.ledger, site.recording, site.engine
        self._site = site
        self.is_paused = False  # whether something else decides meanwhile
        self._decider = decider
        self._every = _EVERY if self._crew.axes.is_mesh else 1
        self._last_step = -1  # the last step that was looked at
        self._own_program = 0  # the number of the pipeline's own program
        self._num_judged = 0
        self._changes_now = False  # whether what is heard of a change was decided here

    def take_call(self, step: Step, call: CalledWith) -> CalledWith:
        """See how many rows the batch has; an evaluation of few rows runs by a program for itself."""
        if self._build is not None:
            self._num_rows = self._site.intake.num_rows(call)
            if not step.train and step.program == self._site.programs.own_number:
                self._find_instead(step)
                if step.instead is not None:
                    self._site.choice.run_instead(step)
        return call

    def before(self, step: Step) -> None:
        """Change what the first rank decides, before a step; a batch of few rows gets a program for itself."""
        self._decide(step)
        self._find_instead(step)

    def _find_instead(self, step: Step) -> None:
        """Find a program for a batch of fewer rows than microbatches, if these are more than the user asked for."""
        program = self._site.programs[self._site.programs.own_number]
        if self._build is None or program.num_microbatches <= self._first_number:
            return  # all ranks know this alike
        with self._recording.between.during("hear"), self._crew.together("adapting"):
            known = [rows for rows in self._crew.everywhere("rows", self._num_rows) if rows]
        if not known or min(known) >= program.num_microbatches:
            return
        for number in range(min(known), 0, -1):
            if number not in self._fewer:
                self._fewer[number] = self._build(number)
            if self._fewer[number] is not None:
                step.instead = self._fewer[number]
                return

    def _decide(self, step: Step) -> None:
        if self.is_paused or not step.draw or step.draw % self._every:
            return
        with self._recording.between.during("hear"), self._crew.together("adapting"):
            mine = None if self._decider is None else self._decided(self._decider)
            answers = self._crew.everywhere("adapt", mine)
            first = self._crew.axes.lines[0][0] if self._crew.axes.is_mesh else 0
            proposal: Proposal | None = answers[first]
            if proposal is not None:
                self._changes_now = True
                try:
                    self._change(proposal)
                finally:
                    self._changes_now = False

    def _decided(self, decider: Decider) -> Proposal | None:
        """Look at the last step, if it is a new one; return what to change."""
        last = self._ledger.last
        try:
            measured = self._ledger.timeline()
        except RunError:
            return None  # not measured
        number = measured.records[0].step
        if number == self._last_step or last is None or measured.records[0].program != self._own_program:
            return None
        self._last_step = number
        try:
            proposal = decider.see(measured, max((report.num_rows for report in last.reports), default=0))
        except DrumlineError as error:  # training does not depend on this
            self._tell(number, f"nothing changes from here on: {error}", {})
            self.close()
            self._decider = None
            return None
        for judged in decider.judged[self._num_judged :]:
            self._tell(judged.step, str(judged), judged.to_json())
        self._num_judged = len(decider.judged)
        if proposal is not None:
            self._tell(proposal.step, str(proposal), proposal.to_json())
        return proposal

    def _tell(self, step: int, text: str, line: dict[str, Any]) -> None:
        print(f"adapt: step {step}: {text}", file=sys.stderr, flush=True)
        if line:
            self._recording.decided(step, line)

    def _change(self, proposal: Proposal) -> None:
        """Take up what was decided; layers that cannot move stay where they are for good."""
        seconds, num_bytes = 0.0, 0
        if proposal.kind == CUT:
            try:
                moved = self._site.move(balance=list(proposal.after.counts))
            except (UsageError, ModelError) as error:  # the same on all ranks, before anything has moved
                if self._decider is not None:
                    self._tell(proposal.step, f"layers stay where they are: {error}", {})
                    self._decider.stay()
                return
            seconds, num_bytes = moved.total_seconds, moved.bytes_moved
        else:
            self._site.choice.take(proposal.after.program)
        if self._decider is not None:
            self._decider.took(proposal, proposal.after, seconds=seconds, num_bytes=num_bytes)

    def refuse_program(self, program: Program) -> None:
        """Refuse a program that holds more than the settings allow."""
        if violations := validate(program, limit=Limit(self.settings.max_activations) or None):
            raise InvalidProgram(program.name, violations)

    def took(self, program: Program, number: int) -> None:
        """Hear that another program was taken up, whoever decided so; steps of others are not looked at."""
        self._own_program = number
        if self._decider is not None and not self._changes_now and program != self._decider.now.program:
            self._decider.changed(replace(self._decider.now, program=program))

    def moved(self) -> None:
        """Hear that layers have moved; unless this was decided here, what was seen before says little."""
        if self._decider is not None and not self._changes_now:
            chain = self._engine.chain
            self._decider.changed(replace(self._decider.now, counts=chain.balance(chain.counts)))

    def close(self) -> None:
        """End a search that is under way."""
        if self._decider is not None:
            self._decider.stop()


def decider_for(
    settings: Adapt,
    program: Program,
    stages: Sequence[Sequence[Block]],
    profile: Profile | None,
    schedule: Any,
    *,
    recompute: bool,
) -> Decider:
    """Return what decides for a pipeline that begins with this program and these stages."""
    blocks = [[block for block in stage if not isinstance(block.module, LossHolder)] for stage in stages]
    counts = tuple(map(len, blocks))
    every = [block for stage in blocks for block in stage]
    if profile is None:
        profile = guessed([block.name for block in every], guessed_costs(every), [_sizes(item) for item in every], 1.0)
    layers = Layers(profile, program, max_bytes=settings.max_bytes, recompute=recompute)
    return Decider(settings, Arrangement(program, counts), layers=layers, build=built(schedule, program))


def _sizes(block: Block) -> tuple[int, int]:
    """Return a block's bytes of weights and of gradients."""
    tensors = [*block.module.parameters(), *block.module.buffers()]
    trained = (param.nbytes for param in block.module.parameters() if param.requires_grad)
    return sum(map(num_bytes, tensors)), sum(trained)


def built(schedule: Any, program: Program) -> Build | None:
    """Return what makes the program of a number of microbatches; None if the pipeline was made with a program."""
    if not isinstance(schedule, str) or schedule not in schedules():
        return None
    num_ranks, per_rank = program.num_ranks, program.num_stages // program.num_ranks

    def build(number: int) -> Program | None:
        try:
            new_program = generate(schedule, num_ranks=num_ranks, num_microbatches=number, stages_per_rank=per_rank)
        except DrumlineError:
            return None
        return new_program if new_program.placement.homes == program.placement.homes else None

    return build
