"""What runs on this process's ranks, built from a model in stages: divided, agreed on, assembled and connected."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from torch import nn

from drumline.adapt.settings import Adapt
from drumline.core.lower.lower import lower
from drumline.core.program import Program
from drumline.engine.model.blocks import is_chain
from drumline.engine.program.frozen import Frozen
from drumline.engine.program.programs import Programs, named_programs
from drumline.engine.ranks.agreement import agree_on_lines, code_of, first_difference, plan_of
from drumline.engine.stages.assembly import Assembly, checkpointed
from drumline.engine.stages.engine import Attached, Engine
from drumline.engine.unsplit.parts import Parts
from drumline.features.check.model_check import ModelCheck
from drumline.features.mesh.attach.checked import LineParts
from drumline.features.mesh.attach.dividing import Dividing
from drumline.features.mesh.context import whole_context
from drumline.features.mesh.reduce import reducer_for
from drumline.features.stream.executor import StreamExecutor
from drumline.features.stream.options import check_ties
from drumline.model.block import Block
from drumline.model.randomness import Randomness
from drumline.model.weights.tied import Ties
from drumline.pipeline.attached import engine_for
from drumline.pipeline.cutting import Cut
from drumline.pipeline.setting import Setting
from drumline.runtime.backward.compiled import compiler_for
from drumline.runtime.execute.executor import Executor


@dataclass(frozen=True, slots=True)
class Built:
    """What runs on this process's ranks: its stages, divided as a mesh says, and the programs that they run."""

    dividing: Dividing
    frozen: Frozen
    assembled: Assembly
    check: ModelCheck
    engine: Engine
    programs: Programs

    @property
    def blocks(self) -> list[Block]:
        """The blocks of this process."""
        return [block for stage in self.engine.stages() for block in stage.blocks]


def build(setting: Setting, cut: Cut) -> Built:
    """Return the engine with its programs, after the check has seen the layers that a mesh divides whole."""
    given, stages = setting.options, cut.stages
    dividing = Dividing(given, given.model, setting.axes, setting.program, setting.held, setting.device, setting.agree)
    tensors = dividing.tensors(stages)
    frozen = Frozen(setting.program, stages, dividing.completing(tensors))
    assembled = _assembled(setting, frozen.program, cut).named()
    copied = {name for one in assembled.ties.tensors if one.is_copied for name in one.names}
    # Tensors that several ranks hold get the values of the rank that owns them.
    values = {name: one for name, one in cut.values.items() if name not in copied}
    experts = dividing.experts(stages)
    if experts is not None:
        setting.agree({"weigh": given.weigh})  # by which lines decide alike whether pairs run in turns
    has_parts = setting.axes.size("tp", "ep", "cp") > 1
    parts = LineParts(setting.axes, tensors, experts) if has_parts else Parts(setting.axes)
    check = _check(setting, cut, values, parts)
    dividing.divide(stages, tensors, experts)
    if setting.program.num_updates:
        check_ties(assembled.ties, setting.schedule, given, alone=setting.crew.alone)
    engine = _engine(setting, assembled)
    if tensors is not None:
        engine.explaining = tensors.exchanges.explaining
    return Built(dividing, frozen, assembled, check, engine, _programs(setting, frozen))


def _assembled(setting: Setting, program: Program, cut: Cut) -> Assembly:
    """Return the parts of all stages, after all ranks agree on them."""
    given, stages, intake = setting.options, cut.stages, cut.intake
    assembled = Assembly(
        lower(program, ahead=given.ahead),
        stages,
        setting.device,
        Randomness(given.seed, setting.device),
        checkpointed(given.checkpoint, stages),
        intake.loss if intake.has_loss else None,
        Ties(stages, program.placement, given.model),
        cut.numbers,
        compiler_for(given.compile, setting.device),
        lends=_lends(setting, cut),
    )
    more = given.alike()
    more["adapt"] = repr(Adapt.of(given.adapt))
    more["record"] = given.record if isinstance(given.record, bool) else str(given.record)
    setting.agree(assembled.described(**more))
    setting.crew.connect(assembled.ties.edges)
    return assembled


def _lends(setting: Setting, cut: Cut) -> Callable[[], list[nn.Parameter]] | None:
    """Return what tells the weights that loss_fn penalises, if all stages are here and none updates in a step."""
    if not setting.crew.alone or setting.program.num_updates:
        return None
    intake, held = cut.intake, {one for block in cut.blocks for one in block.module.parameters()}
    return lambda: [one for one in intake.lent() if one in held]


def _check(setting: Setting, cut: Cut, values: dict[str, bytes], parts: Parts) -> ModelCheck:
    """Return the check of the first step, after all ranks agree on the model's code and graph."""
    given, crew = setting.options, setting.crew
    different = None
    if not crew.alone:
        agree_on_lines(crew, "code", code_of(given.model, given.loss_fn, given.loss_weight))
        plan = plan_of(cut.blocks)
        agree_on_lines(crew, "graph", [] if plan is None else [one for each in plan.written.values() for one in each])
        different = first_difference(crew.collect("values", values))
    when = given.check_model
    if when is not False and setting.program.num_updates:
        when = False
        if not is_chain(given.model) and crew.rank == setting.axes.number == 0:
            why = f"{setting.program.name} updates weights in it"
            print(f"drumline: the first step is not checked against the model by itself: {why}", file=sys.stderr)
    if not cut.intake.has_loss:
        when = False  # there are no steps to check
    return ModelCheck(given.model, cut.blocks, crew, cut.intake, when, different, parts)


def _programs(setting: Setting, frozen: Frozen) -> Programs:
    """Return the programs that steps may name, once all ranks agree on them."""
    given = setting.options
    named = named_programs(given.programs, setting.program, given.schedule, given.stages_per_rank)
    if given.programs:
        setting.agree({"set of programs": {name: one.format() for name, one in named.items()}})
    programs = Programs(setting.program, named, frozen.pruned_too)
    setting.crew.connect(programs.edges)
    return programs


def _engine(setting: Setting, assembled: Assembly) -> Engine:
    """Return the engine that runs the program on this process's ranks."""
    given = setting.options
    has_folder, axes = not isinstance(setting.record, bool), setting.axes
    attached = Attached(
        StreamExecutor if setting.program.num_updates else Executor,
        partial(reducer_for, axes),
        partial(whole_context, axes) if axes.size("cp") > 1 else nullcontext,
    )
    return engine_for(given)(
        setting.crew,
        assembled,
        ahead=given.ahead,
        merge=given.merge_weight_gradients,
        measure=given.record is not False,
        weigh="always" if given.weigh else "first" if has_folder and not given.compile else "never",
        attached=attached,
    )
