"""Settings of `adapt=`: the defaults that the page lists, the bounds of each, and a move as plain data."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from drumline.adapt.move import Move
from drumline.adapt.settings import Adapt
from drumline.core.errors import UsageError
from refused import refused

PAGE = Path(__file__).parents[2] / "docs" / "adapt.md"
COUNTS = {"patience", "cooldown", "within", "max_activations"}


def test_defaults_are_those_that_the_page_lists() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {name: float(text) for name, text in rows if re.fullmatch(r"[\d.]+", text)}
    assert told.keys() == {"threshold", "patience", "cooldown", "within", "least_gain", "seconds"}
    assert told == {name: getattr(Adapt(), name) for name in told}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        *((name, [1, 2], [0, -1, 1.5, True, "3"]) for name in sorted(COUNTS)),
        ("threshold", [1e-9, 1, 0.5], [0, -0.1, math.inf, math.nan, True, "0.1"]),
        ("seconds", [0.1, 5], [0, -1.0, math.inf, None]),
        ("least_gain", [0, 0.0, 0.999], [1, 1.0, -1e-9, math.nan, False]),
        ("max_bytes", [None, 1, 1e12], [0, -5, math.nan, True]),
        ("max_activations", [None], []),
        ("program", [True, False], [1, None, "yes"]),
        ("rebalance", ["solve", "half", "keep"], ["batch", "", None]),
        ("microbatches", ["keep", "batch", "size"], ["solve", 3]),
    ],
)
def test_each_setting_has_its_bounds(name: str, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert getattr(Adapt(**{name: value}), name) == value
    for value in wrong:
        with refused(UsageError, rf"^adapt: {name} is "):
            Adapt(**{name: value})


def test_what_users_give_is_a_setting_or_none() -> None:
    assert Adapt.of(None) is Adapt.of(False) is None
    assert Adapt.of(True) == Adapt.of({}) == Adapt()
    given = Adapt(patience=7)
    assert Adapt.of(given) is given
    with refused(UsageError, "adapt is 'solve'", expected="a dict"):
        Adapt.of("solve")


def test_a_move_tells_programs_only_where_they_changed() -> None:
    move = Move(7, ("4",), ("3",), (4, 4), (3, 5), "1f1b", "1f1b", "0F0", "0F0", 1000, {"send": 0.25, "agree": 0.5})
    same = move.to_json()
    assert same["balance_after"] == [3, 5]
    assert same["before"] == ["4"]
    assert not {"text_before", "text_after"} & same.keys()
    changed = Move(7, ("4",), ("3",), (4, 4), (3, 5), "1f1b", "own", "0F0", "0F1", 1000, {"send": 0.25}).to_json()
    assert (changed["text_before"], changed["text_after"]) == ("0F0", "0F1")
