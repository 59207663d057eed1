"""The rooms of the house: no folder is crowded, each says what may stand in it, and no import leads round a circle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from syntax import statements

ROOT = Path(__file__).parents[1] / "src"
ROOM = ROOT / "drumline"
MOST = 15
# One recipe and one verb a file: what stands there is told apart by its name.
ANY_NUMBER = {"schedules", "cli"}

FOLDERS = sorted({path.parent for path in ROOM.rglob("*.py")})


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.relative_to(ROOT).as_posix())
def test_a_folder_is_not_crowded_and_says_what_it_is_for(folder: Path) -> None:
    modules = [path.name for path in folder.glob("*.py") if path.name != "__init__.py"]
    assert len(modules) <= MOST or folder.name in ANY_NUMBER, f"{len(modules)} modules: {sorted(modules)}"
    assert ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8")))


def test_no_import_leads_round_a_circle() -> None:
    """Imports for type checking and inside of functions count as well."""
    _, graph = _imported()
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of imports: {' <- '.join(error.args[1])}")


def test_no_room_imports_another_round_a_loop() -> None:
    modules, graph = _imported()
    rooms: dict[str, set[str]] = {}
    for name, others in graph.items():
        rooms.setdefault(_room(modules[name]), set()).update(_room(modules[other]) for other in others)
    reached = {room: _reached(room, rooms) for room in rooms}
    knots = {frozenset({room, *(key for key in far if room in reached.get(key, ()))}) for room, far in reached.items()}
    assert [" ".join(sorted(knot)) for knot in knots if len(knot) > 1] == []


@cache
def _imported() -> tuple[dict[str, Path], dict[str, set[str]]]:
    """Return the file of every module, and which modules each imports."""
    modules = {_name(path): path for path in ROOM.rglob("*.py")}
    return modules, {name: set(_imports(name, path, modules)) for name, path in modules.items()}


def _room(path: Path) -> str:
    return path.parent.relative_to(ROOM).as_posix()


def _reached(room: str, rooms: dict[str, set[str]]) -> set[str]:
    """Return every room that one reaches by imports, itself only round a loop."""
    seen, waiting = set[str](), [room]
    while waiting:
        for other in rooms.get(waiting.pop(), set()) - seen:
            seen.add(other)
            waiting.append(other)
    return seen


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(name: str, path: Path, modules: dict[str, Path]) -> Iterator[str]:
    """Yield every module of ours that a module imports, wherever in it; one name of a package may be a module."""
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            named = (f"{node.module}.{alias.name}" for alias in node.names)
            found = [text if text in modules else node.module for text in named]
        yield from (text for text in found if text in modules and text != name)
