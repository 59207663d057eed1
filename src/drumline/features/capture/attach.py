"""How captured steps attach to a pipeline."""

from __future__ import annotations

from drumline.engine.kit import Kit
from drumline.engine.setup import PipelineSetup
from drumline.engine.site import Site
from drumline.features.capture.engine import CapturingEngine
from drumline.features.capture.options import CaptureOptions
from drumline.runtime.step import Step


def fit(kit: Kit, setting: PipelineSetup, options: CaptureOptions) -> None:
    """Have steps captured, if the user asks for it."""
    if options.capture:
        kit.engine = CapturingEngine


def attach(site: Site) -> None:
    """Have batches of steps that are replayed split only where the loss counts their labels."""
    engine, intake = site.engine, site.intake
    if isinstance(engine, CapturingEngine):

        def cut(step: Step) -> None:
            if not (step.train and engine.repeats) or intake.counts_labels:  # else weights are those of the last step
                intake.cut(step)

        site.cut = cut
