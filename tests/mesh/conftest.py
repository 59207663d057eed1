from __future__ import annotations

import pytest

from warm_ranks import WarmRanks


@pytest.fixture(autouse=True)
def ranks_start_warm(request: pytest.FixtureRequest, warm_ranks: WarmRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `launch` fork its ranks; what tests starting itself says `cold_ranks`."""
    if request.node.get_closest_marker("cold_ranks") is None:
        monkeypatch.setattr("drumline.pipeline.launch.processes.subprocess", warm_ranks)
