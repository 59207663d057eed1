"""Tests of the tests: each can fail, compares an error of ours by its fields, and stands in a file with a subject.

No test passes because what it goes through is empty. Loops with assertions, and `all(...)` in an assertion, go through
something that is written out, that another assertion of the test speaks of, that cannot be empty by what it is, or
through `some(...)`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from drumline.core import errors
from some import some

FOLDER = Path(__file__).parent
FILES = sorted(FOLDER.rglob("*.py"))
# What cannot be empty: every program has rows, every launch ranks, every model parameters.
FILLED_CALLS = {"some", "admissible", "launch", "named_parameters", "parameters", "programs", "schedules", "spans"}
FILLED_CALLS |= {"split", "splitlines", "two_ranks"}
FILLED_PARTS = {"actions", "executors", "homes", "ranks", "records", "rows", "starts", "tracks", "__slots__"}
OF_FIRST = {"dict", "enumerate", "items", "keys", "list", "reversed", "set", "sorted", "tuple", "values"}
NOTHING = {"()", "[]", "{}", "set()", "0", "''"}
# RankFailed quotes the text of another process.
OURS = {name for name, k in vars(errors).items() if isinstance(k, type) and issubclass(k, errors.DrumlineError)}
OURS -= {"RankFailed"}
COMPARED = re.compile(r"pytest\.raises\(\s*(\([^()]*\)|[\w.]+),\s*match=")


class Function:
    """A test function: which of its names are known to hold something, and what its assertions speak of."""

    def __init__(self, node: ast.FunctionDef, outside: dict[str, bool]) -> None:
        self.node = node
        self.known = outside | {argument.arg: True for argument in (*node.args.args, *node.args.kwonlyargs)}
        self.known |= dict(self.assigned(node))
        asserted = [source.test for source in ast.walk(node) if isinstance(source, ast.Assert)]
        self.spoken_of = {text for test in asserted for text in self.compared(test)}

    def assigned(self, node: ast.AST) -> Iterator[tuple[str, bool]]:
        """Yield the names that are assigned, and whether to something."""
        for source in ast.walk(node):
            if isinstance(source, ast.Assign | ast.AnnAssign) and source.value is not None:
                for target in source.targets if isinstance(source, ast.Assign) else [source.target]:
                    if isinstance(target, ast.Name):
                        yield target.id, self.is_filled(source.value)

    def compared(self, test: ast.expr) -> Iterator[str]:
        """Yield what an assertion says something of, other than by going through it."""
        for item in test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) else [test]:
            sides = [item.left, *item.comparators] if isinstance(item, ast.Compare) else [] if is_all(item) else [item]
            if not any(ast.unparse(side) in NOTHING for side in sides):
                yield from (ast.unparse(part) for side in sides for part in parts_of(side))

    def is_filled(self, node: ast.expr) -> bool:
        """Whether an expression cannot be empty."""
        match node:
            case ast.Tuple() | ast.List() | ast.Set():
                return any(not isinstance(elt, ast.Starred) or self.is_filled(elt.value) for elt in node.elts)
            case ast.Dict():
                return bool(node.keys)
            case ast.Constant():
                return bool(node.value)
            case ast.Name():
                return node.id.isupper() or node.id[0].isupper() or self.known.get(node.id, False)
            case ast.Attribute():
                return node.attr in FILLED_PARTS or node.attr.isupper() or node.attr.startswith("num_")
            case ast.BinOp():
                return self.is_filled(node.left) or (isinstance(node.op, ast.Add) and self.is_filled(node.right))
            case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
                return all(not generator.ifs and self.is_filled(generator.iter) for generator in node.generators)
            case ast.Subscript():
                return not isinstance(node.slice, ast.Slice) and self.is_filled(node.value)
            case ast.IfExp():
                return self.is_filled(node.body) and self.is_filled(node.orelse)
            case ast.Call():
                return self.is_filled_call(node)
        return False

    def is_filled_call(self, node: ast.Call) -> bool:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ast.unparse(node.func)
        if name in FILLED_CALLS or (name == "range" and len(node.args) > 1):
            return True
        if name == "zip":
            strict = any(keyword.arg == "strict" and ast.unparse(keyword.value) == "True" for keyword in node.keywords)
            return (any if strict else all)(map(self.is_filled, node.args))
        if name in OF_FIRST and isinstance(node.func, ast.Attribute):
            return self.is_filled(node.func.value)
        return name in {*OF_FIRST, "range", "map", "product"} and all(map(self.is_filled, node.args[-1:]))

    def holds_something(self, node: ast.expr) -> bool:
        return self.is_filled(node) or any(ast.unparse(part) in self.spoken_of for part in parts_of(node))

    def empty_checks(self) -> Iterator[tuple[int, str]]:
        """Yield line and text of what is gone through and may be empty."""
        for node in ast.walk(self.node):
            if isinstance(node, ast.For) and any(isinstance(part, ast.Assert) for part in ast.walk(node)):
                if not self.holds_something(node.iter):
                    yield node.lineno, ast.unparse(node.iter)
            elif isinstance(node, ast.Assert):
                for call in (part for part in ast.walk(node.test) if is_all(part)):
                    assert isinstance(call, ast.Call)
                    argument = call.args[0]
                    chosen = isinstance(argument, ast.GeneratorExp) and any(part.ifs for part in argument.generators)
                    sources = argument.generators if isinstance(argument, ast.GeneratorExp) else []
                    found = [self.holds_something(part.iter) for part in sources] or [self.is_filled(argument)]
                    if chosen or not min(found):
                        yield node.lineno, ast.unparse(argument)


def parts_of(node: ast.expr) -> Iterator[ast.expr]:
    """Yield an expression and all that has to hold something if it does."""
    yield node
    match node:
        case ast.Call(func=ast.Attribute(value=value), args=[]):
            yield from parts_of(value)
        case ast.Call():
            yield from (part for argument in node.args for part in parts_of(argument))
        case ast.Subscript():
            yield from parts_of(node.value)
        case ast.GeneratorExp() | ast.ListComp() | ast.SetComp() | ast.DictComp():
            yield from (part for generator in node.generators for part in parts_of(generator.iter))
        case ast.Starred():
            yield from parts_of(node.value)


def is_all(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "all"


def empty_checks(text: str) -> list[tuple[int, str]]:
    tree = ast.parse(text)
    outside: dict[str, bool] = {}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            found += list(Function(node, outside).empty_checks())
    return found


@pytest.mark.parametrize("file", [pytest.param(file, id=str(file.relative_to(FOLDER))) for file in FILES])
def test_no_check_goes_through_what_may_be_empty(file: Path) -> None:
    assert empty_checks(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("loop", "is_refused"),
    [
        ("for one in found(): assert one", True),
        ("for one in [x for x in (1, 2) if x > 2]: assert one", True),
        ("assert all(one > 0 for one in found())", True),
        ("assert all(one > 0 for one in (1, 2) if one > 2)", True),
        ("for one in (1, 2): assert one", False),
        ("for one in some(found()): assert one", False),
        ("assert all(some(one > 0 for one in found()))", False),
        ("listed = found()\n    assert len(listed) == 2\n    for one in listed: assert one", False),
    ],
)
def test_loops_that_may_be_empty_are_found(loop: str, is_refused: bool) -> None:
    assert bool(empty_checks(f"def test_it():\n    {loop}\n")) is is_refused


def compared_texts(text: str) -> list[str]:
    """Return the kinds of our errors whose whole text a `pytest.raises` compares."""
    return [kind for kind in COMPARED.findall(text) if OURS & set(re.findall(r"\w+", kind))]


def test_errors_of_ours_are_compared_by_their_fields() -> None:
    found = {str(file.relative_to(FOLDER)): compared_texts(file.read_text(encoding="utf-8")) for file in FILES}
    assert {name: kinds for name, kinds in found.items() if kinds} == {}, "use refused of tests/refused.py"


@pytest.mark.parametrize(
    ("given", "is_found"),
    [
        ("UsageError, match='share is'", True),
        ("dl.DrumlineError, match=words", True),
        ("(KeyError, PlanError), match=words", True),
        ("\n    UsageError,\n    match=words,\n", True),
        ("UsageError", False),
        ("RankFailed, match='rank 1 failed'", False),
        ("ValueError, match='shapes cannot be multiplied'", False),
    ],
)
def test_texts_that_are_compared_whole_are_found(given: str, is_found: bool) -> None:
    assert bool(compared_texts(f"with pytest.raises({given}):\n    run()\n")) is is_found


def test_every_file_says_what_it_tests() -> None:
    files = [file for file in FILES if file.name.startswith("test_")]
    assert len(files) > 100
    assert [str(file) for file in files if not file.read_text(encoding="utf-8").startswith('"""')] == []


