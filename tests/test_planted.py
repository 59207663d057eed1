"""The bugs that `benchmarks/planted.py` plants: each still finds its text, and what comes of it is Python."""

from __future__ import annotations

from collections import Counter

import pytest

from planted_bugs import BUGS
from planting import ROOT, Bug


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_still_applies(bug: Bug) -> None:
    compile(bug.planted_in((ROOT / bug.path).read_text(encoding="utf-8")), bug.path, "exec")
    assert bug.breaks.endswith(".")
    assert any(test.startswith("tests/") for test in bug.tests())


def test_bugs_are_many_everywhere_and_told_apart() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 100
    assert len({(bug.file, bug.old, bug.new) for bug in BUGS}) == len(BUGS)
    folders = Counter(bug.folder for bug in BUGS)
    assert min(folders[one] for one in ("core", "schedules", "runtime", "pipeline", "plan")) >= 15


def test_a_text_that_is_gone_is_named() -> None:
    gone = Bug("gone", "core/rules.py", "no such text", "another", "Nothing.")
    with pytest.raises(ValueError, match=r"^gone: src/drumline/core/rules\.py holds 'no such text' 0 times"):
        gone.planted_in("text")
