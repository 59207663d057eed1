"""Real runs on this machine's GPUs, whatever their number: see device_checks.py, which needs no pytest."""

from __future__ import annotations

from pathlib import Path

import pytest

from device_checks import CHECKS, COUNT

pytestmark = [
    pytest.mark.torch,
    pytest.mark.accelerator,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not COUNT, reason="there is no CUDA device here"),
    pytest.mark.features("capture", "check", "lengths", "mesh", "precision", "record", "saving", "stream"),
]


@pytest.mark.parametrize("name", CHECKS)
def test_runs_use_the_devices_that_they_should(name: str, tmp_path: Path) -> None:
    assert CHECKS[name](tmp_path)
