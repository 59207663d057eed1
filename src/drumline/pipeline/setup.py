"""Turn options into a running engine: checked, cut, agreed on and connected, the same on all ranks.

options ──► program ──► crew ──► stages ──► assembly ──► engine ──► holdings, recording ──► steps
│ from here on, a rank that fails tells all others
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from drumline.adapt.settings import KEEP, Adapt
from drumline.core.errors import DrumlineError
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.model.block import Block
from drumline.model.blocks.script import Script
from drumline.model.catalogue import places_in
from drumline.model.precision import Precision
from drumline.model.randomness import Randomness
from drumline.model.weights.materialise import materialise
from drumline.model.weights.tied import Ties
from drumline.pipeline.adapting.adapting import Adapting, decider_for
from drumline.pipeline.adapting.auto_schedule import AUTO, AutoSchedule, first_schedule
from drumline.pipeline.check.buffers import LineBuffers
from drumline.pipeline.check.lines import LineParts
from drumline.pipeline.check.model_check import ModelCheck
from drumline.pipeline.check.watched import Watched
from drumline.pipeline.cutting import chosen_stages
from drumline.pipeline.dividing import Dividing
from drumline.pipeline.lengths.arrange import Arranging
from drumline.pipeline.model.blocks import is_chain
from drumline.pipeline.options import Options, device_named
from drumline.pipeline.program.find import program_for
from drumline.pipeline.program.frozen import Frozen
from drumline.pipeline.program.programs import Programs, named_programs
from drumline.pipeline.ranks import transports
from drumline.pipeline.ranks.agreement import Followed, agree_on_lines, code_of, first_difference, plan_of, weights_of
from drumline.pipeline.ranks.crew import Crew
from drumline.pipeline.ranks.observer import Observer
from drumline.pipeline.ranks.tally import Ledger
from drumline.pipeline.ranks.unused import unused_in
from drumline.pipeline.record.loads import ExpertLoads
from drumline.pipeline.record.recording import Recording
from drumline.pipeline.stages import assembly
from drumline.pipeline.stages.assembly import Assembly, loss_block
from drumline.pipeline.stages.balance import Balance
from drumline.pipeline.stages.engine import CapturingEngine, Engine
from drumline.pipeline.stages.intake import Intake
from drumline.pipeline.state.materialise import opened
from drumline.pipeline.state.shared_state import Shared, refuse_hidden
from drumline.pipeline.state.tensors import Holdings
from drumline.pipeline.steps.program_choice import ProgramChoice
from drumline.pipeline.steps.step import StepRun
from drumline.pipeline.streaming import check_options, check_ties, is_synchronous, rows_of
from drumline.pipeline.updates.kept import KeptBuffers
from drumline.pipeline.updates.stream import Stream
from drumline.pipeline.updates.updates import Updates
from drumline.pipeline.updates.validated import Validation
from drumline.plan.device.blocks import Profile
from drumline.runtime.axes.axes import DATA, Axes
from drumline.runtime.axes.context import whole_context
from drumline.runtime.axes.reduce import share_values
from drumline.runtime.axes.sequences import Takes, positions_of
from drumline.runtime.backward.compiled import compiler_for
from drumline.runtime.capture.cuda import clock_for

# Settings that must be the same on all ranks, besides what ranks agree on anyway.
_ALIKE = ("arrange", "check_finite", "check_model", "master_weights", "merge_weight_gradients", "capture", "ahead",
          "continue_record")  # fmt: skip


def set_up(options: Options) -> StepRun:
    """Return the object that runs the steps, connected to all other ranks; raises the same error on all of them."""
    assert options.schedule is not None, "options that were decided"
    device = device_named(options.device) or assembly.device_of(options.model)
    num_ranks = transports.num_ranks(
        options.transport, options.num_ranks, timeout=options.timeout, interface=options.interface
    )
    scope = transports.new_scope()
    axes = transports.axes_for(options.mesh, options.transport, num_ranks, scope=scope, timeout=options.timeout)
    program: Program | DrumlineError
    try:
        program = program_for(
            first_schedule(options.stages_per_rank) if options.schedule == AUTO else options.schedule,
            num_ranks=axes.size("pp"),
            num_microbatches=options.num_microbatches,
            stages_per_rank=options.stages_per_rank,
            streams=True,
            vertical_sync=options.vertical_sync,
        )
        if program.num_updates:
            check_options(options, program)
    except DrumlineError as error:
        program = error  # connect even with a wrong schedule, so that the others learn of it
    crew = Crew.gathered(
        options.transport,
        device,
        num_ranks=options.num_ranks or axes.size("pp"),
        program=program if isinstance(program, Program) else None,
        ahead=options.ahead,
        timeout=options.timeout,
        axes=axes,
        scope=scope,
        interface=options.interface,
        now=clock_for(device).now,
    )
    with crew.together("the set-up"):
        if isinstance(program, DrumlineError):
            raise program
        return _SetUp(options, device, crew, program).run()


@dataclass(frozen=True, slots=True)
class _Cut:
    """The model as blocks of stages, and what splits and counts its batches."""

    intake: Intake
    numbers: Precision
    values: dict[str, bytes]  # digests of the model's values as given, if ranks must agree on them
    stages: list[tuple[Block, ...]]
    balance: Balance | None
    profile: Profile | None
    positions: Takes | None

    @property
    def blocks(self) -> list[Block]:
        return [block for stage in self.stages for block in stage]


@dataclass(frozen=True, slots=True)
class _Built:
    """What runs on this process's ranks: its stages, divided as a mesh says, and the programs that they run."""

    dividing: Dividing
    frozen: Frozen
    assembled: Assembly
    check: ModelCheck
    engine: Engine
    programs: Programs

    @property
    def blocks(self) -> list[Block]:
        return [block for stage in self.engine.stages() for block in stage.blocks]


