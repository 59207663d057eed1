"""The programs in `examples/`: each runs as its docstring says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.timeout(600)]
EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.features("record", "saving")
def test_the_whole_is_shown_in_one_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, EXAMPLES / "whole.py", tmp_path / "saved"],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    ranks, process = (line.split()[-6:] for line in lines if line.startswith("losses "))
    assert [float(loss) for loss in ranks] == pytest.approx([float(loss) for loss in process], abs=1e-4)
    assert "the last 3 steps again, from saved: the same bits" in lines
    assert [line[:6] for line in lines if line.startswith("rank ")] == ["rank 0", "rank 1"]
    assert list((tmp_path / "saved").glob("step-*/*"))


def test_examples_are_short_enough_to_read() -> None:
    assert len((EXAMPLES / "whole.py").read_text(encoding="utf-8").splitlines()) <= 200
