"""The bugs that `benchmarks/planted.py` plants: each still finds its expression, and leaves Python to be Python."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from planted_bugs import BUGS
from planting import ROOT, Bug
from planting_blocks import NAME as MARKS
from planting_blocks import blocks_of, marked
from planting_noticing import Outcome, must_stay, only_noticing
from planting_random import Drawn, drawn, in_line
from planting_reach import Sites, digest_of, packed, read
from some import some

AT_ONCE = 50  # bugs of one test: files that several change are read once


@pytest.mark.parametrize("first", range(0, len(BUGS), AT_ONCE))
def test_planted_bugs_still_apply(first: int) -> None:
    for bug in some(BUGS[first : first + AT_ONCE]):
        planted = bug.planted_in((ROOT / bug.path).read_text(encoding="utf-8"))
        if bug.path.endswith(".py"):
            compile(planted, bug.path, "exec")
        assert bug.breaks.endswith("."), bug.name
        assert any(test.startswith("tests/") for test in bug.tests()), bug.name


def test_bugs_are_many_everywhere_and_told_apart() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 100
    assert len({(bug.at, bug.old, bug.new) for bug in BUGS}) == len(BUGS)
    folders = Counter(bug.folder for bug in BUGS)
    assert min(folders[name] for name in ("core", "schedules", "model", "runtime", "engine", "features", "plan")) >= 15


def test_a_text_that_is_gone_is_named() -> None:
    gone = Bug("gone", "Program.load", "no such text", "another", "Nothing.")
    with pytest.raises(ValueError, match=r"^gone: Program\.load holds 'no such text' 0 times"):
        gone.planted_in("text = 1")
    with pytest.raises(ValueError, match=r"^'no such text' in Program\.load stands in 0 files of src/drumline"):
        assert gone.file


def test_a_bug_follows_its_function_through_files_and_line_breaks() -> None:
    bug = Bug("larger", "Heap.push", "max(one.size, self.most)", "one.size", "The most is that of the last.")
    text = "class Heap:\n    @cached\n    def push(self, one):\n        self.most = {}\n\n    def most(self): pass\n"
    wrapped = "max(\n            one.size,  # of this\n            self.most,\n        )"
    assert bug.planted_in(text.format(wrapped)) == text.format("one.size")
    twice = text.format("max(one.size, self.most) or max(one.size, self.most)")
    with pytest.raises(ValueError, match=r"^larger: Heap\.push holds 'max\(one\.size, self\.most\)' 2 times"):
        bug.planted_in(twice)
    with pytest.raises(ValueError, match="0 times"):
        bug.planted_in(text.format("0").replace("pass", "return max(one.size, self.most)"))


BRANCHES = '''\
"""A file."""

from __future__ import annotations

LIMIT = 9


def capped(x, most=LIMIT):
    """Return it, or the most."""
    if x > most:
        return most
    try:
        found = {1: "a"}[x]
    except KeyError:
        return [one for one in (x, most) if one > 1]
    else:
        found += "b"
    return found


class Held:
    """Holds."""

    kind = 1

    def late(self):
        def inner():
            return self.kind
        return inner
'''


def reached(call: str) -> set[str]:
    """Run marked code, then a call; return the lines whose block the call reaches."""
    tree, _ = marked(BRANCHES, "branches.py", 100)
    blocks, seen = blocks_of(BRANCHES), dict[int, int]()
    space: dict[str, object] = {"__name__": "branches"}
    exec(compile(tree, "branches.py", "exec"), space)
    assert space[MARKS] == {100 + at: 1 for at in blocks.imported}, "a plain dict where there is no map"
    space[MARKS] = seen
    eval(call, space)
    found, place = set(), 0
    for line in BRANCHES.splitlines(keepends=True):
        at = place + len(line) - len(line.lstrip())
        if line.strip() and any(100 + number in seen for number in blocks.at(at, at + 1)):
            found.add(line.strip())
        place += len(line)
    return found


@pytest.mark.parametrize(
    ("call", "with_", "without"),
    [
        (
            "capped(10)",
            {"def capped(x, most=LIMIT):", "if x > most:", "return most"},
            {"try:", "return found", "LIMIT = 9"},
        ),
        ("capped(1)", {"if x > most:", 'found += "b"', "return found"}, {"return most"}),
        ("capped(2)", {"except KeyError:", 'found = {1: "a"}[x]'}, {'found += "b"', "return self.kind"}),
        ("Held().late()", {"def late(self):", "return inner"}, {"return self.kind", "kind = 1"}),
        ("Held().late()()", {"return self.kind"}, {"kind = 1"}),
    ],
)
def test_marks_tell_which_blocks_ran(call: str, with_: set[str], without: set[str]) -> None:
    found = reached(call)
    assert with_ <= found
    assert not without & found


def test_marked_code_keeps_lines_and_docstrings() -> None:
    tree, _ = marked(BRANCHES, "branches.py", 0)
    space: dict[str, Any] = {"__name__": "branches"}
    exec(compile(tree, "branches.py", "exec"), space)
    assert space["__doc__"] == "A file."
    assert space["capped"].__doc__ == "Return it, or the most."
    assert space["capped"].__code__.co_firstlineno == BRANCHES[: BRANCHES.index("def capped")].count("\n") + 1
    with pytest.raises(TypeError) as caught:
        space["capped"]("x")
    assert caught.traceback[-1].lineno + 1 == BRANCHES[: BRANCHES.index("if x > most")].count("\n") + 1


def test_changes_are_drawn_alike_from_code_alone() -> None:
    text = '''\
"""Prose 1 < 2."""
import os
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    A = 1 < 2
@given(5)
def told(x: Literal[3] = 4, *, flag=True) -> Literal[6]:
    """More 7."""
    assert x < 8, "prose"
    if not x and x is not None:
        raise ValueError(f"{x + 9} is wrong", 10)
    print(11)
    x += 12
    zip(x, x, strict=True)
    return f"{x + 13}" if max(x, -1.5) == 2 else x
class Shown:
    def __repr__(self):
        return 14
'''
    found = Drawn("some.py", text).changes
    assert len(found) > 10
    for change in found:
        compile(change.planted_in(text), "some.py", "exec")
        assert text[change.start : change.end] == change.old
        assert change.line in (7, 10, 11, 13, 14, 15)
    told = {(change.line, change.kind, change.old, change.new) for change in found}
    assert told >= {
        (7, "off by one", "4", "5"),
        (7, "off by one", "4", "3"),
        (7, "truth", "True", "False"),
        (10, "not", "not x", "bool(x)"),
        (10, "and/or", "and", "or"),
        (10, "comparison", "is not", "is"),
        (10, "condition", "not x and x is not None", "not (not x and x is not None)"),
        (13, "operator", "+=", "-="),
        (13, "dropped", "x += 12", "pass"),
        (15, "call", "max", "min"),
        (15, "sign", "-1.5", "(+1.5)"),
        (15, "constant", "1.5", "3.0"),
    }
    assert (11, "dropped") in {entry[:2] for entry in told}
    assert (15, "no result") in {entry[:2] for entry in told}


def test_the_same_seed_draws_the_same_changes() -> None:
    found = drawn(3, 6, ["adapt/d*"])
    assert found == drawn(3, 6, ["adapt/d*"])
    assert found != drawn(4, 6, ["adapt/d*"])
    assert len({change.name for change in found}) == 6
    for change in found:
        assert change.file.startswith("adapt/d")
        text = (ROOT / change.path).read_text(encoding="utf-8")
        assert change.planted_in(text) != text


def test_changes_of_a_line_are_found_by_its_number() -> None:
    text = (ROOT / "src/drumline/adapt/repair.py").read_text(encoding="utf-8")
    line = text[: text.index("_SECONDS_TO_START = ")].count("\n") + 1
    assert {change.new for change in in_line(f"adapt/repair.py:{line}")} == {"120.0", "30.0"}


def test_a_map_knows_which_tests_reach_a_change(tmp_path: Path) -> None:
    """Blocks by number, a file that has changed since as a whole, what is imported by its area."""
    bug = next(bug for bug in BUGS if bug.name == "speeds-upside-down")
    text = (ROOT / bug.path).read_text(encoding="utf-8")
    blocks, digest = blocks_of(text), digest_of(ROOT / bug.path)
    (block,) = blocks.at(*bug.place(text))
    other = next(at for at in range(blocks.count) if at not in blocks.imported and at != block)
    names = ("tests/adapt/test_decide.py::a", "tests/cli/test_cli.py::b", "tests/adapt/test_drift.py::c")
    bits = (1 << 7 + block, 1 << 7 + block, 1 << 7 + other)
    lines: list[dict[str, object]] = [{"sources": {bug.path: [digest, 7, blocks.count]}, "machine": "another"}]
    for name, seconds, bit in zip(names, (3.0, 1.0, 2.0), bits, strict=True):
        file = name.partition("::")[0]
        lines.append({"test": name, "outcome": "passed", "seconds": seconds, "blocks": packed(bit)})
        lines.append({"done": {file: "hash"}, "unit": file, "seconds": 9.0, "left_out": {}})
    path = tmp_path / "map.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut off', encoding="utf-8")
    assert [test.name for test in Sites(read(path)).tests(bug)] == list(names[:2]), "its area first"
    in_c = next(bug for bug in BUGS if bug.path.endswith(".c"))
    assert [test.name for test in Sites(read(path)).tests(in_c)] == []
    near = path.read_text(encoding="utf-8").replace("tests/cli/test_cli.py", "tests/core/test_kernel.py")
    (tmp_path / "near.jsonl").write_text(near, encoding="utf-8")
    assert [test.name for test in Sites(read(tmp_path / "near.jsonl")).tests(in_c)] == ["tests/core/test_kernel.py::b"]
    assert not read(path).is_from_here
    stale = path.read_text(encoding="utf-8").replace(digest, "another text")
    path.write_text(stale, encoding="utf-8")
    assert [test.name for test in Sites(read(path)).tests(bug)] == [names[2], names[0], names[1]]


def test_candidates_that_alone_notice_something_must_stay() -> None:
    made = {"a": ["x", "y"], "b": ["y"], "c": ["z", "x"]}
    outcomes = [Outcome(name, "", "", [], 0, 0, 0.0, must_stay=by) for name, by in made.items()]
    assert must_stay(outcomes, {"x": 0.5, "y": 9.0, "z": 0.1}) == ["y", "z"]
    alone = [Outcome("a", "", "", ["x"], 0, 0, 0.0), Outcome("b", "", "", ["x", "y"], 0, 0, 0.0)]
    assert only_noticing(alone) == {"x": ["a"]}
