"""How captured steps attach to a pipeline."""

from __future__ import annotations

from drumline.engine.kit import Kit
from drumline.engine.setting import Setting
from drumline.features.capture.engine import CapturingEngine
from drumline.features.capture.options import CaptureOptions


def fit(kit: Kit, setting: Setting, options: CaptureOptions) -> None:
    """Have steps captured, if the user asks for it."""
    if options.capture:
        kit.engine = CapturingEngine
