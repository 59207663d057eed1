"""The options of the check of steps against the unsplit model."""

from __future__ import annotations

from dataclasses import dataclass

from drumline.core.settings.rule import Rule
from drumline.engine.options import FeatureOptions, option
from drumline.features.check.sentinels import When, is_when

_WHEN = Rule('True, False, "first", or a number of steps between two checks', is_when)


@dataclass(frozen=True, kw_only=True)
class CheckOptions(FeatureOptions):
    """`check_model`: compare the first step and some later ones with the unsplit model."""

    check_model: When = option(True, _WHEN, alike=True)
