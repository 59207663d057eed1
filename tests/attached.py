"""What is attached to a pipeline, for tests that look inside of it."""

from __future__ import annotations

from drumline.features.adapt.adapting import Adapting
from drumline.features.validated.validated import Validation
from drumline.pipeline.pipeline import Pipeline


def validation_of(pipe: Pipeline) -> Validation:
    """Return what validates the pipeline's updates afterwards."""
    return next(one for one in pipe._site.observers.each if isinstance(one, Validation))


def adapting_of(pipe: Pipeline) -> Adapting:
    """Return what adapts the pipeline."""
    return next(one for one in pipe._site.observers.each if isinstance(one, Adapting))
