"""`searched` and `searched_slices` of a pipeline."""

from __future__ import annotations

from drumline.engine.site import Methods
from drumline.features.adapt.auto_schedule import AutoSchedule, SearchOutcome
from drumline.features.adapt.auto_slices import AutoSlices, SlicesOutcome


class AdaptMethods(Methods):
    """The search of schedule="auto"."""

    @property
    def searched(self) -> SearchOutcome | None:
        """On rank 0 with schedule="auto", the result of the search and its gain; None before the search."""
        searches = (observer for observer in self._site.observers.each if isinstance(observer, AutoSchedule))
        return next((schedule.searched for schedule in searches), None)

    @property
    def searched_slices(self) -> SlicesOutcome | None:
        """On rank 0 with schedule="auto", what slices of sequences gained; None unless some were measured."""
        tries = (observer for observer in self._site.observers.each if isinstance(observer, AutoSlices))
        return next((slices.outcome for slices in tries), None)
