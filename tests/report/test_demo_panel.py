"""What the demo's report says first: theory and measurement apart, each with its numbers."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("torch")

from demo_outcomes import demo_outcomes
from drumline.core.units import percent
from drumline.report.run.page import run_page
from drumline.report.run.report import reports_of
from drumline.train.demo import COMPARED, Outcome
from drumline.train.demo_panel import opening
from some import some


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcome]:
    return demo_outcomes(tmp_path_factory.mktemp("demo"))


def test_theory_and_measurement_are_told_apart(outcomes: list[Outcome]) -> None:
    theory, measured, stash = re.findall(r"<p>(.*?)</p>", opening(outcomes))[:3]
    assert theory.startswith("In theory, both schedules have the same bubble.")
    assert theory.endswith("20.0% for M = 4, 11.1% for M = 8.")
    compared = [outcome for outcome in outcomes if outcome.trial.schedule in COMPARED]
    by_trial = {outcome.trial.name: percent(1 - outcome.utilisation) for outcome in compared}
    for count in (4, 8):
        words = f"for M = {count}, GPipe {by_trial[f'gpipe-{count}']} and 1F1B {by_trial[f'1f1b-{count}']}"
        assert words in measured
    assert "busy" not in measured
    assert "stashes the whole batch" in stash


def test_a_busy_machine_is_named_beside_the_measurement(outcomes: list[Outcome]) -> None:
    sentence = "This machine was busy: equal steps differ by 50%."
    assert sentence in re.findall(r"<p>(.*?)</p>", opening(outcomes, busy=sentence))[1]


def test_bubbles_say_whether_they_are_of_one_step_or_medians(outcomes: list[Outcome]) -> None:
    reports = reports_of([outcome.run for outcome in outcomes])
    page = run_page(reports, opening=opening(outcomes))
    heads = re.findall(r"<th [^>]*>([^<]*bubble[^<]*)</th>", page)
    assert heads == ["bubble in theory", "median bubble, measured", "bubble, step shown", "median bubble, all steps"]
    medians = [report.figures()["median_bubble"] for report in reports]
    for median in some(medians):
        assert f"<td>{percent(median)}</td>" in page or f"class=best>{percent(median)}" in page
