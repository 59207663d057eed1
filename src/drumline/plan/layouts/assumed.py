"""What a plan assumes of the software: its preset, how far off that was elsewhere, and what others would take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from drumline.core.errors import PlanError
from drumline.core.units import duration
from drumline.plan.cluster.estimate import estimate
from drumline.plan.layouts.planner import ClusterPlan
from drumline.plan.layouts.software import EVERY, MISSED, OTHERS, Missed, Software, software


@dataclass(frozen=True, slots=True)
class Assumed:
    """A plan's software, whether it was named, how far off it was, and the seconds of the same layout with others."""

    preset: Software
    is_named: bool
    missed: Missed
    is_own: bool
    seconds: tuple[float, float]
    others: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        """Return an object."""
        return {
            "name": self.preset.name,
            "named": self.is_named,
            "does": self.preset.does,
            "missed": {**self.missed._asdict(), "own": self.is_own},
            "seconds": list(self.seconds),
            "others": self.others,
        }

    def lines(self) -> Iterator[str]:
        """Yield it in sentences."""
        missed, (low, high) = self.missed, self.seconds
        yield f"Software: {self.preset.name}{'' if self.is_named else ', assumed'}: {self.preset.does}"
        whose = "its own" if self.is_own else "all presets', for it has no row of its own"
        yield (
            f"Held-out error: {missed.mean:.1%} on average and {missed.worst:.1%} at worst on {missed.rows} rows, "
            f"{whose} ({missed.source}). So expect {duration(low)} to {duration(high)}"
        )
        if self.others:
            taken = ", ".join(f"{name} {duration(seconds)}" for name, seconds in self.others.items())
            yield f"--software names another. The same layout takes with {taken}"


def assumed(plan: ClusterPlan) -> Assumed:
    """Return what a plan assumes; other presets only if none was named."""
    pins, chosen = plan.pins, plan.chosen
    preset, named = pins.assumed, bool(pins.software or pins.framework)
    missed = MISSED.get(preset.name, EVERY)
    others = {}
    # No other software runs slices.
    for name in OTHERS if not named and chosen.layout.slices == 1 else ():
        if name != preset.name:
            before = estimate(plan.transformer, plan.cluster, chosen.layout).seconds.total
            layout = replace(chosen.layout, practice=pins.practice_of(software(name)))
            try:
                after = estimate(plan.transformer, plan.cluster, layout).seconds.total
            except PlanError:
                continue
            others[name] = chosen.seconds * after / before
    between = (chosen.seconds * (1 - missed.mean), chosen.seconds * (1 + missed.mean))
    return Assumed(preset, named, missed, missed is not EVERY, between, others)
