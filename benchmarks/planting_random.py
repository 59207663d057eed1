"""Single changes drawn from the syntax tree of the package: a comparison, an operator, a constant, a dropped statement.

A file is drawn by its lines of code, then one of its lines that can change, then one of that line's changes. Nothing is
drawn from prose (docstrings, texts, f-strings, what is raised, warned or printed, `__repr__`), from annotations,
assertions, decorators, imports and `if TYPE_CHECKING`, nor from arguments that only assert or tune (`strict=`,
`stacklevel=`, `maxsize=`).
"""

from __future__ import annotations

import ast
import io
import random
import tokenize
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from itertools import pairwise

from planting import PACKAGE, ROOT, area_of
from planting_blocks import Offsets

Node = ast.stmt | ast.expr
_COMPARED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_COMPARED |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
_OPERATORS = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "*", "**": "*", "&": "|", "|": "&", "@": "*"}
_OPERATORS |= {"<<": ">>", ">>": "<<", "^": "&"}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any", "ceil": "floor", "floor": "ceil"}
_PROSE = {"__repr__", "__str__", "_repr_html_", "__rich__"}
_TOLD = {"print", "warn", "warning", "info", "debug", "cast", "TypeVar", "NewType", "ParamSpec"}
_TUNES = {"strict", "stacklevel", "maxsize", "flush", "help", "metavar"}


@dataclass(frozen=True)
class RandomChange:
    """A change of one piece of one file: characters `start` to `end` become `new`."""

    file: str
    start: int
    end: int
    old: str
    new: str
    kind: str
    line: int
    survives: str = ""

    @property
    def name(self) -> str:
        """What it is told apart by: where, and what becomes of what."""
        return f"{self.file}:{self.line} {self.kind} {self._brief(self.old)} -> {self._brief(self.new)} @{self.start}"

    @property
    def breaks(self) -> str:
        """What it does, in words."""
        return f"{self.kind} in line {self.line}: {self._brief(self.old)} becomes {self._brief(self.new)}"

    @property
    def path(self) -> str:
        """The file's place in the tree."""
        return f"{PACKAGE}/{self.file}"

    @cached_property
    def _tests(self) -> list[str]:
        return area_of(self.file)

    def tests(self) -> list[str]:
        """Return the tests of the file's area."""
        return self._tests

    def place(self, text: str) -> tuple[int, int]:
        """Return where it stands."""
        return self.start, self.end

    def planted_in(self, text: str) -> str:
        """Return the file's text with the change in it."""
        if text[self.start : self.end] != self.old:
            raise ValueError(f"{self.name}: {self.path} holds another text there; expected the one it was drawn from")
        return text[: self.start] + self.new + text[self.end :]

    @staticmethod
    def _brief(text: str) -> str:
        line = " ".join(text.split())
        return line if len(line) <= 40 else line[:37] + "..."


class Drawn:
    """All changes that one file admits."""

    def __init__(self, file: str, text: str) -> None:
        self.file = file
        self.text = text
        self.offsets = Offsets(text)
        self.tokens = [
            (self.offsets.at(*_in_bytes(token)), token.string)
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type in (tokenize.OP, tokenize.NAME)
        ]
        self.changes = [change for change in self.of_all([ast.parse(text)]) if change.old != change.new]

    def change(self, kind: str, node: Node, new: str, old: tuple[int, int] | None = None) -> RandomChange:
        """Return the change of a node, or of a piece of it."""
        start, end = old or self.offsets.of(node)
        line = self.text.count("\n", 0, start) + 1
        return RandomChange(self.file, start, end, self.text[start:end], new, kind, line)

    def of_all(self, nodes: Sequence[ast.AST]) -> Iterator[RandomChange]:
        """Yield the changes of nodes and all that stands in them."""
        for node in nodes:
            yield from self.of(node)
            yield from self.of_all([part for part in _parts(node) if not _is_left_out(part)])

    def of(self, node: ast.AST) -> Iterator[RandomChange]:
        """Yield the changes of one node."""
        match node:
            case ast.Compare():
                sides = [node.left, *node.comparators]
                for left, right in pairwise(sides):
                    yield from self.operator("comparison", node, left, right, _COMPARED)
            case ast.BinOp() if not _is_text(node.left) and not _is_text(node.right):
                yield from self.operator("operator", node, node.left, node.right, _OPERATORS)
            case ast.BoolOp():
                swap = {"and": "or"} if isinstance(node.op, ast.And) else {"or": "and"}
                yield from self.operator("and/or", node, node.values[0], node.values[1], swap)
            case ast.UnaryOp(op=ast.Not()):
                yield self.change("not", node, f"bool({self.source(node.operand)})")
            case ast.UnaryOp(op=ast.USub()):
                yield self.change("sign", node, f"(+{self.source(node.operand)})")
            case ast.Constant():
                yield from self.constant(node)
            case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
                yield self.change("call", node.func, _CALLS[name])
            case ast.Call(func=ast.Attribute(attr=name)) if name in _CALLS:
                end = self.offsets.of(node.func)[1]
                yield self.change("call", node.func, _CALLS[name], (end - len(name), end))
            case ast.IfExp() | ast.If():
                yield self.change("condition", node.test, f"not ({self.source(node.test)})")
            case ast.stmt():
                yield from self.statement(node)

    def source(self, node: ast.expr) -> str:
        """Return a node's text."""
        start, end = self.offsets.of(node)
        return self.text[start:end]

    def between(self, first: int, last: int) -> list[tuple[int, str]]:
        """Return the tokens of a piece of text."""
        return self.tokens[bisect_left(self.tokens, (first, "")) : bisect_left(self.tokens, (last, ""))]

    def operator(
        self, kind: str, node: Node, left: ast.expr, right: ast.expr, swap: dict[str, str]
    ) -> Iterator[RandomChange]:
        """Yield the change of the operator that stands between two nodes."""
        first, last = self.offsets.of(left)[1], self.offsets.of(right)[0]
        found = [(at, text) for at, text in self.between(first, last) if text not in "()"]
        if found:
            text = " ".join(name for _, name in found)
            start, end = found[0][0], found[-1][0] + len(found[-1][1])
            if text in swap and " ".join(self.text[start:end].split()) == text:
                yield self.change(kind, node, swap[text], (start, end))

    def constant(self, node: ast.Constant) -> Iterator[RandomChange]:
        """Yield other values of a constant: the other truth, the next number, another one."""
        value = node.value
        if isinstance(value, bool):
            yield self.change("truth", node, str(not value))
        elif isinstance(value, int):
            yield self.change("off by one", node, f"{value + 1}")
            if value > 0:
                yield self.change("off by one", node, f"{value - 1}")
        elif isinstance(value, float):
            yield self.change("constant", node, repr(value * 2) if value else "1.0")
            yield self.change("constant", node, repr(value / 2) if value else "-1.0")

    def statement(self, node: ast.stmt) -> Iterator[RandomChange]:
        """Yield a statement that is gone, or that says nothing."""
        match node:
            case ast.AugAssign():
                yield self.change("dropped", node, "pass")
                first, last = self.offsets.of(node.target)[1], self.offsets.of(node.value)[0]
                for at, text in self.between(first, last):
                    if text.endswith("=") and text[:-1] in _OPERATORS:
                        new = _OPERATORS[text[:-1]] + "="
                        yield self.change("operator", node, new, (at, at + len(text)))
            case ast.Expr(value=ast.Call() | ast.Await()) | ast.Delete():
                yield self.change("dropped", node, "pass")
            case ast.Raise():
                yield self.change("dropped", node, "pass")
            case ast.Continue() | ast.Break():
                yield self.change("dropped", node, "pass")
            case ast.Return(value=ast.expr() as value) if not _is_none(value):
                yield self.change("no result", node, "return None")


