"""A model whose whole does not fit a limit: ranks that hold a part each load it and run it, one process cannot.

The larger version of this, with its figures, is benchmarks/loading.py.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

import drumline as dl
from loading import build, measure, write
from matrices import ALL, long
from some import some

pytestmark = [
    pytest.mark.cold_ranks,
    pytest.mark.torch,
    pytest.mark.matrix,
    pytest.mark.skipif(sys.platform != "linux", reason="counts and limits memory as Linux does"),
]

BLOCKS, WIDTH = 12, 2048  # 201 MB
WHOLE = 4 * BLOCKS * (WIDTH**2 + WIDTH)
LIMIT = int(0.9 * WHOLE)


def run(folder: Path | None, *, num_ranks: int, train: bool) -> list[dict[str, Any]]:
    settings = {"train": train, "schedule": "1f1b"}
    return dl.launch(measure, "chain", BLOCKS, WIDTH, folder, LIMIT, num_ranks=num_ranks, kwargs=settings, timeout=250)


@long
@pytest.mark.parametrize("from_files", [True, False])
def test_ranks_load_and_run_under_a_limit_that_the_whole_model_breaks(tmp_path: Path, from_files: bool) -> None:
    if from_files:
        write(tmp_path, build("chain", BLOCKS, WIDTH))
    folder = tmp_path if from_files else None
    (alone,) = run(folder, num_ranks=1, train=False)
    assert "not enough memory" in alone["failed"] or "can't allocate memory" in alone["failed"]
    assert "made" not in alone, "the whole model was made"
    cases = [(2, False, 1)] * (ALL or not from_files) + [(4, True, 2)] * from_files
    for num_ranks, train, copies in cases:  # with gradients a rank holds its part twice
        for found in some(run(folder, num_ranks=num_ranks, train=train)):
            assert not found["failed"]
            assert found["own"] == WHOLE // num_ranks
            assert found["made"] < LIMIT
            assert found["own"] * copies < found["stepped"] < LIMIT
