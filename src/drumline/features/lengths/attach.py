"""How unequal microbatches attach to a pipeline."""

from __future__ import annotations

from drumline.core.program import Program
from drumline.engine.kit import Kit
from drumline.engine.setup import PipelineSetup
from drumline.engine.site import Site
from drumline.features.lengths.arrange import Arranging
from drumline.features.lengths.options import LengthOptions
from drumline.features.lengths.ordering import OrderedIntake


def fit(kit: Kit, setting: PipelineSetup, options: LengthOptions) -> None:
    """Have microbatches put in order, if the user asks for it."""
    if options.arrange:
        kit.intake = OrderedIntake


def attach(site: Site) -> Arranging:
    """Return what learns the costs of sizes; with `arrange`, it orders the microbatches of every step."""

    def program() -> Program:
        return site.programs[site.engine.number] if site.engine.number else site.frozen.program

    arranging = Arranging(site.crew, program)
    if isinstance(site.intake, OrderedIntake):
        site.intake.order_of = arranging.order_of
    return arranging
