"""The model of a pipeline in stages: cut as the options say, evenly, or by what its blocks take with an example."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

from drumline.core.errors import ModelError
from drumline.core.program import Program
from drumline.engine.core_options import CoreOptions
from drumline.engine.kit import Kit
from drumline.engine.lines import Lines
from drumline.engine.model.blocks import blocks_for, example_inputs
from drumline.engine.program.frozen import is_named, with_whole_backwards
from drumline.engine.ranks.agreement import weights_of
from drumline.engine.ranks.crew import Crew
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.stages import assembly
from drumline.engine.stages.balance import Balance, balanced, of_rank_0
from drumline.engine.stages.intake import Intake
from drumline.engine.state.materialise import opened
from drumline.engine.state.shared_state import refuse_hidden
from drumline.model.block import Block
from drumline.model.blocks.cut import cut
from drumline.model.precision import Precision
from drumline.model.quantised.placing import to_device
from drumline.model.weights.materialise import materialise
from drumline.plan.cut.peaks import held_by
from drumline.plan.device.blocks import Profile
from drumline.plan.device.model_profile import refuse_other
from drumline.plan.device.plan import Plan
from drumline.profile.identity import identity_of

_SECONDS_TO_MEASURE = 10.0  # after the first run of each block


def cut_model(setting: PipelineSetup, kit: Kit, lines: Lines) -> ModelCut:
    """Return a pipeline's model in stages; this process's blocks have their parameters."""
    options = setting.options
    intake = intake_for(setting, kit)
    numbers = Precision(options.precision, setting.device)
    values = {} if setting.crew.alone or options.weights is not None else weights_of(options.model)
    stored = opened(options.weights)
    setting.agree({"weights": stored and stored.described()})
    with lines.whole():
        stages, balance, profile = _chosen_stages(setting, intake, numbers, times_blocks=kit.times_blocks)
    intake.weigh_by(stages)
    stages[-1] = (*stages[-1], *assembly.loss_block(options.loss_fn))
    materialise(
        [block for stage in stages for block in stage],
        [block for at in setting.held_stages for block in stages[at]],
        root=options.model if isinstance(options.model, nn.Module) else None,
        weights=stored,
        device=setting.device,
        seed=options.seed,
    )
    refuse_hidden(stages)
    lines.cut(intake, stages)
    return ModelCut(intake, numbers, values, stages, balance, profile)


def intake_for(setting: PipelineSetup, kit: Kit) -> Intake:
    """Return what splits and counts the batches of a pipeline."""
    options = setting.options
    return kit.intake(
        options.model,
        options.loss_fn,
        setting.device,
        num_microbatches=setting.program.num_units,
        weigh=options.loss_weight,
        split=options.split,
    )


def blocks_of(setting: PipelineSetup, intake: Intake) -> list[Block]:
    """Return the blocks at which a pipeline's model may be cut."""
    options = setting.options
    return blocks_for(
        options.model,
        options.example,
        intake.device,
        num_microbatches=options.num_microbatches or setting.program.num_microbatches,
        cuts=options.cuts,
        split=options.split,
    )


def is_asked(balance: Sequence[int] | str | None, cuts: Sequence[str] | None, example: Any) -> bool:
    """Whether to find the cut by measurement.

    >>> is_asked(None, None, None), is_asked(None, None, [1.0]), is_asked([2, 2], None, [1.0])
    (False, True, False)
    """
    asked = isinstance(balance, str) and balance == "auto"
    if asked and example is None:
        raise ModelError(
            "balance is 'auto' but there is no example batch",
            expected="an example batch for timing the blocks",
            fix="pass example=, a batch like those you pass to step, and example_target= if you use loss_fn",
        )
    return asked or (balance is None and cuts is None and example is not None)


def _chosen_stages(
    setting: PipelineSetup, intake: Intake, precision: Precision, *, times_blocks: bool
) -> tuple[list[tuple[Block, ...]], Balance | None, Profile | None]:
    """Return the blocks of every stage, the cut and its measurements if it was chosen by them, and what blocks take.

    With `times_blocks`, blocks of a given cut are timed too.
    """
    options, crew, program = setting.options, setting.crew, setting.program
    blocks = blocks_of(setting, intake)
    balance, measured, timed = options.balance, None, None
    if isinstance(options.plan, Plan):
        refuse_other(options.plan.model, identity_of(blocks, type(options.model).__name__), "the plan")
    elif is_asked(balance, options.cuts, options.example):
        with precision.autocast:
            measured = setting.balance or _timed(options, crew, program, intake, blocks)
        _tell(measured, crew)
        balance = None if measured is None else measured.counts
    elif times_blocks and options.example is not None:
        with precision.autocast:
            timed = _timed(options, crew, program, intake, blocks)
    stages = cut(blocks, program.num_stages, balance, options.cuts, held_pairs=held_by(program))
    known = measured or timed
    return stages, measured, None if known is None else known.profile


def _tell(balance: Balance | None, crew: Crew) -> None:
    """Print a measured cut on rank 0."""
    if balance is not None and crew.rank == crew.axes.number == 0:
        print(
            f"{balance.table()}\nbalance={list(balance.counts)}, measured on {balance.profile.device}", file=sys.stderr
        )
        if balance.profile.disturbed:
            print(f"{balance.profile.disturbed} Measure again on an idle machine, or pass balance=.", file=sys.stderr)


def time_blocks(setting: PipelineSetup, intake: Intake, blocks: Sequence[Block]) -> Balance | None:
    """Time the blocks on all ranks at once, and return rank 0's best cut for the program; None for a model on meta."""
    with Precision(setting.options.precision, setting.device).autocast:
        return _timed(setting.options, setting.crew, setting.program, intake, blocks)


def _timed(
    options: CoreOptions, crew: Crew, program: Program, intake: Intake, blocks: Sequence[Block]
) -> Balance | None:
    """Time the blocks on all ranks at once, and return rank 0's best cut; None for a model on meta."""
    if any(param.is_meta for block in blocks for param in block.module.parameters()):
        return None
    for block in blocks:
        to_device(block.module, intake.device)
    has_loss = intake.has_own_loss or (intake.has_loss and options.example_target is not None)
    measured = partial(
        balanced,
        blocks,
        with_whole_backwards(program, blocks) if is_named(options.schedule) else program,
        intake,
        (example_inputs(options.model, options.example), "the example"),
        (options.example_target, "the example's target"),
        intake.loss if has_loss else None,
        max_seconds=_SECONDS_TO_MEASURE,
    )
    return of_rank_0(measured, partial(crew.everywhere, "balance"))
