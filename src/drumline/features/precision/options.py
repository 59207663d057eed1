"""The options of low precision."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.engine.options import SWITCH, FeatureOptions, option


@dataclass(frozen=True, kw_only=True)
class PrecisionOptions(FeatureOptions):
    """`master_weights`: `pipe.optimizer` updates float32 copies of bf16 or fp16 parameters."""

    master_weights: bool = option(False, SWITCH, alike=True)
