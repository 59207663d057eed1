"""Where an expression stands in the package, by the function that holds it: files may move and lines be broken anew."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "src/drumline"

_NAMED = re.compile(r"^ *(?:async def|def|class) +(\w+)|^ *(\w+)(?:: [^=\n]+)? = ", re.MULTILINE)
_TOKEN = re.compile(r"""#[^\n]*|[A-Za-z_]\w*|\d[\w.]*|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*'|\S""")
_CLOSES = ")]}"
# A function of a C file, up to the bracket that closes it at the start of a line.
_IN_C = re.compile(r"^\w[^;{}()]*?(\w+)\([^;{}]*\)\n\{\n.*?^\}", re.MULTILINE | re.DOTALL)


@cache
def _files() -> dict[str, list[Path]]:
    """Return the package's files by the names that they give."""
    found: dict[str, list[Path]] = {}
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        for name in {value or other for value, other in _NAMED.findall(path.read_text(encoding="utf-8"))}:
            found.setdefault(name, []).append(path)
    for path in sorted((ROOT / PACKAGE).rglob("*.c")):
        for name in spans_of(path.read_text(encoding="utf-8")):
            found.setdefault(name, []).append(path)
    return found


@cache
def home_of(at: str, old: str) -> str:
    """Return the only file of the package that holds an expression in a function of that name.

    >>> home_of("needs_of", "return")
    Traceback (most recent call last):
        ...
    ValueError: 'return' in needs_of stands in 0 files of src/drumline; expected one
    """
    paths = _files().get(at.rpartition(".")[2], [])
    found = [path for path in paths if places_of(path.read_text(encoding="utf-8"), at, old)]
    if len(found) != 1:
        raise ValueError(f"{old!r} in {at} stands in {len(found)} files of {PACKAGE}; expected one")
    return found[0].relative_to(ROOT / PACKAGE).as_posix()


def places_of(text: str, at: str, old: str) -> list[tuple[int, int]]:
    r"""Return where an expression begins and ends in a function, class or constant of a file's text.

    >>> text = "def add(x, y):\n    return max(\n        x,  # the larger\n        y,\n    )\n"
    >>> [text[first:end].split() for first, end in places_of(text, "add", "max(x, y)")]
    [['max(', 'x,', '#', 'the', 'larger', 'y,', ')']]
    >>> places_of(text, "add", "min(x, y)"), places_of(text, "sub", "max(x, y)")
    ([], [])
    """
    spans, exact = spans_of(text).get(at, ()), re.escape(old.strip())
    if found := [hit.span() for first, end in spans for hit in re.compile(exact).finditer(text, first, end)]:
        return found
    wanted = [word for word, *_ in _tokens(old)]
    for first, end in spans:
        words = [(word, first + number, first + two) for word, number, two in _tokens(text[first:end])]
        for start in range(len(words) - len(wanted) + 1):
            piece = words[start : start + len(wanted)]
            if [word for word, *_ in piece] == wanted:
                found.append((piece[0][1], piece[-1][2]))
    return found


@cache
def spans_of(text: str) -> dict[str, list[tuple[int, int]]]:
    r"""Return where functions, classes and constants of a text begin and end, by their names inside of each other.

    >>> spans_of("class A:\n    b = 1\n    def c(self): return 2\n")
    {'A': [(0, 44)], 'A.b': [(13, 18)], 'A.c': [(23, 44)]}
    >>> spans_of("/* C. */\nint add(int x)\n{\n    return x;\n}\n")
    {'add': [(9, 41)]}
    """
    if text.startswith("/*"):
        return {match[1]: [match.span()] for match in _IN_C.finditer(text)}
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    found: dict[str, list[tuple[int, int]]] = {}
    todo: list[tuple[ast.AST, str]] = [(ast.parse(text), "")]
    while todo:
        node, above = todo.pop(0)
        for child_node in ast.iter_child_nodes(node):
            name = _name_of(child_node)
            if name and isinstance(child_node, ast.stmt):
                first = min([child_node.lineno, *(each.lineno for each in getattr(child_node, "decorator_list", ()))])
                begin = place(first, child_node.col_offset)
                end = place(child_node.end_lineno or first, child_node.end_col_offset or 0)
                found.setdefault(f"{above}{name}", []).append((begin, end))
            todo.append(
                (
                    child_node,
                    f"{above}{name}." if name and not isinstance(child_node, ast.Assign | ast.AnnAssign) else above,
                )
            )
    return found


def _name_of(node: ast.AST) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(target, ast.Name) else ""


def _tokens(text: str) -> Iterator[tuple[str, int, int]]:
    """Yield the words of code and where they stand, without comments and commas in front of closing brackets."""
    words = [(hit[0], *hit.span()) for hit in _TOKEN.finditer(text) if not hit[0].startswith("#")]
    for at, word in enumerate(words):
        if word[0] != "," or at + 1 == len(words) or words[at + 1][0] not in _CLOSES:
            yield word
