"""How moves of layers attach to a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from drumline.adapt.move import Move
from drumline.engine.ranks.observer import Observer
from drumline.engine.site import Site
from drumline.features.moving.mover import Mover


class Moving(Observer):
    """Holds what moves the layers of a pipeline; it has nothing to do in a step."""

    def __init__(self, site: Site) -> None:
        self.mover = Mover(site)

    def move(self, cuts: Sequence[str] | str | None = None, *, balance: Sequence[int] | str | None = None) -> Move:
        """Cut the model elsewhere; see `Pipeline.repartition`."""
        return self.mover.repartition(cuts, balance)


def attach(site: Site) -> Moving:
    """Return what moves layers, and let others ask for it."""
    moving = Moving(site)
    site.move = moving.move
    return moving
