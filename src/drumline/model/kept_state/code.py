"""What code says that it reads and changes, from its instructions and its source alone: nothing runs."""

from __future__ import annotations

import ast
import dis
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

_STORES = {"STORE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF", "DELETE_ATTR", "DELETE_GLOBAL", "DELETE_DEREF"}
# Methods that change an object, where nobody looks at what they return.
_CHANGING = {
    "append", "appendleft", "add", "extend", "insert", "update", "put", "setdefault", "pop", "popleft", "popitem",
    "clear", "remove", "discard", "sort", "reverse",
}  # fmt: skip
_RETURNING_NOTHING = {"append", "appendleft", "extend", "insert"}  # of lists, for lambdas
_ALL_AT_ONCE = {"__dict__", "vars", "asdict", "astuple", "attrgetter", "getattr"}
_LOGS = re.compile(r"_?(log|logger|logging|warnings|tqdm|wandb|writer)", re.IGNORECASE)
_LOGGING = {"debug", "info", "warning", "error", "critical", "exception", "warn", "log", "write", "add_scalar"}


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
    """Whether code reads what has a name only to change it or to show it: nothing else can depend on it.

    Code without source may read it; so may code that reads all attributes of an object at once.

    >>> def counts(self):
    ...     self.calls += 1
    ...     self.seen["first"].append(1)
    ...     if self.calls % 100 == 0:
    ...         print(self.calls)
    >>> def reads(self):
    ...     self.calls = number = self.calls + 1
    ...     return number + self.seen.pop()
    >>> is_only_written(counts.__code__, "calls"), is_only_written(counts.__code__, "seen")
    (True, True)
    >>> is_only_written(reads.__code__, "calls"), is_only_written(reads.__code__, "seen")
    (False, False)
    """
    if not _mentions(code, name) and not _mentions(code, *_ALL_AT_ONCE):
        return True
    source = _Source.of(code)
    return source is not None and not source.reads_by_any_name and all(map(source.is_written, source.named(name)))


@lru_cache(maxsize=4096)
def is_only_opened(code: CodeType, name: str) -> bool:
    """Whether code uses an object only by its attributes and methods, and hands it to nobody.

    >>> def counts(self):
    ...     self.notes.calls += 1
    ...     self.notes.add(2)
    >>> def gives(self):
    ...     return vars(self.notes)
    >>> is_only_opened(counts.__code__, "notes"), is_only_opened(gives.__code__, "notes")
    (True, False)
    """
    if not _mentions(code, name):
        return True
    source = _Source.of(code)
    return source is not None and all(map(source.is_opened, source.named(name)))


class EntryKey(NamedTuple):
    """A key of a dict in code: a plain value, or the attribute of `self` that has it."""

    value: Any
    is_attribute: bool


@lru_cache(maxsize=4096)
def entry_keys(code: CodeType, name: str) -> frozenset[EntryKey] | None:
    """Return the keys by which code uses the entries of a dict; None if it may use it in any other way.

    >>> def counts(self):
    ...     STATE[self.name] = STATE.get(self.name, 0) + 1
    >>> def adds(self):
    ...     return sum(STATE.values())
    >>> entry_keys(counts.__code__, "STATE"), entry_keys(adds.__code__, "STATE")
    (frozenset({EntryKey(value='name', is_attribute=True)}), None)
    """
    if not _mentions(code, name) and not _mentions(code, *_ALL_AT_ONCE):
        return frozenset()
    source = _Source.of(code)
    if source is None or source.reads_by_any_name:
        return None
    keys = [_entry_key(source.key_at(node)) for node in source.named(name)]
    return None if None in keys else frozenset(key for key in keys if key is not None)


def _entry_key(node: ast.AST | None) -> EntryKey | None:
    match node:
        case ast.Constant(value=str() | int() as value):
            return EntryKey(value, False)
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return EntryKey(name, True)
    return None


def _mentions(code: CodeType, *names: str) -> bool:
    return any(
        not {*part.co_names, *part.co_freevars, *part.co_varnames, *_texts(part)}.isdisjoint(names)
        for part in _parts(code)
    )


def _texts(code: CodeType) -> Iterator[str]:
    return (constant for constant in code.co_consts if isinstance(constant, str))


