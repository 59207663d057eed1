"""Charts as SVG: points, axes, names and colours, and what cannot be drawn."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from drumline.core.errors import UsageError
from drumline.core.program import Program
from drumline.report.draw.chart import Bar, Series, bars, chart
from drumline.report.draw.html import program_html
from refused import refused

SVG = "{http://www.w3.org/2000/svg}"


def drawn(*series: Series, **more: object) -> ElementTree.Element:
    return ElementTree.fromstring(
        chart(list(series), title="<t & t>", x_label="x", y_label="y", **more)  # type: ignore[arg-type]
    )


def test_points_lie_where_their_numbers_are() -> None:
    root = drawn(Series("a", [(0, 0), (5, 5), (10, 10)], marks=True))
    places = [(float(element.attrib["cx"]), float(element.attrib["cy"])) for element in root.iter(f"{SVG}circle")][:3]
    (left, bottom), (middle, half), (right, top) = places
    assert left < middle < right
    assert bottom > half > top
    assert middle == pytest.approx((left + right) / 2)
    assert half == pytest.approx((top + bottom) / 2)


def test_an_axis_that_doubles_gives_every_doubling_the_same_room() -> None:
    root = drawn(Series("a", [(1, 0), (2, 1), (4, 2), (8, 3)], marks=True), log_x=True)
    places = [float(element.attrib["cx"]) for element in root.iter(f"{SVG}circle")][:4]
    steps = [b - a for a, b in pairwise(places)]
    assert steps == pytest.approx([steps[0]] * 3, abs=0.02)
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert [name for name in ("1", "2", "4", "8") if name in texts] == ["1", "2", "4", "8"]


def test_every_series_is_named_and_has_its_own_colour() -> None:
    root = drawn(
        Series("curve", [(1, 1), (2, 4)]), Series("points", [(1, 2)], marks=True), Series("way", [(1, 3), (2, 2)])
    )
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert {"curve", "points", "way"} <= set(texts)
    assert len({element.attrib["stroke"] for element in root.iter(f"{SVG}polyline")}) == 2
    notes = [element.text or "" for element in root.iter(f"{SVG}title")]
    assert "curve: x 2, y 4" in notes


def test_nothing_of_it_asks_for_anything() -> None:
    text = chart([Series("a", [(1, 1)])], title="t", x_label="x", y_label="y")
    assert not re.search(r"href|url\(|<style|<script", text)


@pytest.mark.parametrize("points", [[], [(1.0, math.nan)], [(math.inf, 1.0)]])
def test_what_cannot_be_drawn_is_refused(points: list[tuple[float, float]]) -> None:
    with refused(UsageError, "no points, or one that is not finite"):
        drawn(Series("a", points))
    with refused(UsageError, "x is 0 on a logarithmic axis", expected="x above 0"):
        drawn(Series("a", [(0, 1)]), log_x=True)


def test_a_name_that_fits_is_whole_and_a_longer_one_keeps_its_end() -> None:
    names = ["n" * 28, "x" * 10 + "y" * 19]
    page = bars([Bar(name, {"busy": 1.0}) for name in names], {"busy": "#000000"}, title="t", x_label="s")
    assert f">{names[0]}<" in page
    assert f">...{names[1][-25:]}<" in page
    assert f">{names[1]}<" not in page


def test_of_many_violations_a_page_shows_the_first_twenty() -> None:
    broken = Program.parse("\n".join(",".join(f"{stage}B{at}" for at in range(9)) for stage in range(3)))
    assert program_html(broken).count("<li>") == 20
