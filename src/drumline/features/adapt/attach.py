"""How adapting, and the first search of schedule="auto", attach to a pipeline."""

from __future__ import annotations

from drumline.adapt.settings import KEEP, Adapt
from drumline.engine.kit import Kit
from drumline.engine.ranks.observer import Observer
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.site import Site
from drumline.engine.together import AUTO
from drumline.features.adapt.adapting import Adapting, built, decider_for
from drumline.features.adapt.auto_schedule import AutoSchedule
from drumline.features.adapt.auto_slices import AutoSlices
from drumline.features.adapt.options import AdaptOptions


def fit(kit: Kit, setting: PipelineSetup, options: AdaptOptions) -> None:
    """Have blocks timed if layers may move later."""
    settings = Adapt.of(options.adapt)
    kit.times_blocks = settings is not None and settings.rebalance != KEEP


def attach(site: Site, setting: PipelineSetup, cut: ModelCut, options: AdaptOptions) -> list[Observer]:
    """Return what adapts the pipeline, if it shall; the first rank decides."""
    given_options, crew = setting.options, site.crew
    is_auto = given_options.schedule == AUTO
    settings = Adapt.of(options.adapt) or (Adapt(rebalance=KEEP) if is_auto else None)
    if settings is None:
        return []
    decider = None
    if crew.rank == crew.axes.number == 0 and setting.program.num_slices == 1:  # nothing is decided for slices
        names = {block.name for block in cut.blocks}
        recompute = bool(names) and names <= site.engine.assembly.checkpointed
        decider = decider_for(
            settings, setting.program, cut.stages, cut.profile, given_options.schedule, recompute=recompute
        )
    adapting = Adapting(settings, site, decider, built(given_options.schedule, setting.program))
    if not is_auto:
        return [adapting]
    auto = AutoSchedule(site, adapting, setting.program)
    return [auto, AutoSlices(site, auto, adapting), adapting]
