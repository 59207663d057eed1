"""What runs on this process's ranks, built from a model in stages: divided, agreed on, assembled and connected.

Beside it is built who holds tensors, notes steps and updates parameters.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.engine.ground import Ground
from drumline.engine.kit import Kit
from drumline.engine.lines import Lines
from drumline.engine.no_check import NoCheck
from drumline.engine.program.frozen import Frozen, is_named
from drumline.engine.program.programs import Programs, named_programs
from drumline.engine.ranks.agreement import agree_on_lines, code_of, first_difference, plan_of
from drumline.engine.ranks.tally import TallyLedger
from drumline.engine.ranks.unused import unused_in
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.stages.assembly import Assembly, checkpointed
from drumline.engine.stages.engine import Attachments, Engine
from drumline.engine.state.tensors import Holdings
from drumline.engine.updates.updates import Updates
from drumline.model.randomness import Randomness
from drumline.model.weights.overlaps import refuse_overlaps
from drumline.model.weights.tied import Ties
from drumline.runtime.backward.compiled import compiler_for


def build(setting: PipelineSetup, kit: Kit, lines: Lines, cut: ModelCut) -> tuple[Ground, NoCheck]:
    """Return all that runs steps, and their check, which has seen whole what lines divide."""
    joins = is_named(setting.options.schedule)
    frozen = Frozen(setting.program, cut.stages, lines.completing(cut.stages), joins=joins)
    assembled = _assembled(setting, frozen.program, cut).named()
    check = kit.check(setting, cut, lines.parts(cut.stages), _different(setting, cut, assembled))
    lines.divide(cut)
    kit.admit(setting, assembled.ties)
    engine, programs = _engine(setting, kit, lines, assembled), _programs(setting, frozen)
    lines.divide_copies(cut, engine.chain.absent.modules())
    crew, intake = setting.crew, cut.intake
    holdings = Holdings(assembled.ties, crew, engine.executors, list(engine.copies.values()), engine.chain)
    unused = unused_in(cut.stages) if crew.rank == 0 and setting.axes.number == 0 else None
    ledger = TallyLedger(setting.options.unused, unused)
    recording = kit.journal(setting, cut, programs, ledger, holdings)
    updates = Updates(cut.numbers, holdings, recording, check)
    intake.precise = any(param.dtype is torch.float64 for param in holdings.parameters())
    frozen.forget_all_but(engine.assembly.cuts)
    runs = crew, ledger, intake, frozen, programs, engine, holdings, updates, recording, lines, setting.together
    return Ground(*runs), check


def _assembled(setting: PipelineSetup, program: Program, cut: ModelCut) -> Assembly:
    """Return the parts of all stages, after all ranks agree on them."""
    options, stages, intake = setting.options, cut.stages, cut.intake
    assembled = Assembly(
        lower(program, ahead=options.ahead),
        stages,
        setting.device,
        Randomness(options.seed, setting.device),
        checkpointed(options.checkpoint, stages),
        intake.loss if intake.has_loss else None,
        Ties(stages, program.placement, options.model),
        cut.numbers,
        compiler_for(options.compile, setting.device),
        lends=_lends(setting, cut),
    )
    if not setting.crew.alone:
        refuse_overlaps(stages, program.placement, setting.device)
    setting.agree(assembled.described(**options.alike()))
    setting.crew.connect(assembled.ties.edges)
    return assembled


def _lends(setting: PipelineSetup, cut: ModelCut) -> Callable[[], list[nn.Parameter]] | None:
    """Return what tells the weights that loss_fn penalises, if all stages are here and none updates in a step."""
    if not setting.crew.alone or setting.program.num_updates:
        return None
    intake, held_parameters = cut.intake, {param for block in cut.blocks for param in block.module.parameters()}
    return lambda: [param for param in intake.lent() if param in held_parameters]


def _different(setting: PipelineSetup, cut: ModelCut, assembled: Assembly) -> tuple[int, int, str] | None:
    """Return two ranks and a parameter for which they were given different values, once all agree on code and graph."""
    options, crew = setting.options, setting.crew
    if crew.alone:
        return None
    agree_on_lines(crew, "code", code_of(options.model, options.loss_fn, options.loss_weight))
    plan = plan_of(cut.blocks)
    agree_on_lines(crew, "graph", [] if plan is None else [name for each in plan.written.values() for name in each])
    copied = {name for tensor in assembled.ties.tensors if tensor.is_copied for name in tensor.names}
    # Tensors that several ranks hold get the values of the rank that owns them.
    values = {name: value for name, value in cut.values.items() if name not in copied}
    return first_difference(crew.collect("values", values))


def _programs(setting: PipelineSetup, frozen: Frozen) -> Programs:
    """Return the programs that steps may name, once all ranks agree on them."""
    options = setting.options
    named = named_programs(options.programs, setting.program, options.schedule, options.stages_per_rank)
    if options.programs:
        setting.agree({"set of programs": {name: program.format() for name, program in named.items()}})
    programs = Programs(setting.program, named, frozen.pruned_too)
    setting.crew.connect(programs.edges)
    return programs


def _engine(setting: PipelineSetup, kit: Kit, lines: Lines, assembled: Assembly) -> Engine:
    """Return the engine that runs the program on this process's ranks."""
    options = setting.options
    return kit.engine(
        setting.crew,
        assembled,
        ahead=options.ahead,
        merge=options.merge_weight_gradients,
        measure=kit.measures,
        weigh="always" if options.weigh else "first" if kit.weighs_first and not options.compile else "never",
        attached=Attachments(kit.executor, lines.sums_of, lines.around()),
    )
