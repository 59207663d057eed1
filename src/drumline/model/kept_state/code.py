"""What code says that it reads and changes, from its instructions and its source alone: nothing runs."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF"}
_ADDING = {"append", "appendleft", "add", "extend", "insert", "update", "put", "setdefault"}


class Facts(NamedTuple):
    """What a function's code mentions, with the code inside it."""

    names: frozenset[str]
    stored: frozenset[str]  # attributes, globals, variables of closures that it sets


@lru_cache(maxsize=4096)
def facts_of(code: CodeType) -> Facts:
    """Return what code mentions.

    >>> def forward(self):
    ...     self.calls += 1
    >>> sorted(facts_of(forward.__code__).stored)
    ['calls']
    """
    names, stored = set[str](), set[str]()
    for part in _parts(code):
        names.update(part.co_names, part.co_freevars)
        stored.update(each.argval for each in dis.get_instructions(part) if each.opname in _STORES)
    return Facts(frozenset(names), frozenset(stored))


@lru_cache(maxsize=4096)
def is_only_written(code: CodeType, name: str) -> bool:
    """Whether code never reads what has a name, but to change it: nothing else can depend on it.

    Code without source may read it.

    >>> def counts(self):
    ...     self.calls += 1
    ...     self.seen.append(1)
    >>> def reads(self):
    ...     self.calls = number = self.calls + 1
    ...     return number + self.seen.pop()
    >>> is_only_written(counts.__code__, "calls"), is_only_written(counts.__code__, "seen")
    (True, True)
    >>> is_only_written(reads.__code__, "calls"), is_only_written(reads.__code__, "seen")
    (False, False)
    """
    if not any(name in (*part.co_names, *part.co_freevars, *part.co_consts) for part in _parts(code)):
        return True
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return False
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    return all(_is_written(node, name, parents) for node in ast.walk(tree) if _name_in(node) == name)


def _name_in(node: ast.AST) -> Any:
    """Return what a part of code names: a variable, an attribute, or, for getattr and keys of __dict__, a text."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=name):
            return name
    return None


def _is_written(node: ast.AST, name: str, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether what is named here is only set, changed in place, or added to."""
    if isinstance(node, ast.Constant):
        return False
    if not isinstance(node.ctx, ast.Load):  # type: ignore[attr-defined]
        return True
    parent = parents[node]
    if isinstance(parent, ast.Subscript) and parent.value is node:
        return not isinstance(parent.ctx, ast.Load)
    if isinstance(parent, ast.Attribute):
        return _is_changed_by_calls(parent, parents)
    while isinstance(parent, ast.BinOp | ast.UnaryOp):
        node, parent = parent, parents[parent]
    return isinstance(parent, ast.Assign) and [_name_in(target) for target in parent.targets] == [name]


def _is_changed_by_calls(method: ast.AST, parents: Mapping[ast.AST, ast.AST]) -> bool:
    """Whether this method changes its object, and is called for that: `seen.append(1)`, `mean.mul_(0.9).add_(x)`."""
    while isinstance(method, ast.Attribute):
        call = parents[method]
        is_changing = method.attr in _ADDING or (method.attr.endswith("_") and not method.attr.endswith("__"))
        if not is_changing or not (isinstance(call, ast.Call) and call.func is method):
            return False
        method = parents[call]
    return isinstance(method, ast.Expr)


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
