"""The options of microbatches with unequal sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from drumline.engine.options import SWITCH, FeatureOptions, option


@dataclass(frozen=True, kw_only=True)
class LengthOptions(FeatureOptions):
    """`arrange`: run `Microbatches` of unequal sizes in the order that the simulator finds fastest."""

    ALIKE: ClassVar[tuple[str, ...]] = ("arrange",)
    arrange: bool = option(False, SWITCH)
