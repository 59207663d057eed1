"""What is attached to every pipeline: the options, methods and observers of features, each named here in a line."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.engine.ranks.observer import Observer
from drumline.engine.site import Site
from drumline.engine.stages.engine import Engine
from drumline.features.adapt.options import AdaptOptions
from drumline.features.capture import engine as capture
from drumline.features.capture.options import CaptureOptions
from drumline.features.check.options import CheckOptions
from drumline.features.lengths import attach as lengths
from drumline.features.lengths.methods import LengthMethods
from drumline.features.lengths.options import LengthOptions
from drumline.features.mesh.attach import lines
from drumline.features.mesh.attach.options import MeshOptions
from drumline.features.moving.methods import MovingMethods
from drumline.features.precision import attach as precision
from drumline.features.precision.methods import PrecisionMethods
from drumline.features.precision.options import PrecisionOptions
from drumline.features.record.options import RecordOptions
from drumline.features.saving.methods import SavingMethods
from drumline.features.stream.options import StreamOptions
from drumline.features.validated import attach as validated
from drumline.features.validated.methods import ValidatedMethods


@dataclass(frozen=True, kw_only=True)
class AttachedOptions(
    MeshOptions,
    PrecisionOptions,
    CaptureOptions,
    RecordOptions,
    CheckOptions,
    AdaptOptions,
    LengthOptions,
    StreamOptions,
):
    """The options of all features."""


class AttachedMethods(
    SavingMethods,
    MovingMethods,
    LengthMethods,
    PrecisionMethods,
    ValidatedMethods,
):
    """The methods that features add to `Pipeline`."""


def engine_for(options: AttachedOptions) -> type[Engine]:
    """Return what runs the programs of a pipeline's ranks."""
    made: list[type[Engine] | None] = [
        capture.engine_for(options),
    ]
    return next(filter(None, made), Engine)


def attached(site: Site, options: AttachedOptions) -> list[Observer]:
    """Return what observes the steps of a pipeline, beside what runs them, in the order in which it is called."""
    made: list[Observer | None] = [
        precision.attach(site, options),
        validated.attach(site, options),
        lengths.attach(site, options),
        lines.attach(site, options),
    ]
    return [one for one in made if one is not None]
