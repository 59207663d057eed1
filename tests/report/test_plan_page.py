"""The page of a cluster plan: every number is in the JSON, nothing comes from elsewhere, and text says the same."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import fields, is_dataclass, replace
from functools import cache
from html.parser import HTMLParser
from typing import Any

import pytest

from cluster_models import GIB, Rough, small_cluster, small_transformer
from drumline.core.errors import UsageError
from drumline.core.units import duration, size_text
from drumline.plan.cluster.layout import Layout
from drumline.plan.cluster.practice import Practice
from drumline.plan.layouts.explain import Explanation, brief, drawing, explain
from drumline.plan.layouts.pins import Pins
from drumline.plan.layouts.planner import plan
from drumline.report.draw.chart import Bar, bars
from drumline.report.plan.page import HUES, best_svg, pareto_chart, plan_page, scaling_chart
from drumline.report.plan.text import SECONDS, plan_text
from some import some


@cache
def explained(pipeline: int = 2) -> Explanation:
    machines = small_cluster(memory=1.2 * GIB)
    found = plan(small_transformer(), machines, batch=32, surveyed=Rough().surveyed, pins=Pins(pipeline=pipeline))
    return explain(found)


@cache
def figures(pipeline: int = 2) -> dict[str, Any]:
    told: dict[str, Any] = json.loads(json.dumps(explained(pipeline).to_json(), allow_nan=False))
    return told


def page_of(told: Explanation) -> str:
    assert told.reasons is not None
    return plan_page(told, told.reasons)


@cache
def page(pipeline: int = 2) -> str:
    return page_of(explained(pipeline))


class Told(HTMLParser):
    """Collects what is written, what scripts hold, and every address."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "srcset")]
        assert not any(name == "style" or name.startswith("on") for name, _ in attrs), attrs

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            while self.open.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif "style" not in self.open:
            self.words.append(data)


@pytest.mark.slow
def test_page_asks_for_nothing_from_anywhere() -> None:
    for pipeline in (1, 2):
        told = Told(page(pipeline))
        assert set(told.addresses) == {"data:,"}
        assert "default-src 'none'" in page(pipeline)
        assert not re.search(r"@import|url\(", page(pipeline))


@pytest.mark.slow
def test_page_holds_the_same_json() -> None:
    told = Told(page())
    held = [json.loads(script) for script in told.scripts[:2]]
    assert held[1] == figures()


def test_every_number_of_the_page_is_in_the_json() -> None:
    """Return what the tables show, and find each number in the JSON as the page writes it."""
    written: set[str] = set()

    def walk(value: Any) -> None:
        if isinstance(value, dict):
            for item in value.values():
                walk(item)
        elif isinstance(value, list):
            for item in value:
                walk(item)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            forms = (duration(value), size_text(value), f"{value:.1%}", f"{value:+.1%}", f"{value:,.0f}", str(value))
            written.update(forms)
            written.add(f"{value / 1e12:.0f} TFLOP/s")

    walk(figures())
    chosen = figures()["chosen"]
    shares = [item / chosen["step_seconds"] for item in chosen["seconds"].values()]
    shares += [value / chosen["peak_bytes"] for value in chosen["bytes"].values()]
    written.update(f"{share:.1%}" for share in shares)
    above_and_below = "".join(re.findall(r'<section class="report plan">.*?</section>', page(), re.DOTALL))
    cells = re.findall(r"<(?:td|dd)[^>]*>([^<]*)</(?:td|dd)>", above_and_below)
    number = re.compile(r"^[+-]?[\d,.]+( (s|ms|us|B|KiB|MiB|GiB|TFLOP/s)|%)?$")
    shown = [cell for cell in cells if number.match(cell)]
    assert len(shown) > 100
    strange = [cell for cell in shown if cell not in written and not cell.isdigit()]
    assert strange == []


def test_page_says_the_choice_the_reasons_and_how_to_start() -> None:
    text = " ".join(Told(page()).words)
    told = figures()
    assert told["chosen"]["mesh"] in text
    assert all(report["why"] in text for report in told["best"][1:])
    assert all(report["sentence"] in text for report in told["more"])
    assert all(config["command"] in text for config in told["launch"].values())
    assert all(some(missing in text for config in told["launch"].values() for missing in config["missing"]))


MARKUP = "</pre></script><b id='planted'>&amp;\"'"


