"""The folder of a small Llama, made once for all tests of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest

from tune.llama import llama_folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a small Llama with a tokenizer."""
    return llama_folder(tmp_path_factory.mktemp("llama"))
