from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from extras import needed

sys.path.insert(0, str(Path(__file__).parent))
for _package in ("onnxruntime", "onnx", "grpc_health", "grpc_reflection", "prometheus_client"):
    needed(_package, "servetest")

from served.services import Running, serving, write_served  # noqa: E402 - needs the packages above


@pytest.fixture(scope="session")
def served_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_served(tmp_path_factory.mktemp("served") / "tanh")


@pytest.fixture(scope="session")
def running(served_folder: Path) -> Iterator[Running]:
    """A service of two stages that most tests share."""
    with serving(served_folder) as item:
        yield item
