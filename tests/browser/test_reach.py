"""Whatever a page tells the mouse, it tells the keyboard: values of curves, bars and points, boxes on canvas, strips.

What canvas draws has no elements to measure, so its contrasts are measured in its pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from drumline.core.costs import Costs
from drumline.core.measured.run import read_run
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.report.compare import compare, compare_page
from drumline.report.draw.chart import Graph, Series
from drumline.report.draw.html import page, plain_page
from drumline.report.draw.plot import plot
from drumline.report.run.page import run_page
from drumline.report.run.report import reports_of
from drumline.schedules import generate
from simulated_runs import even_blocks, per_stage, write_simulated_run
from some import some

MEASURE = (Path(__file__).parent / "measure.js").read_text()
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def opened(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    """Open a page in one window for all tests; it must not complain."""
    folder = tmp_path_factory.mktemp("reach")
    context = browser.new_context(viewport={"width": 1280, "height": 900}, device_scale_factor=2)
    shown, troubles = context.new_page(), []
    shown.on("pageerror", lambda error: troubles.append(str(error)))
    shown.on("console", lambda message: troubles.append(message.text))

    def open_page(text: str) -> Any:
        (folder / "page.html").write_text(text, encoding="utf-8")
        shown.emulate_media(color_scheme="light")
        shown.mouse.move(0, 0)
        shown.goto((folder / "page.html").as_uri())
        shown.evaluate(MEASURE)
        return shown

    yield open_page
    context.close()
    assert troubles == []


def timeline(num_ranks: int, num_microbatches: int, **costs: Any) -> Simulation:
    return simulate(generate("1f1b", num_ranks=num_ranks, num_microbatches=num_microbatches), Costs(**costs))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Return the report of runs of some schedules; each is made once."""

    @cache
    def made(*names: str) -> str:
        folder = tmp_path_factory.mktemp("runs")
        for name in names:
            program = generate(name, num_ranks=2, num_microbatches=4)
            write_simulated_run(folder / name, program, per_stage(1e-3, 2e-3), blocks=even_blocks(2, 4), num_steps=4)
        return run_page(reports_of([read_run(folder / name) for name in names]))

    return made


def enter(shown: Any, selector: str) -> None:
    """Give the focus to a picture as Tab does."""
    shown.keyboard.press("Tab")
    shown.evaluate(f"document.querySelector({selector!r}).focus()")


def press(shown: Any, *keys: str) -> str:
    """Press keys, and return what the page then shows; it must also say it."""
    for key in keys:
        shown.keyboard.press(key)
    told = str(shown.locator(".tip.said").text_content())
    assert shown.locator(".tip.said").is_visible()
    assert shown.locator("[role=status]").last.text_content() == told.replace("\n", ", ")
    return told


def test_arrows_walk_the_steps_of_a_curve(opened: Open, report: Callable[..., str]) -> None:
    shown = opened(report("1f1b", "gpipe"))
    enter(shown, ".curve")
    assert press(shown) == "step 0\n1f1b: 1\ngpipe: 1"
    assert press(shown, "ArrowRight", "ArrowRight") == "step 2\n1f1b: 0.3333\ngpipe: 0.3333"
    assert press(shown, "End").startswith("step 3\n")
    ring = shown.locator(".ring").first.bounding_box()
    curve = shown.locator(".curve").first.bounding_box()
    assert ring["x"] + ring["width"] == pytest.approx(curve["x"] + curve["width"] + 4, abs=1)
    assert shown.locator(".ring.round").count() == 2  # one on each curve
    shown.keyboard.press("Escape")
    assert not shown.locator(".tip.said").is_visible()
    assert shown.locator(".ring:visible").count() == 0


def test_values_of_curves_carry_their_unit(opened: Open, report: Callable[..., str]) -> None:
    shown = opened(report("1f1b"))
    enter(shown, ".curve[aria-label^=seconds]")
    assert press(shown, "ArrowRight").split()[-1] == "ms"


def test_arrows_walk_the_parts_of_bars_and_go_from_bar_to_bar(opened: Open, report: Callable[..., str]) -> None:
    shown = opened(report("1f1b"))
    enter(shown, ".bars")
    first = press(shown)
    assert first.startswith("rank 0: busy ")
    assert press(shown, "ArrowRight").startswith("rank 0: wait ")
    assert press(shown, "ArrowDown").startswith("rank 1: ")
    assert press(shown, "ArrowUp", "Home") == first


def test_arrows_walk_the_points_of_a_comparison(opened: Open) -> None:
    found = compare(2, num_microbatches=4)
    shown = opened(compare_page(found, num_ranks=2, num_microbatches=4))
    enter(shown, "#scatter")
    told = [press(shown), *(press(shown, "ArrowRight") for _ in found)]
    for row in some(found):
        assert any(some(f"{row.name}: bubble " in name for name in told)), row.name
    shown.keyboard.press("t")  # draws the points anew
    assert press(shown) == told[-1]


def test_arrows_walk_the_series_of_a_picture(opened: Open) -> None:
    series = [Series("bound", [(1, 0.5), (2, 0.25), (3, 0.2)]), Series("measured", [(3, 0.3)], marks=True)]
    shown = opened(plain_page("a picture", plot(Graph(series, "Bubble", "M", "bubble"))))
    enter(shown, "svg.plane")
    assert press(shown, "ArrowRight") == "bound: M 2, bubble 0.25"
    assert press(shown, "ArrowDown") == "measured: M 3, bubble 0.3"
    assert press(shown, "ArrowUp") == "bound: M 3, bubble 0.2"


