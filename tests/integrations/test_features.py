"""The page on the Trainer's features: each row that works names a test, and each argument is refused by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from extras import needed

needed("transformers", extra="hf")
needed("peft", extra="tune")
from integrations.cases import CASES  # noqa: E402
from integrations.test_refused import ARGUMENTS  # noqa: E402

pytestmark = pytest.mark.torch
PAGE = Path(__file__).parents[2] / "docs" / "trainer-features.md"


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the table below a heading."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_every_feature_that_works_names_scripts_that_run_and_every_script_is_named() -> None:
    named = {name for *_, cell in rows("What works") for name in cell.split(", ")}
    assert named == {*CASES, "lines", "inside", "started"}
    assert len(rows("What works")) >= 12


def test_every_argument_that_is_refused_is_tested() -> None:
    listed = {name for first, _ in rows("What is refused") for name in re.findall(r"`(\w+)`", first)}
    others = {"model_init", "hyperparameter_search", "optim", "activation_offloading", "zero", "pp", "dp", "adapt",
              "slices"}  # fmt: skip
    assert listed - others == set(ARGUMENTS) - others
