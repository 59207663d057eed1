from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from matrices import examples
from warm_ranks import WarmRanks

if find_spec("hypothesis") is not None:  # a machine with just PyTorch can run the tests that do without
    from hypothesis import HealthCheck, settings

    # Bounded and repeatable: what fails in CI fails everywhere, and a busy machine fails nothing.
    settings.register_profile(
        "drumline",
        deadline=None,
        max_examples=examples(100),
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("drumline")
_STARTS = "drumline.channel.launch.processes.subprocess"
_WITH_TORCH: set[Path] = set()
os.environ.setdefault("COLUMNS", "100")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes and ranks share the cores
# Else gRPC, which tests of serving leave in the process, may abort what later tests fork.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `launch` wait until every rank has told of its own error, however long that takes on a busy machine."""
    monkeypatch.setattr("drumline.channel.launch.launch._SECONDS_OF_GRACE", 200.0)


@pytest.fixture
def settled_products() -> None:
    """Let float32 products of plain loops with Muon round like those of pipelines, from the first one on."""
    from drumline.model.precision import settle_products

    settle_products()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Note which files have tests with torch, of those that will run."""
    _WITH_TORCH.update(item.path for item in items if item.get_closest_marker("torch"))


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[WarmRanks]:
    """What `launch` can fork its ranks by, one for all tests of a process."""
    warm = WarmRanks()
    yield warm
    warm.close()


@pytest.fixture(autouse=True, scope="module")
def ranks_start_warm(request: pytest.FixtureRequest, warm_ranks: WarmRanks) -> Iterator[None]:
    """Let `launch` fork its ranks, also for what all tests of a file share."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path in _WITH_TORCH:
            patch.setattr(_STARTS, warm_ranks)
        yield


@pytest.fixture(autouse=True)
def ranks_start_cold(request: pytest.FixtureRequest, ranks_start_warm: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start every rank as users do, where a test asks for it."""
    if request.node.get_closest_marker("cold_ranks"):
        monkeypatch.setattr(_STARTS, subprocess)
