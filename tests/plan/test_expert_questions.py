"""Forty questions with what an expert expects of the answer, written down before the planner was asked."""

from __future__ import annotations

from typing import Any

import pytest

from expert_questions import EXPLAINED, QUESTIONS, unmet
from matrices import left

# Asked in less than half a second each, and of every kind: a class of layouts, a bound, a change, a refusal.
QUICK = (
    "8b-on-one-node",
    "1.7b-on-eight-nodes",
    "8b-on-small-gpus",
    "22b-with-a-batch-of-4",
    "8b-at-128k",
    "8b-for-drumline",
    "8b-on-one-gpu",
    "175b-on-64-small",
    "hfu-with-recomputation",
    "1f1b-bubble",
    "interleaved-has-less-bubble",
)


@pytest.mark.parametrize("name", [*QUICK, *left(*(item["id"] for item in QUESTIONS if item["id"] not in QUICK))])
def test_an_answer_is_what_an_expert_expects_or_explained(name: str) -> None:
    wrong = unmet(question(name))
    assert wrong == [] or name in EXPLAINED, wrong
    assert bool(wrong) == (name in EXPLAINED)


def question(name: str) -> dict[str, Any]:
    return next(item for item in QUESTIONS if item["id"] == name)


def test_there_are_forty_questions_with_reasons() -> None:
    assert len({item["id"] for item in QUESTIONS}) == 40
    assert all(item["why"] and ("expect" in item) != ("refused" in item) for item in QUESTIONS)


def test_what_is_not_as_expected_is_found() -> None:
    asked = question("8b-on-one-node")
    assert [text.split(" (")[0] for text in unmet({**asked, "expect": {"pipeline": 2, "mfu": [0.9, 1.0]}})] == [
        "pipeline is 1, expected 2",
        unmet({**asked, "expect": {"mfu": [0.9, 1.0]}})[0].split(" (")[0],
    ]
    assert unmet({**question("8b-on-one-gpu"), "refused": "too fast"})[0].startswith("refused: llama-3-8b does not fit")
    assert unmet({**asked, "refused": "does not fit"})[0].startswith("planned, not refused")
