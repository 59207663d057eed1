"""`searched` of a pipeline."""

from __future__ import annotations

from drumline.engine.methods import Methods
from drumline.features.adapt.auto_schedule import AutoSchedule, Searched


class AdaptMethods(Methods):
    """The search of schedule="auto"."""

    @property
    def searched(self) -> Searched | None:
        """On rank 0 with schedule="auto", the result of the search and its gain; None before the search."""
        found = (one for one in self._site.observers.each if isinstance(one, AutoSchedule))
        return next((one.searched for one in found), None)
