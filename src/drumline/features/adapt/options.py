"""The options of adapting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from drumline.adapt.settings import KEEP, Adapt
from drumline.core.errors import UsageError
from drumline.engine.options import FeatureOptions


@dataclass(frozen=True, kw_only=True)
class AdaptOptions(FeatureOptions):
    """`adapt`: change the program, the cut or the number of microbatches during training, where it pays."""

    adapt: bool | Mapping[str, Any] | Adapt = False

    @property
    def moves_layers(self) -> bool:
        """Whether layers may move between ranks while training goes on."""
        adapt = Adapt.of(self.adapt)
        return adapt is not None and adapt.rebalance != KEEP

    def check_together(self, others: Mapping[str, Any]) -> None:
        """Refuse to adapt or to search if nothing is measured, or if steps may name programs."""
        super().check_together(others)
        is_auto, is_blind = others["schedule"] == "auto", others.get("record") is False
        if is_auto and others["programs"]:
            raise UsageError("programs are named and schedule is 'auto'", expected="only one of them")
        if is_auto and is_blind:
            raise UsageError("record is False and schedule is 'auto'", expected="record=True, to measure steps")
        if Adapt.of(self.adapt) is not None and is_blind:
            raise UsageError("record is False and adapt is set", expected="record=True, to measure steps")
