"""Pages that say how far off forecasts are say what the benchmark prints."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import published
from drumline.plan.cluster.practice import PRACTICE
from figures import without_comments
from matrices import long
from published_compared import practices_table, table
from published_runs import held_out

pytestmark = pytest.mark.slow  # all need the whole benchmark

ROOT = Path(__file__).resolve().parent.parent.parent
SENTENCE = re.compile(r"off by ([\d.]+)% on average and ([\d.]+)% at worst")
RANGE = re.compile(r"([\d.]+) to ([\d.]+)%\s+(?:on\s+average|with any one preset)")
CHOSEN = re.compile(r"(?:([\d.]+)% needs a preset chosen for each paper|It is ([\d.]+)% only with a preset chosen)")


@pytest.fixture(scope="module")
def printed() -> dict[str, tuple[str, str]]:
    """The lines of the benchmark's last table: mean and worst error by practice, as they are printed."""
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *words, **_: lines.extend(" ".join(map(str, words)).splitlines()))
        patch.setattr("sys.argv", ["published.py"])
        published.main()
    start = next(at for at, line in enumerate(lines) if line.startswith("one practice for all rows"))
    rows = [re.fullmatch(r"(.+?) +([\d.]+)% +([\d.]+)%", line) for line in lines[start + 1 : start + 6]]
    return {row[1]: (row[2], row[3]) for row in rows if row}


def means(printed: dict[str, tuple[str, str]]) -> list[float]:
    return [float(mean) for name, (mean, _) in printed.items() if name != "chosen for each paper"]


@long
def test_the_benchmark_prints_every_practice_for_all_rows(printed: dict[str, tuple[str, str]]) -> None:
    assert list(printed) == [
        "Megatron-LM of 2022",
        "Megatron-LM of 2021",
        "drumline plan",
        "DeepSpeed",
        "chosen for each paper",
    ]
    # The planner's own, row by row and without the table's code.
    misses = [abs(run.under(PRACTICE).estimate().seconds.total / run.seconds - 1) for run in held_out()]
    assert len(misses) == 12
    assert printed["drumline plan"] == (f"{100 * sum(misses) / 12:.1f}", f"{100 * max(misses):.1f}")


@pytest.mark.parametrize("page", ["README.md", "docs/cluster.md"])
def test_pages_name_the_errors_of_the_planner_first(page: str, printed: dict[str, tuple[str, str]]) -> None:
    text = " ".join(without_comments((ROOT / page).read_text(encoding="utf-8")).split())
    assert SENTENCE.findall(text) == [printed["drumline plan"]]


@pytest.mark.parametrize("page", ["docs/cluster.md", "docs/published.md"])
def test_pages_name_the_range_and_what_the_best_figure_needs(page: str, printed: dict[str, tuple[str, str]]) -> None:
    text = " ".join(without_comments((ROOT / page).read_text(encoding="utf-8")).split())
    found = [(float(low), float(high)) for low, high in RANGE.findall(text)]
    assert found == [(min(means(printed)), max(means(printed)))]
    chosen = [first or second for first, second in CHOSEN.findall(text)]
    assert chosen == [printed["chosen for each paper"][0]]


def constant_means() -> tuple[str, str]:
    """Return the mean errors of a constant rate: the best for the SC'21 rows, and the best for the rows themselves."""
    line = next(line for line in table(held_out()).splitlines() if line.startswith("mean error"))
    _, of_sc21, of_these = re.findall(r"([\d.]+)%", line)
    return of_sc21, of_these


@pytest.mark.parametrize("page", ["README.md", "docs/published.md"])
def test_pages_say_that_without_the_software_a_plan_is_no_better_than_a_constant(
    page: str, printed: dict[str, tuple[str, str]]
) -> None:
    text = " ".join(without_comments((ROOT / page).read_text(encoding="utf-8")).split())
    assert "without knowing the software, a plan is no better on average than the best constant rate" in text.lower()
    of_sc21, of_these = constant_means()
    assert f"{of_these}%" in text
    assert float(printed["drumline plan"][0]) >= float(of_these)
    if page == "docs/published.md":
        assert f"{of_sc21}% off on average, and {of_these}% if" in text


def test_readme_promises_no_figure_that_needs_a_preset(printed: dict[str, tuple[str, str]]) -> None:
    assert printed["chosen for each paper"][0] + "%" not in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_results_hold_the_table_that_is_printed() -> None:
    assert practices_table(held_out()) in (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
