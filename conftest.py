"""What is collected where: the half that needs torch is left out of the quick tests and where torch is missing."""

from __future__ import annotations

import importlib
import os
import random
from importlib.util import find_spec
from pathlib import Path

import pytest

# Where searches look at the clock; their budgets are counted in timed actions, too.
SEARCHES = ("drumline.plan.search.run", "drumline.plan.search.search", "drumline.plan.device.planner")

TORCH_HALF = ("runtime", "profile", "pipeline")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave the torch half out, so that collecting it does not import torch."""
    parts = collection_path.relative_to(config.rootpath).parts if config.rootpath in collection_path.parents else ()
    needs_torch = any(part in TORCH_HALF for part in parts) and parts[0] in ("src", "tests")
    needs_torch |= collection_path.name in ("torch_models.py", "hf_models.py")
    if collection_path.name == "hf_models.py" and find_spec("transformers") is None:
        return True
    if needs_torch and ("not torch" in config.option.markexpr or find_spec("torch") is None):
        return True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the tests in another order where SHUFFLE is set, the same one for the same number."""
    if "SHUFFLE" in os.environ:
        random.Random(int(os.environ["SHUFFLE"])).shuffle(items)


class StandingClock:
    """Stands in for `time` where a search looks at it: no machine is so slow that its clock cuts a search short."""

    @staticmethod
    def monotonic() -> float:
        """Return always the same moment."""
        return 0.0


@pytest.fixture(autouse=True)
def searches_keep_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let searches find the same programs on a busy machine as on a quiet one."""
    for name in SEARCHES:
        monkeypatch.setattr(importlib.import_module(name), "time", StandingClock)
