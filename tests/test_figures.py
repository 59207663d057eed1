"""Every number with a unit in README and docs says where it is from, and every measured one is a checked-in result."""

from __future__ import annotations

import json
import re
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from figures import CODE, PAGES, ROOT, faults, results, runs
from some import some

KNOWN = {"adapt/pause": ([Decimal("16.9"), Decimal("17.8")], "ms"), "link/over": ([Decimal("1.021")], "times")}
RESULTS = ROOT / "benchmarks" / "results.json"
BLOCK = re.compile(r"^```(?:console|python|output)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@cache
def shown() -> dict[str, str]:
    """Return what stands in the blocks of every page that tests run."""
    return {path.name: "\n".join(BLOCK.findall(path.read_text(encoding="utf-8"))) for path in PAGES}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_every_number_says_where_it_is_from(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    assert faults(page, results(), shown() | {"": shown()[path.name]}) == []


def sections() -> dict[str, str]:
    """Return what stands below each heading of RESULTS.md, its white space as single spaces."""
    parts = re.split(r"^## (.*)$", (RESULTS.parent / "RESULTS.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(set(parts[1::2])) == len(parts[1::2])
    return {heading: " ".join(text.split()) for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def groups() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text(encoding="utf-8"), parse_float=Decimal)
    return found


def forms(text: str, values: list[Decimal]) -> set[str]:
    """Return a text of RESULTS.md with its values, as tables write them and with commas.

    >>> sorted(forms("{} ms of {}", [Decimal("4372.60"), Decimal(2)]))
    ['4,372.60 ms of 2', '4372.60 ms of 2']
    """
    assert text.count("{}") == len(values)
    return {text.replace("{}", "%s") % tuple(format(value, form) for value in values) for form in ("", ",")}


@pytest.mark.parametrize("script", groups())
def test_results_stand_in_the_newest_tables(script: str) -> None:
    group = groups()[script]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", group["date"])
    assert group["machine"]
    below = sections()[group["heading"]]
    assert script.split("-")[0] in group["heading"]
    missing = [
        f"{name}: {text!r}"
        for name, entry in group["results"].items()
        for text, values in entry["values"].items()
        if not any(form in below for form in forms(text.replace("%", "%%"), values))
    ]
    assert missing == [], "RESULTS.md says otherwise"


def test_every_result_is_shown_on_a_page() -> None:
    said = {run.said for path in PAGES for run in runs(path.read_text(encoding="utf-8"))}
    used = {key for text in said if text for key in re.split(r"^1 [-/] | - 1$| / ", text)}
    assert [key for key in some(results()) if key not in used] == []


WRONG = {
    "no comment": ("It took 17 ms.", "'17 ms' is not said to be from anywhere"),
    "another value": ("17 to 19 ms<!-- adapt/pause -->", "19 ms where adapt/pause has 17.8 ms"),
    "another unit": ("17 to 18 s<!-- adapt/pause -->", "17 s where adapt/pause has 16.9 ms"),
    "more digits than there are": ("16.90 to 17.81 ms<!-- adapt/pause -->", "17.81 ms where adapt/pause has 17.8 ms"),
    "fewer numbers": ("17 ms<!-- adapt/pause -->", "has 1 numbers, adapt/pause has 2"),
    "an unknown key": ("17 ms<!-- adapt/pose -->", "neither a kind nor a key"),
    "an unknown kind": ("17 ms<!-- guessed -->", "neither a kind nor a key"),
    "a space before the comment": ("17 ms <!-- setting -->", "'17 ms' is not said to be from anywhere"),
    "a section's kind for what was measured": (
        "<!-- numbers: setting -->\n\nWaits 5 s.\nA step took 17 ms.",
        "'17 ms' sounds measured and has no comment of its own",
    ),
    "below a table": (
        "<!-- numbers: counted -->\n| way | ms |\n|---|---|\n| one | 17 |\n\nIt waits 8 ms.",
        "'8 ms' is not said to be from anywhere",
    ),
    "the section before": (
        "## A\n\n<!-- numbers: setting -->\n\nWaits 5 s.\n\n## B\n\nWaits 6 s.",
        "'6 s' is not said to be from anywhere",
    ),
    "a cell under a unit": ("| way | ms |\n|---|---|\n| ours | 12 |\n", "'12' is not said to be from anywhere"),
    "a table's value": (
        "<!-- numbers: adapt/pause -->\n| way | ms |\n|---|---|\n| one | 17 |\n| two | 19 |\n",
        "19 ms where adapt/pause has 17.8 ms",
    ),
    "a list across lines": ("From 5, 6\nand 7% on", "'5, 6 and 7%' is not said to be from anywhere"),
    "a number in words": ("It is three times slower.", "'three times' is not said to be from anywhere"),
    "a ratio": ("It takes 0.72 to 0.86 of its time.", "'0.72 to 0.86' is not said to be from anywhere"),
    "a rate": ("Makes 1,200 rows a second.", "'1,200 rows a second' is not said to be from anywhere"),
    "printed by no block": ("8 ms<!-- shown -->", "no block prints 8"),
    "published nowhere": ("8 ms<!-- published: a paper -->", "published where?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_number_is_found(name: str) -> None:
    page, fault = WRONG[name]
    told = faults(f"# Title\n\n{page}\n", KNOWN, {"": "it took 7 ms"})
    assert [fault in each for each in told][:1] == [True], told


RIGHT = {
    "rounded": "17 to 18 ms<!-- adapt/pause -->",
    "as they are": "16.9 and 17.8 ms<!-- adapt/pause -->",
    "in another unit": "0.0169 s and 0.0178 s<!-- adapt/pause -->",
    "over 1": "2%<!-- link/over - 1 --> longer",
    "a kind": "5 s<!-- setting --> and 6 s<!-- assumed -->",
    "a block's": "7 ms<!-- shown -->",
    "somebody else's": "7 ms<!-- published: https://arxiv.org/abs/2205.05198 -->",
    "a section's kind": "<!-- numbers: setting -->\n\nWaits 5 s.\n\n### Below\n\nWaits 6 s.",
    "a table's kind": "<!-- numbers: counted -->\n| way | ms |\n|---|---|\n| one | 17 |\n\n8 ms<!-- setting -->",
    "a table's key": "<!-- numbers: adapt/pause -->\n| way | ms |\n|---|---|\n| one | 17 |\n| two | 18 |\n",
    "code": "`5 s` and [it](in/5 s)\n\n```text\nIt took 5 s.\n```\n",
    "no unit": "In 2026, 5 steps of 8 ranks, torch 2.13 and x2.",
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_number_is_let_be(name: str) -> None:
    assert faults(f"# Title\n\n{RIGHT[name]}\n", KNOWN, {"": "it took 7 ms"}) == []


def test_comments_do_not_show() -> None:
    """A line that begins with a comment would end its paragraph."""
    begins = [
        f"{path.name}: {line}"
        for path in PAGES
        for line in CODE.sub("", path.read_text(encoding="utf-8")).split("\n")
        if re.match(r"\s*<!--", line) and not re.fullmatch(r"<!-- [^>]* -->", line)
    ]
    assert begins == []