def test_pointing_at_a_value_shows_the_same_words(opened: Open, report: Callable[..., str]) -> None:
    shown = opened(report("1f1b"))
    shown.locator(".curve").first.scroll_into_view_if_needed()
    box = shown.locator(".curve").first.bounding_box()
    shown.mouse.move(box["x"] + 2, box["y"] + 20)
    assert shown.locator(".tip.said").text_content() == "step 0: 1"
    assert shown.locator(".curve").first.locator("title").count() == 0  # or the browser would show it as well
    shown.mouse.move(2, 2)
    assert not shown.locator(".tip.said").is_visible()


def test_arrows_go_down_from_the_ranks_to_memory_and_queues(opened: Open) -> None:
    shown = opened(page([timeline(2, 4, activation_bytes=2**20)]))
    enter(shown, ".plot")

    def down(*keys: str) -> str:
        for key in keys:
            shown.keyboard.press(key)
        assert shown.locator(".overlay rect.here").count() == 1
        return str(shown.locator("#tip").inner_text().splitlines()[0])

    assert down("ArrowDown", "ArrowDown") == "Rank 0 holds 1 MiB"
    assert down("ArrowRight") == "Rank 0 holds 2 MiB"
    assert down("ArrowDown", "ArrowDown") == "0 messages wait"
    assert "Sent by rank 0" in shown.locator("#live").inner_text()
    shown.keyboard.press("q")  # hides what the keyboard is in
    shown.locator("#tip").wait_for(state="hidden")  # the page redraws at its next frame


@cache
def large() -> tuple[Simulation, str]:
    """Return a timeline that is drawn on canvas, and its page."""
    drawn = timeline(16, 800)
    return drawn, page([drawn])


def test_arrows_walk_the_boxes_of_a_canvas_with_a_ring_that_is_seen(opened: Open) -> None:
    drawn, text = large()
    shown = opened(text)
    enter(shown, ".plot")
    assert shown.evaluate("drumline.stats().modes") == ["canvas"]
    track = drawn.tracks[1]
    shown.keyboard.press("ArrowDown")
    for index in range(3):
        shown.keyboard.press("ArrowRight")
        words = shown.locator("#tip").inner_text().splitlines()
        assert words[1] == str(track.actions[index])
        shown.locator(".overlay rect.here").wait_for()  # it is drawn with the next frame
        ring = shown.locator(".overlay rect.here").bounding_box()
        place = shown.evaluate(f"drumline.place(1, {(track.starts[index] + track.ends[index]) / 2})")
        assert ring["width"] >= 4
        assert ring["x"] - 1 <= place["x"] <= ring["x"] + ring["width"] + 1
        assert ring["y"] <= place["y"] <= ring["y"] + ring["height"]
        assert words[0] in shown.locator("#live").inner_text()


def test_a_canvas_has_the_contrasts_of_the_svg(opened: Open) -> None:
    drawn, first, last = timeline(32, 64), 22, 150
    shown = opened(page([drawn]))
    # Without timers the view never comes to rest, so it stays on canvas.
    shown.evaluate("() => { window.timer = window.setTimeout; window.setTimeout = () => 0; }")
    shown.evaluate(f"drumline.show({first}, {last})")
    shown.evaluate("() => { window.setTimeout = window.timer; }")

    def low(name: str, places: Sequence[tuple[int, float, float]], least: float) -> list[Any]:
        """Return the places whose contrast is too low, out of eight."""
        chosen = places[:: -(-len(places) // 8)]
        read = shown.evaluate("([name, places]) => places.map((one) => measure.canvas(name, ...one))", [name, chosen])
        return [(entry, value) for entry, value in some(zip(chosen, read, strict=True)) if value < least]

    idle = [(gap.cause.value, gap.rank, max(gap.start, first + 1), min(gap.end, last - 1)) for gap in drawn.causes]
    hatched = [(rank, start, end) for cause, rank, start, end in idle if cause in ("fill", "wait") and end - start >= 2]
    boxes = [
        (rank, start, end)
        for rank, track in enumerate(drawn.tracks)
        for start, end in zip(track.starts, track.ends, strict=True)
        if start > first and end < last
    ]
    for theme in ("light", "dark"):
        shown.emulate_media(color_scheme=theme)
        shown.evaluate("measure.drawn()")
        assert shown.evaluate("drumline.stats().modes") == ["canvas"]
        assert low("hatch", hatched, 3) == []
        assert low("cause", [entry for entry in hatched if entry[2] - entry[1] >= 6], 4.5) == []
        assert low("box", boxes, 3) == []
        assert low("label", [box for box in boxes if box[2] - box[1] == 2], 4.5) == []
        assert low("axis", [(31, first + 1, last - 1)], 4.5) == []


def test_what_is_narrower_than_pixels_stands_out(opened: Open) -> None:
    drawn, text = large()
    shown = opened(text)
    wait = next(cause for cause in drawn.causes if cause.rank == 0)
    for theme in ("light", "dark"):
        shown.emulate_media(color_scheme=theme)
        shown.evaluate("measure.drawn()")
        assert "narrower than pixels" in shown.locator(".heading").inner_text()
        assert shown.evaluate(f"measure.canvas('hatch', 0, {wait.start}, {wait.end})") >= 3
        assert shown.evaluate("measure.canvas('rim', 0, 1000, 1400)") >= 3
