"""How other lines observe the steps of a pipeline."""

from __future__ import annotations

from drumline.engine.site import Site
from drumline.features.mesh.attach.buffers import LineBuffers
from drumline.features.mesh.attach.options import MeshOptions
from drumline.model.catalogue import places_in


def attach(site: Site, options: MeshOptions) -> LineBuffers | None:
    """Return what compares the buffers of lines after the first step; None without other lines."""
    blocks = [block for stage in site.engine.stages() for block in stage.blocks]
    axes = site.crew.axes
    return LineBuffers(axes, (place for block in blocks for place in places_in(block))) if axes.is_mesh else None
