"""Ranks of meshes start warm: forked, with torch imported."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from warm_ranks import WarmRanks


@pytest.fixture(autouse=True, scope="module")
def ranks_start_warm(warm_ranks: WarmRanks) -> Iterator[None]:
    """Let `launch` fork its ranks, also for what all tests of a module share."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drumline.pipeline.launch.processes.subprocess", warm_ranks)
        yield
