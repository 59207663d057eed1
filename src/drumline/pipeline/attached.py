"""What is attached to every pipeline: the options, methods, parts and observers of features, each named here."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.engine.kit import Kit
from drumline.engine.ranks.observer import Observer
from drumline.engine.setup import ModelCut, PipelineSetup
from drumline.engine.site import Site
from drumline.features.adapt import attach as adapt
from drumline.features.adapt.methods import AdaptMethods
from drumline.features.adapt.options import AdaptOptions
from drumline.features.capture import attach as capture
from drumline.features.capture.options import CaptureOptions
from drumline.features.check import attach as check
from drumline.features.check.methods import CheckMethods
from drumline.features.check.options import CheckOptions
from drumline.features.lengths import attach as lengths
from drumline.features.lengths.methods import LengthMethods
from drumline.features.lengths.options import LengthOptions
from drumline.features.mesh.attach import attach as mesh
from drumline.features.mesh.attach.options import MeshOptions
from drumline.features.moving import attach as moving
from drumline.features.moving.methods import MovingMethods
from drumline.features.precision import attach as precision
from drumline.features.precision.methods import PrecisionMethods
from drumline.features.precision.options import PrecisionOptions
from drumline.features.record import attach as record
from drumline.features.record.options import RecordOptions
from drumline.features.saving.methods import SavingMethods
from drumline.features.slices import attach as slices
from drumline.features.slices.methods import SliceMethods
from drumline.features.slices.options import SliceOptions
from drumline.features.stream import attach as stream
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
    SliceOptions,
    StreamOptions,
):
    """The options of all features."""


class AttachedMethods(
    SavingMethods,
    MovingMethods,
    LengthMethods,
    PrecisionMethods,
    ValidatedMethods,
    AdaptMethods,
    CheckMethods,
    SliceMethods,
):
    """The methods that features add to `Pipeline`."""


def kit_for(setting: PipelineSetup, options: AttachedOptions) -> Kit:
    """Return the parts of a pipeline, some of them made by features."""
    kit = Kit()
    for fit in (
        adapt.fit,
        capture.fit,
        check.fit,
        lengths.fit,
        mesh.fit,
        record.fit,
        slices.fit,
        stream.fit,
    ):
        fit(kit, setting, options)
    return kit


def attached(site: Site, setting: PipelineSetup, cut: ModelCut, options: AttachedOptions) -> list[Observer]:
    """Return what observes the steps of a pipeline, beside what runs them; each has its order."""
    capture.attach(site)
    observers: list[Observer | None] = [
        *adapt.attach(site, setting, cut, options),
        lengths.attach(site),
        *mesh.attach(site, setting, cut),
        moving.attach(site),
        precision.attach(site, options),
        slices.attach(site, setting, options),
        stream.attach(site),
        validated.attach(site),
    ]
    return [observer for observer in observers if observer is not None]
