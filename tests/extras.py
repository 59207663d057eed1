"""Packages that only some installations have."""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType

import pytest


def needed(module: str, extra: str) -> ModuleType:
    """Import a package of an extra; without it the test file is skipped, but in CI that is a failure."""
    if os.environ.get("CI") == "true":
        return import_module(module)
    found: ModuleType = pytest.importorskip(module, reason=f"the extra `{extra}` is not installed")
    return found
