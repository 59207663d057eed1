"""What is attached to a pipeline, for tests that look inside of it; each function needs its feature alone."""

from __future__ import annotations

from typing import Any

from drumline.pipeline.pipeline import Pipeline


def _attached(pipe: Pipeline, kind: type) -> Any:
    return next(observer for observer in pipe._site.observers.each if isinstance(observer, kind))


def validation_of(pipe: Pipeline) -> Any:
    """Return what validates the pipeline's updates afterwards."""
    from drumline.features.validated.validated import Validation

    return _attached(pipe, Validation)


def adapting_of(pipe: Pipeline) -> Any:
    """Return what adapts the pipeline."""
    from drumline.features.adapt.adapting import Adapting

    return _attached(pipe, Adapting)
