from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec

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
os.environ.setdefault("COLUMNS", "100")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes and ranks share the cores


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `launch` wait until every rank has told of its own error, however long that takes on a busy machine."""
    monkeypatch.setattr("drumline.pipeline.launch.launch._SECONDS_OF_GRACE", 200.0)


@pytest.fixture
def settled_products() -> None:
    """Let float32 products of plain loops with Muon round like those of pipelines, from the first one on."""
    from drumline.runtime.precision import settle_products

    settle_products()


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[WarmRanks]:
    """What `launch` can fork its ranks by, one for all tests of a process."""
    warm = WarmRanks()
    yield warm
    warm.close()
