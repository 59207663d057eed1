"""The options of captured steps."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.engine.options import SWITCH, FeatureOptions, option


@dataclass(frozen=True, kw_only=True)
class CaptureOptions(FeatureOptions):
    """`capture`: record each step's actions once as CUDA graphs, and replay them while steps stay the same."""

    capture: bool = option(False, SWITCH, alike=True)
