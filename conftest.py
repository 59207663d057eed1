"""What is collected where: the half that needs torch is left out of the quick tests and where torch is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

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
