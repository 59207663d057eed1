"""Ranks of these tests are forked from a process that has torch: see `warm_ranks`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from warm_ranks import WarmRanks


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[WarmRanks]:
    """A server that forks ranks, for all tests of this process."""
    found = WarmRanks()
    yield found
    found.close()


@pytest.fixture(autouse=True)
def ranks_start_warm(request: pytest.FixtureRequest, warm_ranks: WarmRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start ranks warm, but in tests that ask for cold ones."""
    if request.node.get_closest_marker("torch") and not request.node.get_closest_marker("cold_ranks"):
        monkeypatch.setattr("drumline.pipeline.launch.processes.subprocess", warm_ranks)


@pytest.fixture(autouse=True)
def forecasts_time_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a dry run go through the blocks once: bytes are the same in every run, and no test looks at seconds."""
    if "dry_run" in vars(request.module):
        monkeypatch.setattr("drumline.train.dry.forecast._SECONDS", 0.0)
