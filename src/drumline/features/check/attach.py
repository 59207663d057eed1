"""How the check of steps attaches to a pipeline."""

from __future__ import annotations

import sys
from functools import partial

from drumline.engine.kit import Kit
from drumline.engine.model.blocks import is_chain
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.unsplit.parts import Parts
from drumline.features.check.model_check import ModelCheck
from drumline.features.check.options import CheckOptions


def fit(kit: Kit, setting: PipelineSetup, options: CheckOptions) -> None:
    """Have steps checked."""
    kit.check = partial(_check, options)


def _check(
    options: CheckOptions, setting: PipelineSetup, cut: ModelCut, parts: Parts, different: tuple[int, int, str] | None
) -> ModelCheck:
    """Return the check of a pipeline's steps; rank 0 says if none can be checked."""
    when, program = options.check_model, setting.program
    if when is not False and program.num_updates:
        when = False
        if not is_chain(setting.options.model) and setting.crew.rank == setting.axes.number == 0:
            why = f"{program.name} updates weights in it"
            print(f"drumline: the first step is not checked against the model by itself: {why}", file=sys.stderr)
    if not cut.intake.has_loss:
        when = False  # there are no steps to check
    return ModelCheck(setting, cut, parts, different, when=when)