class _Source:
    """The syntax of a function."""

    def __init__(self, tree: ast.AST) -> None:
        self._nodes = list(ast.walk(tree))
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        calls = [node for node in self._nodes if isinstance(node, ast.Call)]
        names = {_name_in(node) for node in self._nodes if isinstance(node, ast.Name | ast.Attribute)}
        self.reads_by_any_name = bool(names & _ALL_AT_ONCE - {"getattr"}) or any(
            _name_in(call.func) == "getattr" and not isinstance(call.args[1], ast.Constant) for call in calls
        )

    @staticmethod
    @lru_cache(maxsize=4096)
    def of(code: CodeType) -> _Source | None:
        """Return the syntax of code, if its source is known."""
        try:
            return _Source(ast.parse(textwrap.dedent(inspect.getsource(code))))
        except (OSError, SyntaxError, TypeError):
            return None

    def named(self, name: str) -> list[ast.AST]:
        """Return the parts of code that name something."""
        return [node for node in self._nodes if _name_in(node) == name]

    def key_at(self, node: ast.AST) -> ast.AST | None:
        """Return the key of the one entry that is used of the dict named here; None if it is used otherwise."""
        parent = self._parents[node]
        match parent:
            case ast.Subscript(value=value, slice=key) if value is node:
                return key
            case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[other]) if other is node:
                return key
            case ast.Attribute(attr="get" | "setdefault" | "pop"):
                call = self._parents[parent]
                return call.args[0] if isinstance(call, ast.Call) and call.func is parent and call.args else None
        return None

    def is_opened(self, node: ast.AST) -> bool:
        """Whether of the object named here only a number is taken, or a method called."""
        last = self._last(node)
        if last is node or not isinstance(last, ast.Attribute):
            return not _is_loaded(last)
        return not _is_loaded(last) or _is_called(last, self._parents[last]) or self._is_number(last)

    def _is_number(self, node: ast.AST) -> bool:
        return isinstance(self._parents[node], ast.BinOp | ast.UnaryOp | ast.Compare | ast.AugAssign)

    def is_written(self, node: ast.AST) -> bool:
        """Whether what is named here is only set, changed in place, added to, or shown."""
        if isinstance(node, ast.Constant):
            return False
        name, last = _name_in(node), self._last(node)
        if not _is_loaded(last) or self._is_shown(node, name):
            return True
        if isinstance(last, ast.Attribute) and last is not node:
            return self._is_changed_by_calls(last)
        parent = self._parents[last]
        while isinstance(parent, ast.BinOp | ast.UnaryOp) or _is_extreme(last, parent):
            last, parent = parent, self._parents[parent]
        return isinstance(parent, ast.Assign) and _names_in(parent.targets) == [name]

    def _last(self, node: ast.AST) -> ast.AST:
        """Return what is reached from here by attributes and indices: of `self.a["b"].c`, the whole."""
        parent = self._parents[node]
        while isinstance(parent, ast.Subscript | ast.Attribute) and parent.value is node:
            node, parent = parent, self._parents[parent]
            if isinstance(node, ast.Attribute) and _is_called(node, parent):
                return node
        return node

    def _is_shown(self, node: ast.AST, name: str) -> bool:
        """Whether a value is only printed or logged, or decides whether something is."""
        while not isinstance(node, ast.stmt):
            node, test = self._parents[node], node
        if isinstance(node, ast.Expr):
            return _shows(node.value)
        return isinstance(node, ast.If) and node.test is test and self._only_shows(node, name)

    def _only_shows(self, statement: ast.stmt, name: str) -> bool:
        """Whether a statement does nothing but show something, or change what has the name."""
        if isinstance(statement, ast.If):
            return all(self._only_shows(each, name) for each in (*statement.body, *statement.orelse))
        if isinstance(statement, ast.Assign):
            return list(_names_in(statement.targets)) == [name]
        if isinstance(statement, ast.AugAssign):
            return bool(_name_in(statement.target) == name)
        if isinstance(statement, ast.Expr):
            call = statement.value
            is_own = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
            return _shows(call) or (is_own and bool(_name_in(call.func.value) == name))  # type: ignore[attr-defined]
        return isinstance(statement, ast.Pass)

    def _is_changed_by_calls(self, method: ast.AST) -> bool:
        """Whether this method changes its object, and is called for that: `mean.mul_(0.9).add_(x)`."""
        while isinstance(method, ast.Attribute):
            call = self._parents[method]
            is_changing = method.attr in _CHANGING or (method.attr.endswith("_") and not method.attr.endswith("__"))
            if not is_changing or not _is_called(method, call):
                return False
            if isinstance(self._parents[call], ast.Lambda):
                return method.attr in _RETURNING_NOTHING
            method = self._parents[call]
        return isinstance(method, ast.Expr)


def _name_in(node: ast.AST) -> Any:
    """Return what a part of code names: a variable, an attribute, or, for getattr and keys of __dict__, a text."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Constant(value=name):
            return name
    return None


def _names_in(nodes: Iterable[ast.AST]) -> list[Any]:
    return [_name_in(node) for node in nodes]


def _is_loaded(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Load)


def _is_called(function: ast.AST, call: ast.AST) -> bool:
    return isinstance(call, ast.Call) and call.func is function


def _is_extreme(node: ast.AST, call: ast.AST) -> bool:
    """Whether this is `max(self.largest, x)`."""
    return isinstance(call, ast.Call) and _name_in(call.func) in ("max", "min") and node in call.args


def _shows(call: ast.AST) -> bool:
    """Whether a call prints or logs something."""
    if not isinstance(call, ast.Call):
        return False
    if not isinstance(call.func, ast.Attribute):
        return bool(_name_in(call.func) == "print")
    return bool(_LOGS.fullmatch(str(_name_in(call.func.value)))) and call.func.attr in _LOGGING


def _parts(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _parts(constant)
