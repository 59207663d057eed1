"""The pictures above each recipe, in the README and on the first page are what the tool draws."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from names import NAMES

DRAW = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "draw_pictures.py"))


@pytest.mark.parametrize("name", NAMES)
def test_each_recipe_opens_with_the_picture_of_what_it_makes(name: str) -> None:
    text = DRAW["source"](name).read_text(encoding="utf-8")
    docstring = text.split('"""')[1]
    assert DRAW["picture"](name) in docstring, "run scripts/draw_pictures.py"


def test_the_pictures_of_pages_are_what_the_tool_draws() -> None:
    pictures = DRAW["page_pictures"]()
    assert len(pictures) == 3
    for path, drawn in pictures.items():
        assert path.read_text(encoding="utf-8") == drawn, "run scripts/draw_pictures.py"
