"""How unequal microbatches attach to a pipeline."""

from __future__ import annotations

from drumline.core.program import Program
from drumline.engine.site import Site
from drumline.features.lengths.arrange import Arranging
from drumline.features.lengths.options import LengthOptions


def attach(site: Site, options: LengthOptions) -> Arranging:
    """Return what learns the costs of sizes; with `arrange`, it orders the microbatches of every step."""

    def program() -> Program:
        return site.programs[site.engine.number] if site.engine.number else site.frozen.program

    arranging = Arranging(site.crew, program, is_on=options.arrange)
    site.intake.order_of = arranging.order_of if options.arrange else None
    return arranging
