"""Ranks of these tests are forked from a process that has torch: see `warm_ranks`."""

from __future__ import annotations

import pytest

from warm_ranks import WarmRanks


@pytest.fixture(autouse=True)
def ranks_start_warm(warm_ranks: WarmRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `launch` fork its ranks."""
    monkeypatch.setattr("drumline.pipeline.launch.processes.subprocess", warm_ranks)
