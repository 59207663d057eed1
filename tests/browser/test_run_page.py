"""The page of a report in a real Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from browser.windows import Window, Windows
from drumline.core.measured.run import read_run
from drumline.report.run.page import run_page
from drumline.report.run.report import RunReport, reports_of
from drumline.schedules import generate
from simulated_runs import even_blocks, per_stage, write_simulated_run

Open = Callable[..., Any]


@pytest.fixture
def opened(windows: Windows, tmp_path: Path) -> Iterator[Open]:
    """Open the page of some reports; it must neither complain nor ask for anything."""
    pages: list[Window] = []

    def open_page(*reports: RunReport, **options: Any) -> Any:
        file = tmp_path / "report.html"
        file.write_text(run_page(reports), encoding="utf-8")
        pages.append(windows.open(file.as_uri(), "html[data-painted-ms]", **options))
        return pages[-1].page

    yield open_page
    assert pages
    for page in pages:
        assert page.troubles == []
        assert page.requests == [page.address]


def reports(tmp_path: Path, *names: str, **options: Any) -> list[RunReport]:
    for number, name in enumerate(names):
        program = generate(name, num_ranks=2, num_microbatches=4)
        settings = {"blocks": even_blocks(2, 4), "jitter": 0.1, "num_steps": 6, **options}
        write_simulated_run(tmp_path / f"run{number}", program, per_stage(1e-3, 2e-3), **settings)
    return reports_of([read_run(tmp_path / f"run{number}") for number in range(len(names))])


def test_measured_stands_over_simulated_with_advice_and_panels(opened: Open, tmp_path: Path) -> None:
    found = reports(tmp_path, "1f1b")
    page = opened(*found)
    assert page.locator("#advice").inner_text() == found[0].advice.sentence
    titles = page.locator(".chart h2").all_inner_texts()
    assert titles == [f"measured, step {found[0].step.step}", "simulated, same seconds of every action"]
    cards = page.locator(".card h3").all_inner_texts()
    assert cards[0] == "What to change"
    assert {"Where each rank's step went", "Bubble by cause", "Peak stash", "Most messages waiting"} <= set(cards)
    assert page.locator("figcaption").all_inner_texts()[:3] == ["loss", "seconds from step to step", "utilisation"]
    assert page.evaluate("drumline.stats()")["boxes"] == 32


def test_times_on_the_page_have_their_unit(opened: Open, tmp_path: Path) -> None:
    page = opened(*reports(tmp_path, "1f1b"))
    place = page.evaluate("drumline.place(0, 0.0005)")
    page.mouse.move(place["x"], place["y"])
    said = page.locator("#tip").inner_text().split()
    assert said[said.index("duration") + 2] == "ms"


def test_no_part_of_a_bar_lies_outside_of_it(opened: Open, tmp_path: Path) -> None:
    page = opened(*reports(tmp_path, "1f1b", overhead=1e-4))
    outside = page.evaluate(
        """() => [...document.querySelectorAll(".bar rect")].filter((rect) => {
          const bar = rect.closest("svg").getBoundingClientRect(), own = rect.getBoundingClientRect();
          return own.left < bar.left - 1 || own.right > bar.right + 1;
        }).length"""
    )
    assert page.locator(".bar rect").count() > 8
    assert outside == 0


def test_several_runs_are_compared_on_one_axis(opened: Open, tmp_path: Path) -> None:
    found = reports(tmp_path, "1f1b", "gpipe", "zb-h1")
    page = opened(*found)
    assert page.locator("h1").inner_text() == "Comparison of 3 runs: 1f1b, gpipe, zb-h1"
    assert page.locator(".chart h2").count() == 6
    rows = page.locator(".report table").first.locator("tbody tr").all_inner_texts()
    assert [row.split()[0] for row in rows] == ["run0", "run1", "run2"]
    assert page.locator(".line").count() == 4 * 3


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_fits_every_window_in_both_themes(opened: Open, tmp_path: Path, width: int, scheme: str) -> None:
    page = opened(*reports(tmp_path, "1f1b"), viewport={"width": width, "height": 800}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ink, paper = (
        page.evaluate(f"getComputedStyle(document.querySelector('.cards dd')).{name}")
        for name in ("color", "colorScheme")
    )
    light = sum(map(int, re.findall(r"\d+", ink)[:3])) > 380
    assert light == (scheme == "dark")
    assert paper == scheme


def test_every_number_of_the_panels_is_in_the_json(opened: Open, tmp_path: Path) -> None:
    (found,) = reports(tmp_path, "1f1b", overhead=1e-4, weigh=1000)
    page = opened(found)
    values = [abs(number) for number in numbers(json.loads(json.dumps(found.to_json())))]
    texts = page.locator(".cards dd:not(.note), .row .value, .card td").all_inner_texts()
    shown = [text for text in texts if re.search(r"\d", text)]
    assert len(shown) > 25
    for text in shown:
        amount, low = read(text)
        assert amount == 0 or any(abs(value - amount) <= low for value in values), text


UNITS = {"s": 1.0, "ms": 1e-3, "µs": 1e-6, "%": 1e-2, "KiB": 1024.0, "B": 1.0}


def read(text: str) -> tuple[float, float]:
    """Return the number that a text says, and how far off its rounding may be."""
    match = re.match(r"-?([\d.,]+)\s*(\S*)", text)
    assert match is not None
    number = match[1].replace(",", "")
    unit = UNITS.get(match[2], 1.0)
    digits = len(number.partition(".")[2]) if "." in number else 0
    return float(number) * unit, 0.51 * 10.0**-digits * unit


def numbers(value: Any) -> Iterator[float]:
    """Yield every number in an object."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers(item)
    elif isinstance(value, int | float):
        yield float(value)


def test_names_cannot_become_markup(opened: Open, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    page = opened(*reports(tmp_path, "1f1b", blocks=[[evil] * 4, ["b"] * 4]))
    assert page.locator("img").count() == 0
    assert evil in page.locator(".under").first.inner_text()
