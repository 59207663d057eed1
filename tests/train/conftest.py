"""Dry runs of these tests time nothing."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def forecasts_time_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a dry run go through the blocks once: bytes are the same in every run, and no test looks at seconds."""
    if "dry_run" in vars(request.module):
        monkeypatch.setattr("drumline.train.memory.measuring._SECONDS", 0.0)
