"""The options of microbatches with unequal sizes."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.engine.options import SWITCH, FeatureOptions, option


@dataclass(frozen=True, kw_only=True)
class LengthOptions(FeatureOptions):
    """`arrange`: run `Microbatches` of unequal sizes in the order that the simulator finds fastest."""

    arrange: bool = option(False, SWITCH, alike=True)
