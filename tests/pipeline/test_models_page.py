"""The tables of docs/models-tested.md, made from the models that are tested; `python THIS --update` rewrites them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

from drumline.model.blocks.pieces import pieces_of
from drumline.model.follow.inputs import Inputs
from hf_models import MODELS, UNRUNNABLE, batch_for, families, tiny

pytestmark = pytest.mark.torch

PAGE = Path(__file__).parents[2] / "docs" / "models-tested.md"


def models_table() -> str:
    lines = [
        "| model | blocks | values that travel over a cut in the middle | tied weights |",
        "|---|---|---|---|",
    ]
    for name in MODELS:
        model = tiny(name)
        inputs = Inputs((), batch_for(name, 2))
        blocks = pieces_of(model, inputs)
        value: Any = inputs
        for block in blocks[: len(blocks) // 2]:
            piece: Any = block.module
            value = piece.seal(piece(value))
        tied = sum(1 for _ in model.named_parameters(remove_duplicate=False)) > sum(1 for _ in model.parameters())
        lines.append(f"| `{name}` | {len(blocks)} | {len(value.tensors)} | {'yes' if tied else 'no'} |")
    return "\n".join(lines)


def families_list() -> str:
    return ", ".join(f"`{name}`" for name in families() if name not in UNRUNNABLE)


TABLES = {"models": models_table, "families": families_list}


def between(page: str, name: str) -> str:
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", page, re.DOTALL)
    assert found is not None
    return found.group(1).strip()


def shown_version() -> str:
    """Return the version of transformers that the page shows: the one that all tests run with."""
    constraints = (PAGE.parents[1] / "constraints.txt").read_text()
    found = re.search(r"^transformers==(.+)$", constraints, re.MULTILINE)
    assert found is not None
    return found.group(1)


@pytest.mark.skipif(
    transformers.__version__ != shown_version(),
    reason=f"the page shows what transformers {shown_version()} has, and here is {transformers.__version__}",
)
@pytest.mark.parametrize("name", TABLES)
def test_the_page_shows_what_is_tested(name: str) -> None:
    assert between(PAGE.read_text(), name) == TABLES[name](), f"run: python {Path(__file__).name} --update"


if __name__ == "__main__" and "--update" in sys.argv:
    text = PAGE.read_text()
    for name, make in TABLES.items():
        text = text.replace(f"<!-- {name} -->\n{between(text, name)}".rstrip(), f"<!-- {name} -->\n{make()}")
    PAGE.write_text(text)
