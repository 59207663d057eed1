"""Drawings and tables in docstrings: each stands four columns in, as a literal block that no formatter reflows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from some import some
from syntax import Documented, documented

SOURCES = Path(__file__).parents[1] / "src"
DRAWN = re.compile(r"\S {2,}\S|[─│┌└├►▲▼▒█▇]")


def docstring_of(node: Documented) -> str:
    """Return a docstring by its columns in the source, without the indentation of its code."""
    text = ast.get_docstring(node, clean=False)
    if text is None:
        return ""
    first, *rest = text.split("\n")
    return "\n".join([first, *(line[node.body[0].col_offset :] for line in rest)])


def paragraphs(docstring: str) -> Iterator[list[str]]:
    """Yield the lines between two empty lines, without examples that run."""
    for paragraph in re.split(r"\n\s*\n", docstring):
        lines = [line for line in paragraph.split("\n") if line.strip()]
        if lines and not any(line.startswith(">>>") for line in lines):
            yield lines


def exposed(docstring: str) -> list[str]:
    """Return the lines of drawings that a formatter would take for prose."""
    found = []
    for lines in paragraphs(docstring):
        drawn = [line for line in lines if DRAWN.search(line)]
        if 2 * len(drawn) >= len(lines):
            found += [line for line in drawn if not line.startswith("    ")]
    return found


def test_drawings_are_literal_blocks() -> None:
    wrong = {}
    for path in some(SOURCES.rglob("*.py")):
        nodes = documented(ast.parse(path.read_text(encoding="utf-8")))
        lines = [line for node in nodes for line in exposed(docstring_of(node))]
        if lines:
            wrong[path.relative_to(SOURCES).as_posix()] = lines
    assert wrong == {}


@pytest.mark.parametrize(
    ("docstring", "count"),
    [
        ("A table:\n\n    one    1\n    two    2", 0),
        ("A table:\n\none    1\ntwo    2", 2),
        ("A way:\n\nmodel ──► program", 1),
        ("A sentence with one  typo in it, which goes on for long,\nand on, and on,\nand on.", 0),
        (">>> table()\none    1\ntwo    2", 0),
    ],
)
def test_what_a_formatter_would_reflow_is_found(docstring: str, count: int) -> None:
    assert len(exposed(docstring)) == count