def with_markup(value: Any) -> Any:
    """Return a value with markup at the end of every text in it."""
    if isinstance(value, Practice):  # it takes no other text
        return value
    if is_dataclass(value) and not isinstance(value, type):
        kept = {field.name: with_markup(getattr(value, field.name)) for field in fields(value) if field.init}
        return replace(value, **kept)
    if isinstance(value, list | tuple):
        return type(value)(with_markup(item) for item in value)
    return value + MARKUP if isinstance(value, str) else value


@pytest.mark.slow
@pytest.mark.parametrize("what", ["launch", "best", "changes", "margins", "objective", "chosen"])
def test_no_text_of_the_plan_becomes_markup(what: str) -> None:
    whole = explained()
    if what == "chosen":
        best = with_markup(whole.plan.best[:1]) + whole.plan.best[1:]
        whole = replace(whole, plan=replace(whole.plan, best=best))
    elif what in ("changes", "margins"):
        reasons: Any = whole.reasons
        whole = replace(whole, reasons=replace(reasons, **{what: with_markup(getattr(reasons, what))}))
    else:
        whole = replace(whole, **{what: with_markup(getattr(whole, what))})
    told = page_of(whole)
    assert MARKUP in "".join(Told(told).words)
    assert "<b id='planted'>" not in told.replace(json.dumps(MARKUP)[1:-1], "")


@pytest.mark.slow
def test_a_page_without_a_pipeline_has_no_timeline() -> None:
    assert drawing(small_transformer(), small_cluster(), Layout(batch=8, data=8, counts=(12,))) is None
    assert ".toolbar, #overview, .legend, footer { display: none; }" in page(1)
    assert ".toolbar, #overview, .legend, footer { display: none; }" not in page()


def test_a_long_step_is_drawn_shorter_and_says_so() -> None:
    layout = Layout(batch=4096, pipeline=4, data=1, counts=(3, 3, 3, 3))
    drawn = drawing(small_transformer(), small_cluster(4), layout)
    assert drawn is not None
    assert drawn.timeline.program.num_microbatches == 8
    assert drawn.shows == "1f1b: 4 ranks, 4 stages, 8 microbatches instead of 4096; the middle repeats itself"


@pytest.mark.parametrize(("whole", "shown"), [(7, 7), (1500, 1500), (1501, 8)])
def test_a_step_is_drawn_whole_up_to_a_number_of_pairs(whole: int, shown: int) -> None:
    layout = Layout(batch=whole, pipeline=4, data=1, counts=(3, 3, 3, 3))
    drawn = drawing(small_transformer(), small_cluster(4), layout)
    assert drawn is not None
    assert drawn.timeline.program.num_microbatches == shown
    assert ("instead of" in drawn.shows) == (shown < whole)


def test_text_says_what_the_page_says() -> None:
    text = plan_text(explained(), width=400)
    told = figures()
    assert all(report["why"] in text for report in told["best"][1:])
    assert duration(told["chosen"]["step_seconds"]) in text
    assert told["launch"]["drumline"]["command"] in text
    assert "torchtitan" in plan_text(explained(), width=400, framework="torchtitan")
    assert max(map(len, plan_text(explained(), width=60).splitlines())) <= 110  # commands are not torn


def test_a_brief_plan_is_text_too() -> None:
    found = plan(small_transformer(), small_cluster(memory=1.2 * GIB), batch=32, surveyed=Rough().surveyed)
    text = plan_text(brief(found))
    assert "Why the others lose" in text
    assert "What more hardware would gain" not in text


def test_pictures_are_svg_with_every_layout() -> None:
    drawn, reasons = best_svg(explained().plan), explained().reasons
    assert reasons is not None
    root = ET.fromstring(drawn)
    assert root.tag.endswith("svg")
    assert all(some(value["mesh"] in drawn for value in figures()["best"]))
    assert list(HUES) == list(SECONDS)
    for picture in (pareto_chart(explained().plan, reasons), scaling_chart(reasons)):
        assert ET.fromstring(picture).tag.endswith("svg")


def test_bars_are_as_long_as_their_numbers() -> None:
    drawn = bars(
        [Bar("a", {"x": 3.0, "y": 1.0}), Bar("b", {"x": 1.0})], {"x": "#111111", "y": "#222222"}, title="t", x_label="s"
    )
    widths = [float(value) for value in re.findall(r'width="([\d.]+)" height="20" fill="#(?:111111|222222)"', drawn)]
    assert widths[0] == pytest.approx(3 * widths[1], abs=0.02)
    assert widths[2] == pytest.approx(widths[1], abs=0.02)
    with pytest.raises(UsageError):
        bars([], {}, title="t", x_label="s")
