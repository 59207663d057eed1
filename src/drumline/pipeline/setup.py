"""Turn options into a running engine: checked, cut, agreed on and connected, the same on all ranks.

::

    set_up      the program and the ranks, connected: from here on, a rank that fails tells all others
    kit_for     the parts of a pipeline, some of them made by features
    placed      how many stages a rank holds, if that is open, and with them the program
    cut_model   the model in stages, with the parameters of this process's blocks
    build       the engine and its programs, divided as lines say, and the check of its steps; who holds tensors, notes
                steps and updates parameters
    _made       what chooses the program of a step, and all that observes it
"""

from __future__ import annotations

from drumline.channel.devices.visible import device_named, in_use, tell_of
from drumline.core.errors import DrumlineError
from drumline.core.program import Program
from drumline.core.settings.clash import Together
from drumline.engine.choice import ProgramChoice
from drumline.engine.model.model_watch import WatchedModel
from drumline.engine.program.find import program_for
from drumline.engine.ranks import transports
from drumline.engine.ranks.agreement import TracedKinds
from drumline.engine.ranks.crew import Crew
from drumline.engine.ranks.observer import Observers
from drumline.engine.setup import PipelineSetup
from drumline.engine.stages import assembly
from drumline.engine.state.kept_apart import KeptApart
from drumline.engine.state.put_back import PutBack
from drumline.engine.state.shared_state import SharedBuffers
from drumline.engine.together import program_facts
from drumline.pipeline.attached import attached, kit_for
from drumline.pipeline.building import build
from drumline.pipeline.cutting import cut_model
from drumline.pipeline.options import Options
from drumline.pipeline.placing import placed
from drumline.pipeline.steps.step import StepRun
from drumline.pipeline.together import table
from drumline.runtime.clocks import clock_for


def set_up(options: Options) -> StepRun:
    """Return the object that runs the steps, connected to all other ranks; raises the same error on all of them."""
    assert options.schedule is not None, "options that were decided"
    device = in_use(device_named(options.device) or assembly.device_of(options.model))
    num_ranks = transports.num_ranks(
        options.transport, options.num_ranks, timeout=options.timeout, interface=options.interface
    )
    scope = transports.new_scope()
    axes = transports.axes_for(options.lines, options.transport, num_ranks, scope=scope, timeout=options.timeout)
    program: Program | DrumlineError
    try:
        program = program_for(
            options.first_schedule(options.schedule, options.stages_per_rank),
            num_ranks=axes.size("pp"),
            num_microbatches=options.num_microbatches,
            stages_per_rank=options.stages_per_rank,
            **options.schedule_settings(),
        )
        together = Together(table(), options.facts() | program_facts(program))
        together.refuse()
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
    if crew.rank == axes.number == 0:
        tell_of(crew.devices, is_named=options.device is not None)
    with crew.together("the set-up"):
        if isinstance(program, DrumlineError):
            raise program
        return _step_run(PipelineSetup(options, device, crew, program, together), options)


def _step_run(setting: PipelineSetup, options: Options) -> StepRun:
    """Return what runs the steps: each part is made from those above it."""
    setting = placed(setting, kit_for(setting, options))
    kit = kit_for(setting, options)
    lines = kit.lines(setting)
    cut = cut_model(setting, kit, lines)
    ground, check = build(setting, kit, lines, cut)
    flow = kit.flow(setting, ground)
    run = StepRun(
        **vars(ground),
        flow=flow,
        choice=ProgramChoice(ground),
        observers=Observers(()),
        cut=ground.intake.cut,
        run_rows=ground.engine.run,
        followed=TracedKinds(ground.engine.blocks()),
        balance=cut.balance,
    )
    observers = attached(run, setting, cut, options)
    run.watched = WatchedModel(options.model, cut.stages, alone=setting.crew.alone)
    run.updates.follow(run.engine.parameters())
    run.holdings.share()
    lines.share(run.engine, run.holdings, run.updates)
    run.watched.begin()
    check.attach(ground)
    kept_apart = KeptApart(run.engine, cut.stages, is_mesh=setting.axes.is_mesh)
    kept_state = [SharedBuffers(run.engine), kept_apart, PutBack(run.engine)]
    run.observe([flow, run.engine, run.holdings, *kept_state, run.recording, check, *observers])
    return run
