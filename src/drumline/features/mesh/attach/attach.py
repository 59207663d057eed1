"""How meshes and experts attach to a pipeline."""

from __future__ import annotations

from functools import partial

from drumline.engine.kit import Kit
from drumline.engine.ranks.agreement import plan_of
from drumline.engine.ranks.observer import Observer
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.site import Site
from drumline.features.mesh.attach.arguments import LineCalls
from drumline.features.mesh.attach.buffers import LineBuffers
from drumline.features.mesh.attach.lines import MeshLines
from drumline.features.mesh.attach.options import MeshOptions
from drumline.features.mesh.experts.loads import ExpertLoads
from drumline.model.catalogue import places_in


def fit(kit: Kit, setting: PipelineSetup, options: MeshOptions) -> None:
    """Have several lines, if ranks form them."""
    if setting.axes.is_mesh:
        kit.lines = partial(MeshLines, options)


def attach(site: Site, setting: PipelineSetup, cut: ModelCut) -> list[Observer]:
    """Return what counts the loads of experts, and what compares the lines of a mesh."""
    engine, lines = site.engine, site.lines
    # Hooks that count the loads of experts would not be part of compiled or captured code.
    hooks = not setting.options.compile and not engine.runs_one_program
    loads = ExpertLoads(engine, setting.axes, plan_of(cut.blocks), hooks=hooks)
    if not isinstance(lines, MeshLines):
        return [loads]
    places = (place for block in engine.blocks() for place in places_in(block))
    return [loads, LineCalls(site, lines), LineBuffers(setting.axes, places)]
