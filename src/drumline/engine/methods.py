"""What the methods share that features add to `Pipeline`."""

from __future__ import annotations

from drumline.engine.site import Site


class Methods:
    """A part of `Pipeline`: public methods of a feature, which work on what runs the pipeline here."""

    _site: Site

    def _finish(self, most_seconds: float | None) -> None:
        """Finish what is under way before ranks disconnect; `most_seconds`, if given, bounds that, without an error."""
