"""How updates that are validated afterwards attach to a pipeline."""

from __future__ import annotations

from drumline.engine.site import Site
from drumline.features.validated.undo import KeptBuffers
from drumline.features.validated.validated import Validation
from drumline.model.catalogue import places_in


def attach(site: Site) -> Validation:
    """Return what validates updates afterwards; it does nothing until an optimizer asks for it."""
    places = (place for block in site.engine.blocks() for place in places_in(block))
    site.updates.validation = validation = Validation(site, KeptBuffers(places))
    return validation
