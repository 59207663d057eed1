from __future__ import annotations

import os
from importlib.util import find_spec

if find_spec("hypothesis") is not None:  # a machine with just PyTorch can run the tests that do without
    from hypothesis import settings

    # Bounded and repeatable: what fails in CI fails everywhere.
    settings.register_profile("drumline", deadline=None, max_examples=100, derandomize=True)
    settings.load_profile("drumline")
os.environ.setdefault("COLUMNS", "100")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # test processes and ranks share the cores
