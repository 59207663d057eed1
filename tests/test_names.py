"""Names say what a thing is: one class per name, no empty file name, and `one` only for a number."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src/drumline"
EMPTY = {"absent", "apart", "finished", "held", "kept", "moved", "relay", "room", "seen", "sketched", "turns"}
MOST_TWICE = 12
# Functions in which `one` is a number, and why.
NUMBERS: dict[tuple[str, str], str] = {}


# Where a name may be bound; files without it are not parsed, which takes long.
BINDS_ONE = re.compile(r"\b(?:for|as|def|class|lambda|import)\b.*\bone\b|[(,*]\s*one\b|\bone\b\s*(?::|=|,)")


@cache
def texts() -> dict[str, str]:
    return {path.relative_to(SOURCE).as_posix(): path.read_text(encoding="utf-8") for path in SOURCE.rglob("*.py")}


def bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.arg):
        yield node.arg
    elif name := getattr(node, "name", None):
        yield name


def functions_that_bind(tree: ast.AST, name: str, inside: str = "") -> Iterator[str]:
    """Yield the functions and classes that bind a name, "" for the module itself."""
    for node in ast.iter_child_nodes(tree):
        if name in bound(node):
            yield inside
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from functions_that_bind(node, name, f"{inside}.{node.name}".strip("."))
        else:
            yield from functions_that_bind(node, name, inside)


def test_few_class_names_are_used_twice() -> None:
    homes = defaultdict(set)
    for path, text in texts().items():
        for name in re.findall(r"^ *class (\w+)", text, re.MULTILINE):
            homes[name].add(path)
    assert len(homes) > 700
    twice = {name: paths for name, paths in homes.items() if len(paths) > 1}
    assert len(twice) <= MOST_TWICE, twice


def test_file_names_say_what_a_file_has() -> None:
    assert [path for path in texts() if Path(path).stem in EMPTY] == []


def test_one_is_a_number() -> None:
    found = {
        (path, name)
        for path, text in texts().items()
        if BINDS_ONE.search(text)
        for name in functions_that_bind(ast.parse(text), "one")
    }
    assert found == set(NUMBERS)


def test_a_binding_of_any_kind_is_found() -> None:
    text = (
        "def f(one): pass\nclass A:\n    def g(self): return [one for one in ()], (one := 1)\nfor _, one in (): pass\n"
    )
    assert list(functions_that_bind(ast.parse(text), "one")) == ["f", "A.g", "A.g", ""]
    for binding in (
        "def f(one): pass",
        "[x for one in ()]",
        "(one := 1)",
        "for _, one in (): pass",
        "one: int",
        "one = 1",
    ):
        assert BINDS_ONE.search(binding), binding
    assert not BINDS_ONE.search("the next one is free; one by one")
