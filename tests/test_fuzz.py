"""Every parser on files that are nearly valid: each is read or refused, and nothing else happens.

`make bench` runs ten thousand cases of each; here are the first of them.
"""

from __future__ import annotations

import random

import pytest

from fuzz import Outcome, fuzz, table
from fuzz_case import Target
from fuzz_mutations import RAW, json_text, rows_text
from fuzz_targets import TARGETS
from matrices import examples

CASES = {"action text": 300, "run folder": 40, "trace": 15, "explore page": 30}


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=lambda value: value.name)
def test_files_are_read_or_refused(target: Target) -> None:
    found = fuzz(target, max(examples(CASES.get(target.name, 80)), 15), seed=7)
    assert found.is_clean, found.found
    # Cases that are all refused, or all read, would prove nothing.
    assert 0 < found.accepted < found.cases == found.accepted + found.refused


def test_cases_are_what_their_seed_makes_them() -> None:
    value = {"a": [1, {"b": 2.5}], "c": "text"}
    first, again = ([json_text(value, random.Random(at)) for at in range(50)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 40


def test_what_json_cannot_write_stands_in_some_cases() -> None:
    texts = [json_text({"a": 1, "b": [2]}, random.Random(at)) for at in range(2000)]
    assert all(any(raw in text for text in texts) for raw in RAW)


def test_rows_are_changed_in_many_ways() -> None:
    texts = {rows_text("0F0,0B0\n1F0,1B0", random.Random(at), ("9F9",)) for at in range(200)}
    assert len(texts) > 60


def test_a_fault_is_counted_with_its_place() -> None:
    def fails(chance: random.Random) -> None:
        raise KeyError("planted")

    found = fuzz(Target("planted", lambda folder: fails), 3)
    assert (found.tracebacks, found.is_clean, list(found.found.values())) == (3, False, [3])
    assert "planted" in table([found])
    assert Outcome("one", hangs=1).is_clean is False
