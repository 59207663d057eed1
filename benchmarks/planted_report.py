"""Bugs for `report`: text that is not escaped, arrows of two timelines."""

from __future__ import annotations

from planting import Bug

REPORT: tuple[Bug, ...] = ()