FEATURE = re.compile(r"\bdrumline\.features(?:\.(\w+)| import (\w+))")


def features_named(node: ast.AST) -> set[str]:
    """Return the features that a piece of code imports."""
    imports = [source for source in ast.walk(node) if isinstance(source, ast.Import | ast.ImportFrom)]
    return {first or second for item in imports for first, second in FEATURE.findall(ast.unparse(item))}


def features_declared(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the features that marks declare: those of a file in `pytestmark`, those of a test above it."""
    marks = re.findall(r"mark\.features\(([^)]*)\)", " ".join(ast.unparse(node) for node in nodes))
    return {name for names in marks for name in re.findall(r"\w+", names)}


def undeclared(tree: ast.Module) -> set[str]:
    """Return the features that tests of a file import and that neither the file nor the test declares."""
    tests = [statement for statement in tree.body if isinstance(statement, ast.FunctionDef)]
    rest = [statement for statement in tree.body if statement not in tests]
    of_file = features_declared(statement for statement in rest if isinstance(statement, ast.Assign))
    missing = {name for statement in rest for name in features_named(statement)} - of_file
    for test in tests:
        missing |= features_named(test) - of_file - features_declared(test.decorator_list)
    return missing


def test_tests_declare_the_features_that_they_import() -> None:
    """In a tree without one, the tests that need it are left out: see `benchmarks/removable.py`."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.rglob("test_*.py")}
    importing = {name: text for name, text in texts.items() if FEATURE.search(text)}
    found = {name: missing for name, text in some(importing.items()) if (missing := undeclared(ast.parse(text)))}
    assert found == {}
    marks = re.findall(
        r"^(?:pytestmark|@|    pytest).*mark\.features\(([^)]*)\)", "\n".join(texts.values()), re.MULTILINE
    )
    declared = {name for names in marks for name in re.findall(r"\w+", names)}
    known = {path.parent.name for path in (FOLDER.parent / "src/drumline/features").glob("*/__init__.py")}
    assert declared == known  # each has tests, and none is misspelled


def test_a_feature_that_a_test_imports_and_does_not_declare_is_found() -> None:
    code = "import pytest\n{}\ndef test_one():\n    from drumline.features.mesh.reduce import Reducer\n"
    assert undeclared(ast.parse(code.format(""))) == {"mesh"}
    assert undeclared(ast.parse(code.format("@pytest.mark.features('mesh')"))) == set()
    assert undeclared(ast.parse(code.format("pytestmark = pytest.mark.features('mesh', 'stream')"))) == set()
