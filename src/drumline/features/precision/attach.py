"""How low precision attaches to a pipeline."""

from __future__ import annotations

from drumline.engine.site import Site
from drumline.features.precision.masters import Masters
from drumline.features.precision.options import PrecisionOptions
from drumline.features.precision.scaler import LossScaler


def attach(site: Site, options: PrecisionOptions) -> LossScaler | None:
    """Let optimizers update float32 copies, and return what scales the loss, each if it is asked for."""
    updates = site.updates
    if options.master_weights:
        updates.update_copies(Masters())
    if not updates.precision.scales:
        return None
    updates.scaler = scaler = LossScaler(refuse=site.refuse, parameters=site.holdings.parameters)
    return scaler
