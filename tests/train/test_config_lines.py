"""The line of every key of a TOML text, however it is written."""

from __future__ import annotations

import tomllib
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from drumline.plan.launch.toml import written
from drumline.train.config.toml_lines import Path, line_finder
from some import some

TEXT = '''# a comment = 1
format = "x # no comment"
a.b."c d" = 1 # =
[optimizer]
settings = { betas = [0.9, # first
   0.95], x.y = """
two lines"b\\"""" }
[[optimizer.groups]]
names = ["a", 'b]', [1, 2]]
[[optimizer.groups]]
names = []
[optimizer.groups.settings]
"l\\u00e4st" = \'\'\'
x = 3
\'\'\'\'
'with "quotes"' = 1979-05-27T07:32:00Z
'''
LINES: dict[Path, int] = {
    ("format",): 2,
    ("a",): 3,
    ("a", "b"): 3,
    ("a", "b", "c d"): 3,
    ("optimizer",): 4,
    ("optimizer", "settings"): 5,
    ("optimizer", "settings", "betas"): 5,
    ("optimizer", "settings", "betas", 0): 5,
    ("optimizer", "settings", "betas", 1): 6,
    ("optimizer", "settings", "x"): 6,
    ("optimizer", "settings", "x", "y"): 6,
    ("optimizer", "groups"): 8,
    ("optimizer", "groups", 0): 8,
    ("optimizer", "groups", 0, "names"): 9,
    ("optimizer", "groups", 0, "names", 0): 9,
    ("optimizer", "groups", 0, "names", 1): 9,
    ("optimizer", "groups", 0, "names", 2): 9,
    ("optimizer", "groups", 0, "names", 2, 0): 9,
    ("optimizer", "groups", 0, "names", 2, 1): 9,
    ("optimizer", "groups", 1): 10,
    ("optimizer", "groups", 1, "names"): 11,
    ("optimizer", "groups", 1, "settings"): 12,
    ("optimizer", "groups", 1, "settings", "läst"): 13,
    ("optimizer", "groups", 1, "settings", 'with "quotes"'): 16,
}


def test_headers_dotted_keys_arrays_of_tables_inline_tables_and_long_strings() -> None:
    line_of = line_finder(TEXT)
    assert {path: line_of(path) for path in paths(tomllib.loads(TEXT))} == LINES


def test_windows_line_ends_count_once() -> None:
    line_of = line_finder(TEXT.replace("\n", "\r\n"))
    assert {path: line_of(path) for path in LINES} == LINES


def test_what_is_not_there_has_no_line() -> None:
    line_of = line_finder(TEXT)
    absent: tuple[Path, ...] = (("run",), ("optimizer", "groups", 2), ("optimizer", "groups", "names"), ("format", 0))
    assert [line_of(path) for path in absent] == [None] * 4


values: Any = st.recursive(
    st.integers(-5, 5) | st.booleans() | st.text(max_size=4) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def paths(value: Any, path: Path = ()) -> dict[Path, None]:
    """Return the path of everything in a value."""
    items = enumerate(value) if isinstance(value, list) else value.items() if isinstance(value, dict) else ()
    found = {path: None} if path else {}
    for name, item in items:
        found |= paths(item, (*path, name))
    return found


@given(st.lists(st.tuples(st.text(max_size=3), values, st.integers(0, 2)), min_size=1, max_size=6))
@settings(max_examples=150, deadline=None)
def test_every_key_and_item_of_any_text_has_the_line_that_it_is_written_in(pairs: Any) -> None:
    keys = {name: (value, gap) for name, value, gap in pairs}
    lines: list[str] = []
    expected = {}
    for name, (value, gap) in keys.items():
        lines += ["# = [ {"] * gap
        lines.append(f"{written({name: value})[2:-2]}")
        expected[name] = len(lines)
    text = "\n".join(lines)
    read = tomllib.loads(text)
    line_of = line_finder(text)
    for path in some(paths(read)):
        assert line_of(path) == expected[path[0]]