@dataclass(frozen=True, slots=True)
class _Held:
    """Who holds tensors, notes steps and updates parameters."""

    holdings: Holdings
    ledger: Ledger
    recording: Recording
    validation: Validation
    updates: Updates
    stream: Stream | None


@dataclass(frozen=True, slots=True)
class _SetUp:
    options: Options
    device: torch.device
    crew: Crew
    program: Program

    def run(self) -> StepRun:
        """Return what runs the steps: each part is made from those above it."""
        given, crew = self.options, self.crew
        cut = self._cut()
        built = self._built(cut)
        held = self._held_by(built, cut)
        engine, check, recording = built.engine, built.check, held.recording
        loads = self._loads(engine, plan_of(cut.blocks))
        watched = Watched(given.model, cut.stages, alone=crew.alone)
        self._share_values(built, held)
        watched.begin()
        shared = Shared(engine)
        check.attach(engine, held.holdings)
        followed = Followed(built.blocks)
        choice = self._choice(built, cut, held)
        arranging = self._arranging(built, cut.intake)
        lines = LineBuffers(self.axes, (place for block in built.blocks for place in places_in(block)))
        observers: list[Observer] = [
            *(one for one in (choice.auto, choice.adapting) if one is not None),
            held.validation,
            loads,
            engine,
            held.holdings,
            held.updates,
            shared,
            recording,
            arranging,
            lines,
            check,
        ]
        return StepRun(
            crew, held.ledger, cut.intake, built.frozen, engine, held.holdings, held.updates, recording, watched,
            followed, check, observers, choice, cut.balance, given.check_finite, built.programs, arranging,
            cut.positions, held.stream,
        )  # fmt: skip

    def _cut(self) -> _Cut:
        """Return the model in stages; this process's blocks have their parameters."""
        given, axes = self.options, self.axes
        intake = Intake(
            given.model,
            given.loss_fn,
            self.device,
            num_microbatches=self.program.num_microbatches,
            weigh=given.loss_weight,
            split=given.split,
        )
        numbers = Precision(given.precision, self.device)
        values = {} if self.crew.alone or given.weights is not None else weights_of(given.model)
        stages, balance, profile = self._stages(intake, numbers)
        positions = positions_of(given.model) if axes.size("cp") > 1 else None
        cut = _Cut(intake, numbers, values, stages, balance, profile, positions)
        refuse_hidden(stages)
        if axes.size(*DATA) > 1:
            intake.count_across(partial(axes.totals, device=self.device), axes.size("cp"))
            why = "with several lines of a mesh: each sees a part of the batch"
            assembly.refuse_statistics(cut.blocks, why)
        return cut

    def _built(self, cut: _Cut) -> _Built:
        """Return the engine with its programs, after the check has seen the layers that a mesh divides whole."""
        given, stages = self.options, cut.stages
        dividing = Dividing(given, self.axes, self.program, self._held(), self.device, self._agree)
        tensors = dividing.tensors(stages)
        frozen = Frozen(self.program, stages, dividing.completing(tensors))
        assembled = self._assembled(frozen.program, stages, cut.intake, cut.numbers).named()
        copied = {name for one in assembled.ties.tensors if one.is_copied for name in one.names}
        # Tensors that several ranks hold get the values of the rank that owns them.
        values = {name: one for name, one in cut.values.items() if name not in copied}
        experts = dividing.experts(stages)
        check = self._check(stages, cut.intake, values, LineParts(self.axes, tensors, experts))
        dividing.divide(stages, tensors, experts)
        if self.program.num_updates:
            check_ties(assembled.ties, given, alone=self.crew.alone)
        engine = self._engine(assembled)
        if tensors is not None:
            engine.explaining = tensors.explaining
        return _Built(dividing, frozen, assembled, check, engine, self._programs(frozen))

    def _held_by(self, built: _Built, cut: _Cut) -> _Held:
        """Return who holds tensors, notes steps and updates parameters."""
        given, crew, engine = self.options, self.crew, built.engine
        holdings = Holdings(built.assembled.ties, crew, engine.executors, list(engine.copies.values()), engine.chain)
        ledger = Ledger(given.unused, unused_in(cut.stages) if crew.rank == 0 and self.axes.number == 0 else None)
        clocks = [one.clock for one in engine.executors]
        recording = Recording(self._record, crew, ledger, holdings, clocks, continues=given.continue_record)
        if recording.folder is not None:
            crew.observe(recording)
            recording.describe(given.settings(), built.frozen.program, built.assembled, cut.balance)
            recording.runs_several(built.programs)
        buffers = KeptBuffers(place for block in built.blocks for place in places_in(block))
        validation = Validation(holdings, ledger, recording, buffers, engine.total_norm)
        updates = Updates(
            cut.numbers, holdings, recording, built.check, validation, master_weights=given.master_weights
        )
        stream = None
        if self.program.num_updates:
            rows = rows_of(given, self.program, built.frozen.pruned_too)
            how = {"check_finite": given.check_finite, "is_synchronous": is_synchronous(given)}
            stream = Stream(engine, updates, built.programs, rows, **how)
            recording.notes_late = 1 + stream.num_ahead
        cut.intake.precise = any(one.dtype is torch.float64 for one in holdings.parameters())
        built.frozen.forget_all_but(engine.assembly.cuts)
        return _Held(holdings, ledger, recording, validation, updates, stream)

    def _share_values(self, built: _Built, held: _Held) -> None:
        """Give all ranks and lines the same values, then divide the state of which each line keeps a part."""
        held.updates.follow(built.engine.parameters())
        held.holdings.share()
        if self.axes.is_mesh:
            share_values(self.axes, held.holdings.tensors())
        if self.options.zero:
            built.dividing.divide_state(built.engine, held.holdings, held.updates)

    def _choice(self, built: _Built, cut: _Cut, held: _Held) -> ProgramChoice:
        """Return what chooses the program of each step."""
        crew, frozen, engine = self.crew, built.frozen, built.engine
        auto = AutoSchedule(crew, held.ledger, frozen) if self.options.schedule == AUTO else None
        adapting = self._adapting(cut.stages, cut.profile, held.ledger, held.recording, engine)
        return ProgramChoice(
            crew, built.programs, frozen, engine, cut.intake, held.recording, held.stream, auto, adapting
        )

    def _arranging(self, built: _Built, intake: Intake) -> Arranging:
        """Return what orders microbatches of unequal sizes."""
        frozen, engine, programs = built.frozen, built.engine, built.programs
        arranging = Arranging(
            self.crew,
            lambda: programs[engine.number] if engine.number else frozen.program,
            is_on=self.options.arrange,
        )
        intake.order_of = arranging.order_of if self.options.arrange else None
        return arranging

    def _adapting(
        self,
        stages: Sequence[Sequence[Block]],
        profile: Profile | None,
        ledger: Ledger,
        recording: Recording,
        engine: Engine,
    ) -> Adapting | None:
        """Return what adapts the pipeline, if it shall; the first rank decides."""
        given, crew = self.options, self.crew
        settings = Adapt.of(given.adapt) or (Adapt(rebalance=KEEP) if given.schedule == AUTO else None)
        if settings is None:
            return None
        decider = None
        if crew.rank == crew.axes.number == 0:
            names = {block.name for stage in stages for block in stage}
            recompute = bool(names) and names <= engine.assembly.checkpointed
            decider = decider_for(settings, self.program, stages, profile, given.schedule, recompute=recompute)
        return Adapting(settings, crew, ledger, recording, engine, decider)

    def _check(
        self,
        stages: Sequence[Sequence[Block]],
        intake: Intake,
        values: dict[str, bytes],
        parts: LineParts,
    ) -> ModelCheck:
        """Return the check of the first step, after all ranks agree on the model's code and graph."""
        given, crew = self.options, self.crew
        blocks = [block for stage in stages for block in stage]
        different = None
        if not crew.alone:
            agree_on_lines(crew, "code", code_of(given.model, given.loss_fn, given.loss_weight))
            plan = plan_of(blocks)
            agree_on_lines(
                crew, "graph", [] if plan is None else [one for each in plan.written.values() for one in each]
            )
            different = first_difference(crew.collect("values", values))
        when = given.check_model
        if when is not False and self.program.num_updates:
            when = False
            if not is_chain(given.model) and crew.rank == self.axes.number == 0:
                why = f"{self.program.name} updates weights in it"
                print(f"drumline: the first step is not checked against the model by itself: {why}", file=sys.stderr)
        if not intake.has_loss:
            when = False  # there are no steps to check
        return ModelCheck(given.model, blocks, crew, intake, when, different, parts)

    def _held(self) -> list[int]:
        """Return the stages of this process."""
        placement = self.program.placement
        return sorted({at for channel in self.crew.channels for at in placement.stages_of(channel.rank)})

    def _loads(self, engine: Engine, plan: Script | None) -> ExpertLoads:
        """Return what counts the loads of experts; hooks would not be part of compiled or captured code."""
        given = self.options
        return ExpertLoads(engine, self.axes, plan, hooks=not given.compile and not given.capture)

    def _stages(
        self, intake: Intake, numbers: Precision
    ) -> tuple[list[tuple[Block, ...]], Balance | None, Profile | None]:
        """Return the blocks of every stage; those of this process have their parameters."""
        given = self.options
        stored = opened(given.weights)
        self._agree({"weights": stored and stored.described()})
        with whole_context(self.axes):  # which refuses masks
            stages, balance, profile = chosen_stages(given, self.crew, self.program, intake, numbers)
        intake.weigh_by(stages)
        stages[-1] = (*stages[-1], *loss_block(given.loss_fn))
        materialise(
            [block for stage in stages for block in stage],
            [block for at in self._held() for block in stages[at]],
            root=given.model if isinstance(given.model, nn.Module) else None,
            weights=stored,
            device=self.device,
            seed=given.seed,
        )
        return stages, balance, profile

    def _assembled(
        self, program: Program, stages: list[tuple[Block, ...]], intake: Intake, numbers: Precision
    ) -> Assembly:
        """Return the parts of all stages, after all ranks agree on them."""
        given = self.options
        assembled = Assembly(
            lower(program, ahead=given.ahead),
            stages,
            self.device,
            Randomness(given.seed, self.device),
            assembly.checkpointed(given.checkpoint, stages),
            intake.loss if intake.has_loss else None,
            Ties(stages, program.placement, given.model),
            numbers,
            compiler_for(given.compile, self.device),
            lends=self._lends(stages, intake),
        )
        more = {name: getattr(given, name) for name in _ALIKE}
        more["adapt"] = repr(Adapt.of(given.adapt))
        more["record"] = given.record if isinstance(given.record, bool) else str(given.record)
        self._agree(assembled.described(**more))
        self.crew.connect(assembled.ties.edges)
        return assembled

    def _lends(self, stages: list[tuple[Block, ...]], intake: Intake) -> Callable[[], list[nn.Parameter]] | None:
        """Return what tells the weights that loss_fn penalises, if all stages are here and none updates in a step."""
        if not self.crew.alone or self.program.num_updates:
            return None
        held = {one for stage in stages for block in stage for one in block.module.parameters()}
        return lambda: [one for one in intake.lent() if one in held]

    def _programs(self, frozen: Frozen) -> Programs:
        """Return the programs that steps may name, once all ranks agree on them."""
        given = self.options
        named = named_programs(given.programs, self.program, given.schedule, given.stages_per_rank)
        if given.programs:
            self._agree({"set of programs": {name: one.format() for name, one in named.items()}})
        programs = Programs(self.program, named, frozen.pruned_too)
        self.crew.connect(programs.edges)
        return programs

    def _engine(self, assembled: Assembly) -> Engine:
        """Return the engine that runs the program on this process's ranks."""
        given = self.options
        has_folder = not isinstance(self._record, bool)
        return (CapturingEngine if given.capture else Engine)(
            self.crew,
            assembled,
            ahead=given.ahead,
            merge=given.merge_weight_gradients,
            measure=given.record is not False,
            weigh="always" if given.weigh else "first" if has_folder and not given.compile else "never",
        )

    def _agree(self, described: dict[str, Any]) -> None:
        """Raise the same error on all ranks unless all got the same settings."""
        transports.agree(self.crew.collect("set-up", described), self.crew.called)
        self.axes.agree(described)

    @property
    def axes(self) -> Axes:
        return self.crew.axes

    @property
    def _record(self) -> bool | str | Path:
        """What to record here; line 0 writes the folder of a run, and the others keep their last step."""
        given = self.options.record
        return given if isinstance(given, bool) or self.axes.number == 0 else True