def _in_bytes(token: tokenize.TokenInfo) -> tuple[int, int]:
    line, column = token.start
    return line, len(token.line[:column].encode()) if "\n" not in token.line[:-1] else column


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what of a node can change: no annotations, decorators, nor texts that are told."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef():
            yield from (*node.args.defaults, *(default for default in node.args.kw_defaults if default), *node.body)
        case ast.ClassDef():
            yield from node.body
        case ast.AnnAssign():
            yield from [node.value] if node.value else []
        case ast.Lambda():
            yield from (*node.args.defaults, node.body)
        case ast.Raise():
            return
        case _:
            yield from ast.iter_child_nodes(node)


def _is_left_out(node: ast.AST) -> bool:
    """Whether nothing is drawn from a node."""
    match node:
        case ast.Assert() | ast.Import() | ast.ImportFrom() | ast.JoinedStr():
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.If(test=test):
            return "TYPE_CHECKING" in ast.unparse(test) or "__name__" in ast.unparse(test)
        case ast.FunctionDef(name=name):
            return name in _PROSE
        case ast.keyword(arg=name):
            return name in _TUNES
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name)):
            return name in _TOLD
        case ast.Expr(value=ast.Call() as call):
            return _is_left_out(call)
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
    return False


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def of_file(file: str) -> list[RandomChange]:
    """Return all changes that a file of the package admits, nearly all of which are Python."""
    return Drawn(file, (ROOT / PACKAGE / file).read_text(encoding="utf-8")).changes


def drawn(seed: int, count: int, patterns: Sequence[str] = ()) -> list[RandomChange]:
    """Draw changes, the same ones for the same seed and sources; fewer where there are no more."""
    files = [str(path.relative_to(ROOT / PACKAGE)) for path in sorted((ROOT / PACKAGE).rglob("*.py"))]
    files = [name for name in files if not patterns or any(fnmatch(name, pattern) for pattern in patterns)]
    weights = [_lines_of_code(file) for file in files]
    lines: dict[str, dict[int, list[RandomChange]]] = {}
    draw = random.Random(seed)
    found: dict[str, RandomChange] = {}
    for _ in range(20 * count if any(weights) else 0):
        file = draw.choices(files, weights)[0]
        if file not in lines:
            lines[file] = {}
            for change in of_file(file):
                lines[file].setdefault(change.line, []).append(change)
        if lines[file]:
            change = draw.choice(lines[file][draw.choice(sorted(lines[file]))])
            if change.name not in found and _is_python(change):
                found[change.name] = change
        if len(found) == count:
            break
    return list(found.values())


def in_line(place: str) -> list[RandomChange]:
    """Return all changes of a line, which is given as FILE:LINE."""
    file, _, line = place.rpartition(":")
    return [change for change in of_file(file) if str(change.line) == line and _is_python(change)]


def _is_python(change: RandomChange) -> bool:
    try:
        compile(change.planted_in((ROOT / change.path).read_text(encoding="utf-8")), change.path, "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def _lines_of_code(file: str) -> int:
    """Return how many lines of a file hold code."""
    waiting: list[ast.AST] = [ast.parse((ROOT / PACKAGE / file).read_text(encoding="utf-8"))]
    lines: set[int] = set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.expr | ast.stmt) and not (isinstance(node, ast.Expr) and _is_text(node.value)):
            lines.add(node.lineno)
        waiting += [item for item in ast.iter_child_nodes(node) if not (isinstance(item, ast.expr) and _is_text(item))]
    return len(lines)
