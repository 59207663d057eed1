"""Names say what a thing is: one class per name, no empty file name, no participle alone, `one` only for a number."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src/drumline"
EMPTY = {"absent", "apart", "finished", "held", "kept", "moved", "relay", "room", "seen", "sketched", "turns"}
MOST_TWICE = 12
# What a name must not be alone, in src: it says that something happened to a thing, not what the thing is.
PARTICIPLES = ("apart", "called", "found", "given", "held", "kept", "made", "own", "seen", "told")
# Names that users read or that files hold, and where.
PUBLIC = {
    ("adapt/proposal.py", "ChangeResult", "kept"): "a key of a run's decisions",
    ("core/measured/measured.py", "Measured", "held"): "shown in docs/timelines.md",
    ("core/measured/record.py", "Record", "held"): "a column of a run's records, in docs/run-files.md",
    ("core/timeline/spans.py", "Transfer", "made"): "a column of a run's messages, in docs/run-files.md",
    ("runtime/draft.py", "Draft.__init__", "held"): "becomes the record's column of that name",
}
# Where `one` is a number.
NUMBERS = {
    ("tests", "pipeline/test_precision.py", "Branched.__init__", "one"): "the first of two layers, before `two`",
    ("tests", "pipeline/test_unused.py", "Spare.__init__", "one"): "the first of two layers, before `two`",
}


def may_bind(*words: str) -> Callable[[str], bool]:
    """Return whether a text may bind one of the words; others are not parsed, which takes long."""
    name = rf"\b_?(?:{'|'.join(words)})\b"
    word = re.compile(name)
    binds = re.compile(
        rf"\b(?:for|lambda|case)\b[^\n]*{name}|\b(?:as|def|class|import)\s+\(?(?:[\w.]+, )*{name}"
        rf"|{name}\s*(?:[:,][^=\n]*)?(?:[-+*/|&^]|:|//)?=(?!=)|(?:[(,*\n]\s*|\n\s+){name}\s*[:,)=]"
    )
    # Around each word, at least two lines before it and one behind it: whole texts take three times as long.
    return lambda text: any(binds.search(text, max(at.start() - 300, 0), at.end() + 200) for at in word.finditer(text))


BINDS_ONE, BINDS_PARTICIPLE = may_bind("one"), may_bind(*PARTICIPLES)


@cache
def texts(folder: Path = SOURCE) -> dict[str, str]:
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in folder.rglob("*.py")}


def bound(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node binds, as variables, parameters, functions or attributes."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        yield node.attr
    elif isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.MatchMapping) and node.rest:
        yield node.rest
    elif isinstance(name := getattr(node, "name", None), str) and not isinstance(node, ast.alias):
        yield name


def bindings(tree: ast.AST, names: frozenset[str], inside: str = "") -> Iterator[tuple[str, str]]:
    """Yield the functions and classes that bind one of these names ("" for the module itself), and the name.

    An underscore before a name does not make it another.
    """
    for node in ast.iter_child_nodes(tree):
        yield from ((inside, name) for name in bound(node) if name.strip("_") in names)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from bindings(node, names, f"{inside}.{node.name}".strip("."))
        else:
            yield from bindings(node, names, inside)


def bound_in(folder: Path, may: Callable[[str], bool], *names: str) -> set[tuple[str, str, str]]:
    """Return where files of a folder bind these names: file, function, name."""
    return {
        (path, *where)
        for path, text in texts(folder).items()
        if may(text)
        for where in bindings(ast.parse(text), frozenset(names))
    }


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


def test_no_participle_is_a_name_by_itself() -> None:
    assert bound_in(SOURCE, BINDS_PARTICIPLE, *PARTICIPLES) == set(PUBLIC)


def test_one_is_a_number() -> None:
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "examples", "scripts")]
    assert sum(len(texts(folder)) for folder in folders) > 1000
    assert {(folder.name, *where) for folder in folders for where in bound_in(folder, BINDS_ONE, "one")} == set(NUMBERS)


BINDING = (
    "def f(x, one): pass",
    "def f(\n    one: int,\n): pass",
    "def f(*one, **two): pass",
    "def one(): pass",
    "async def _one(): pass",
    "class A:\n    one: int",
    "class A:\n    def f(self): self.one = 1",
    "class A:\n    def f(self): self._one: int = 1",
    "[x for one in ()]",
    "[x for _, (one, two) in ()]",
    "(one := 1)",
    "for _, one in (): pass",
    "one: int",
    "one = 1",
    "one, two = 1, 2",
    "two, one = 1, 2",
    "one += 1",
    "one |= 1",
    "f = lambda two, one: 1",
    "with f() as one: pass",
    "with f() as (two, one): pass",
    "try: pass\nexcept E as one: pass",
    "match x:\n    case 1 as one: pass",
    "match x:\n    case {'a': 1, **one}: pass",
    "match x:\n    case [1, *one]: pass",
)


def test_a_binding_of_any_kind_is_found() -> None:
    for text in BINDING:
        assert BINDS_ONE(f"\n{text}\n"), text
        assert {name.strip("_") for _, name in bindings(ast.parse(text), frozenset({"one"}))} == {"one"}, text
    text = (
        "def f(one): pass\nclass A:\n    def g(self): return [one for one in ()], (one := 1)\nfor _, one in (): pass\n"
    )
    assert [where for where, _ in bindings(ast.parse(text), frozenset({"one"}))] == ["f", "A.g", "A.g", ""]


def test_what_only_reads_a_name_binds_nothing() -> None:
    for text in ("f(one)", "x = one.two", "one.two = 3", "one[1] = 2", "f(one=1)", "one_more = 1", "x.found_one()"):
        assert list(bindings(ast.parse(text), frozenset({"one"}))) == [], text
    for words in ("the next one is free; one by one", "f(x.one)", "one_more = 1", "which one is it?"):
        assert not BINDS_ONE(words), words
