"""The options of adapting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drumline.adapt.settings import Adapt
from drumline.engine.options import FeatureOptions
from drumline.engine.together import AUTO
from drumline.features.adapt.auto_schedule import first_split


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(FeatureOptions):
    """`adapt`: change the program, the cut or the number of microbatches during training, where it pays."""

    adapt: bool | Mapping[str, Any] | Adapt = False

    def alike(self) -> dict[str, Any]:
        """Return the settings too, which ranks may spell differently."""
        return super().alike() | {"adapt": repr(Adapt.of(self.adapt))}

    def first_schedule(self, schedule: Any, stages_per_rank: int | None) -> Any:
        """Return the schedule to measure first, for "auto"."""
        chosen = super().first_schedule(schedule, stages_per_rank)
        return first_split(stages_per_rank) if chosen == AUTO else chosen

    def leaves_placement(self, schedule: Any) -> bool:
        """Whether the set-up may choose how many stages a rank holds."""
        return super().leaves_placement(schedule) or bool(schedule == AUTO)

    def facts(self) -> dict[str, Any]:
        """Return whether to adapt, for what may be spelled in several ways."""
        return super().facts() | {"adapt": Adapt.of(self.adapt) is not None}
