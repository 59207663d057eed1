"""How moves of layers attach to a pipeline."""

from __future__ import annotations

from drumline.engine.site import Site
from drumline.features.moving.mover import Mover


def attach(site: Site) -> Mover:
    """Return what moves layers, and let others ask for it."""
    mover = Mover(site)
    site.move = mover.repartition
    return mover
