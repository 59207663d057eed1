"""Blocks of a source file: what runs as a whole or not at all, and a mark for each that notes that it ran.

    def capped(x):
        if x > 9:         block 1
            return 9      block 3
        return x          block 2: behind a branch begins another

A marked file is compiled code beside the unchanged source (`__pycache__`), so lines, tracebacks and what reads sources
stay as they are, and every process that imports the file marks. A mark sets one byte of a map (`planting_map.py`).
"""

from __future__ import annotations

import ast
import importlib.util
import marshal
import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

NAME = "__reached__"
PRELUDE = f"""\
try:
    from planting_map import REACHED as {NAME}
except ImportError:
    {NAME} = {{}}
"""
_BRANCHES = (ast.If, ast.For, ast.AsyncFor, ast.While, ast.Try, ast.TryStar, ast.With, ast.AsyncWith, ast.Match)


@dataclass
class Blocks:
    """The blocks of a file: which pieces of text belong to which, and which run as the file is imported."""

    imported: set[int] = field(default_factory=set)
    count: int = 0
    pieces: list[tuple[int, int, int]] = field(default_factory=list)  # from, to, block; in order

    def users(self, text: str, name: str) -> set[int]:
        """Return the blocks in whose text a name occurs, but for those that run as the file is imported."""
        word = re.compile(rf"\b{name}\b")
        found = {block for first, last, block in self.pieces if word.search(text, first, last)}
        return found - self.imported

    def at(self, start: int, end: int) -> set[int]:
        """Return the blocks that a change of this piece of text belongs to; between statements: its neighbours."""
        found = {block for first, last, block in self.pieces if first < max(end, start + 1) and start < last}
        if found or not self.pieces:
            return found
        behind = bisect_right([first for first, _, _ in self.pieces], start)
        return {block for _, _, block in self.pieces[max(behind - 1, 0) : behind + 1]}


def blocks_of(text: str) -> Blocks:
    r"""Return the blocks of a source text; what a function takes by default counts as part of the function.

    >>> text = "A = 1\n\ndef capped(x, most=9):\n    if x > most:\n        return most\n    return x\n"
    >>> found = blocks_of(text)
    >>> found.count, found.imported
    (4, {0})
    >>> pieces = ("A", "9", "x > most", "return most", "return x")
    >>> [found.at(text.index(piece), text.index(piece) + 1) for piece in pieces]
    [{0}, {1}, {1}, {3}, {2}]
    """
    offsets, found = Offsets(text), Blocks()
    walked = [(block, statement) for block, _, statement in _walk(ast.parse(text), found)]
    block_of = {id(statement): block for block, statement in walked}
    for block, statement in walked:
        first, last = offsets.of(statement)
        end = min([last, *(offsets.of(item)[0] for item in _inner(statement))])
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            found.pieces.append((first, end, block_of[id(statement.body[0])]))
        else:
            found.pieces.append((first, end, block))
        for entry in getattr(statement, "decorator_list", ()):
            found.pieces.append((*offsets.of(entry), block))
        for handler in (*getattr(statement, "handlers", ()), *getattr(statement, "cases", ())):
            head = handler.pattern if isinstance(handler, ast.match_case) else handler
            found.pieces.append((offsets.at(head.lineno, head.col_offset), offsets.of(handler.body[0])[0], block))
    found.pieces.sort()
    return found


class Offsets:
    """Where a node stands in a text, in characters."""

    def __init__(self, text: str) -> None:
        self._lines = text.splitlines(keepends=True)
        self._begins = [0]
        for line in self._lines:
            self._begins.append(self._begins[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """Return the place of a line (from 1) and a column in bytes."""
        text = self._lines[line - 1] if line <= len(self._lines) else ""
        return self._begins[line - 1] + (
            column if text.isascii() else len(text.encode()[:column].decode(errors="ignore"))
        )

    def of(self, node: ast.stmt | ast.expr) -> tuple[int, int]:
        """Return where a node begins and ends."""
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)


def _lists(node: ast.AST) -> Iterator[list[ast.stmt]]:
    """Yield the lists of statements that stand directly in a node."""
    for name in ("body", "orelse", "finalbody"):
        listed = getattr(node, name, None)
        if isinstance(listed, list) and listed:
            yield listed
    for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        yield handler.body


def _inner(node: ast.stmt) -> Iterator[ast.stmt]:
    yield from (statement for listed in _lists(node) for statement in listed[:1])


def _walk(tree: ast.Module, found: Blocks) -> Iterator[tuple[int, list[ast.stmt], ast.stmt]]:
    """Yield every statement with its block and its list, and count the blocks."""
    waiting: list[tuple[list[ast.stmt], bool]] = [(tree.body, True)]
    while waiting:
        listed, imported = waiting.pop()
        begins = True
        for statement in listed:
            if begins:
                begins = False
                found.count += 1
                if imported:
                    found.imported.add(found.count - 1)
            yield found.count - 1, listed, statement
            begins = isinstance(statement, _BRANCHES)
            at_once = imported and not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef)
            waiting += [(inner, at_once) for inner in _lists(statement)]


def marked(text: str, path: str, first: int) -> tuple[ast.Module, Blocks]:
    """Return a file's syntax tree with a mark before every block, counted from `first`."""
    tree = ast.parse(text, path)
    found = Blocks()
    places: dict[int, tuple[list[ast.stmt], ast.stmt]] = {}
    for block, listed, statement in _walk(tree, found):
        if not _begins_a_file(statement):
            places.setdefault(block, (listed, statement))
    for block, (listed, statement) in places.items():
        mark = ast.parse(f"{NAME}[{first + block}] = 1").body[0]
        listed.insert(listed.index(statement), ast.copy_location(mark, statement))
        for node in ast.walk(mark):
            ast.copy_location(node, statement)
    at = next((at for at, item in enumerate(tree.body) if not _begins_a_file(item)), len(tree.body))
    prelude = ast.parse(PRELUDE).body[0]
    for node in ast.walk(prelude):
        ast.copy_location(node, ast.Pass(lineno=1, col_offset=0, end_lineno=1, end_col_offset=0))
    tree.body.insert(at, prelude)
    return ast.fix_missing_locations(tree), found


def _is_prose(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _begins_a_file(statement: ast.stmt) -> bool:
    return _is_prose(statement) or (isinstance(statement, ast.ImportFrom) and statement.module == "__future__")


def write_marked(source: Path, first: int) -> tuple[Path, int]:
    """Write compiled code with marks where Python would keep that of a source; return its file and how many marks."""
    text = source.read_text(encoding="utf-8")
    tree, found = marked(text, str(source), first)
    code = compile(tree, str(source), "exec", dont_inherit=True)
    target = Path(importlib.util.cache_from_source(str(source)))
    target.parent.mkdir(exist_ok=True)
    unchecked = (1).to_bytes(4, "little")  # of a hash that nobody compares: see PEP 552
    digest = importlib.util.source_hash(source.read_bytes())
    target.write_bytes(importlib.util.MAGIC_NUMBER + unchecked + digest + marshal.dumps(code))
    return target, found.count
