"""The options of adapting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drumline.adapt.settings import Adapt
from drumline.core.errors import UsageError
from drumline.engine.options import FeatureOptions
from drumline.features.adapt.auto_schedule import AUTO, first_split


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

    def check_together(self, others: Mapping[str, Any]) -> None:
        """Refuse to adapt or to search if nothing is measured, or if steps may name programs."""
        super().check_together(others)
        is_auto, is_blind = others["schedule"] == AUTO, others.get("record") is False
        if is_auto and others["programs"]:
            raise UsageError("programs are named and schedule is 'auto'", expected="only one of them")
        if is_auto and is_blind:
            raise UsageError("record is False and schedule is 'auto'", expected="record=True, to measure steps")
        if Adapt.of(self.adapt) is not None and is_blind:
            raise UsageError("record is False and adapt is set", expected="record=True, to measure steps")
