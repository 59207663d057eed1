"""What a module's syntax tree has, without going through its expressions, which are most of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement inside of one, however deep; expressions, which hold none, are passed over.

    >>> [type(node).__name__ for node in statements(ast.parse("if x:\\n    y = [1]\\nelse:\\n    pass"))]
    ['If', 'Assign', 'Pass']
    """
    waiting = [node]
    while waiting:
        node = waiting.pop()
        for field in ("body", "orelse", "handlers", "finalbody", "cases"):
            inner = getattr(node, field, ())
            if isinstance(inner, list):
                yield from inner
                waiting += inner


def documented(tree: ast.Module) -> Iterator[Documented]:
    """Yield what may have a docstring: a module, its classes and its functions.

    >>> [getattr(node, "name", "") for node in documented(ast.parse("def f(): pass\\nclass A:\\n    def g(): pass"))]
    ['', 'f', 'A', 'g']
    """
    yield tree
    yield from (node for node in statements(tree) if isinstance(node, Documented))
