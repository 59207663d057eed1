"""Turn options into a running engine: checked, cut, agreed on and connected, the same on all ranks.

set_up           the program and the ranks, connected: from here on, a rank that fails tells all others
cut_model        the model in stages, with the parameters of this process's blocks
build            the engine and its programs, divided as a mesh says, and the check of the first step
_held_by         who holds tensors, notes steps and updates parameters
_share_values    all ranks and lines get the same values, before their state is divided
_choice, ...     what changes or observes a step
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from drumline.adapt.settings import KEEP, Adapt
from drumline.core.errors import DrumlineError
from drumline.core.program import Program
from drumline.engine.program.find import program_for
from drumline.engine.ranks import transports
from drumline.engine.ranks.agreement import Followed, plan_of
from drumline.engine.ranks.crew import Crew
from drumline.engine.ranks.observer import Observers
from drumline.engine.ranks.tally import Ledger
from drumline.engine.ranks.unused import unused_in
from drumline.engine.site import Site
from drumline.engine.stages import assembly
from drumline.engine.state.shared_state import Shared
from drumline.engine.state.tensors import Holdings
from drumline.engine.updates.updates import Updates
from drumline.features.adapt.adapting import Adapting, decider_for
from drumline.features.adapt.auto_schedule import AUTO, AutoSchedule, first_schedule
from drumline.features.check.watched import Watched
from drumline.features.mesh.experts.loads import ExpertLoads
from drumline.features.mesh.reduce import share_values
from drumline.features.record.recording import Recording
from drumline.features.stream.keeper import StreamKeeper
from drumline.features.stream.options import check_options, is_synchronous, rows_of
from drumline.features.stream.stream import Stream
from drumline.pipeline.attached import attached
from drumline.pipeline.building import Built, build
from drumline.pipeline.cutting import Cut, cut_model
from drumline.pipeline.options import Options, device_named
from drumline.pipeline.setting import Setting
from drumline.pipeline.steps.program_choice import ProgramChoice
from drumline.pipeline.steps.step import StepRun
from drumline.runtime.clocks import clock_for


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
            check_options(options.settings(), program)
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
        return _made(Setting(options, device, crew, program))


@dataclass(frozen=True, slots=True)
class _Held:
    """Who holds tensors, notes steps and updates parameters."""

    holdings: Holdings
    ledger: Ledger
    recording: Recording
    updates: Updates
    stream: Stream | None


def _made(setting: Setting) -> StepRun:
    """Return what runs the steps: each part is made from those above it."""
    given, crew = setting.options, setting.crew
    cut = cut_model(setting)
    built = build(setting, cut)
    held = _held_by(setting, built, cut)
    engine, check, recording = built.engine, built.check, held.recording
    # Hooks that count the loads of experts would not be part of compiled or captured code.
    hooks = not given.compile and not engine.runs_one_program
    loads = ExpertLoads(engine, setting.axes, plan_of(cut.blocks), hooks=hooks)
    watched = Watched(given.model, cut.stages, alone=crew.alone)
    parts = (crew, held.ledger, cut.intake, built.frozen, built.programs, engine, held.holdings, held.updates)
    observers = attached(Site(*parts, recording, Observers(())), given)
    _share_values(setting, built, held)
    watched.begin()
    shared = Shared(engine)
    check.attach(engine, held.holdings)
    followed = Followed(built.blocks)
    choice = _choice(setting, built, cut, held)
    run = StepRun(
        *parts, recording, Observers(()), watched, followed, check, choice, cut.balance, given.check_finite,
        cut.positions, held.stream,
    )  # fmt: skip
    run.observers = Observers(
        [  # in the order in which they are called
            StreamKeeper(held.stream, run.pause),
            *(one for one in (choice.auto, choice.adapting) if one is not None),
            loads,
            engine,
            held.holdings,
            shared,
            recording,
            *observers,
            check,
        ]
    )
    return run


def _held_by(setting: Setting, built: Built, cut: Cut) -> _Held:
    """Return who holds tensors, notes steps and updates parameters."""
    given, crew, engine = setting.options, setting.crew, built.engine
    holdings = Holdings(built.assembled.ties, crew, engine.executors, list(engine.copies.values()), engine.chain)
    ledger = Ledger(given.unused, unused_in(cut.stages) if crew.rank == 0 and setting.axes.number == 0 else None)
    clocks = [one.clock for one in engine.executors]
    recording = Recording(setting.record, crew, ledger, holdings, clocks, continues=given.continue_record)
    if recording.folder is not None:
        crew.observe(recording)
        recording.describe(given.settings(), built.frozen.program, built.assembled, cut.balance)
        recording.runs_several(built.programs)
    updates = Updates(cut.numbers, holdings, recording, built.check)
    stream = None
    if setting.program.num_updates:
        rows = rows_of(setting.schedule, given, setting.program, built.frozen.pruned_too)
        how = {"check_finite": given.check_finite, "is_synchronous": is_synchronous(setting.schedule, given)}
        stream = Stream(engine, updates, built.programs, rows, **how)
        recording.notes_late = 1 + stream.num_ahead
    cut.intake.precise = any(one.dtype is torch.float64 for one in holdings.parameters())
    built.frozen.forget_all_but(engine.assembly.cuts)
    return _Held(holdings, ledger, recording, updates, stream)


def _share_values(setting: Setting, built: Built, held: _Held) -> None:
    """Give all ranks and lines the same values, then divide the state of which each line keeps a part."""
    held.updates.follow(built.engine.parameters())
    held.holdings.share()
    if setting.axes.is_mesh:
        share_values(setting.axes, held.holdings.tensors())
    if setting.options.zero:
        built.dividing.divide_state(built.engine, held.holdings, held.updates)


def _choice(setting: Setting, built: Built, cut: Cut, held: _Held) -> ProgramChoice:
    """Return what chooses the program of each step."""
    crew, frozen, engine = setting.crew, built.frozen, built.engine
    auto = AutoSchedule(crew, held.ledger, frozen) if setting.options.schedule == AUTO else None
    adapting = _adapting(setting, built, cut, held)
    return ProgramChoice(crew, built.programs, frozen, engine, cut.intake, held.recording, held.stream, auto, adapting)


def _adapting(setting: Setting, built: Built, cut: Cut, held: _Held) -> Adapting | None:
    """Return what adapts the pipeline, if it shall; the first rank decides."""
    given, crew = setting.options, setting.crew
    settings = Adapt.of(given.adapt) or (Adapt(rebalance=KEEP) if given.schedule == AUTO else None)
    if settings is None:
        return None
    decider = None
    if crew.rank == crew.axes.number == 0:
        names = {block.name for block in cut.blocks}
        recompute = bool(names) and names <= built.engine.assembly.checkpointed
        decider = decider_for(settings, setting.program, cut.stages, cut.profile, given.schedule, recompute=recompute)
    return Adapting(settings, crew, held.ledger, held.recording, built.engine, decider)
