"""The page in a real Chromium: what it shows, what it says, and that it stays by itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from browser.windows import Window, Windows
from drumline.core.costs import Costs
from drumline.core.program import Program
from drumline.core.simulate.simulate import Simulation, simulate
from drumline.core.timeline.idle import Cause
from drumline.core.timeline.timeline import Timeline
from drumline.report.compare import compare
from drumline.report.draw.html import page
from drumline.report.draw.palette import IDLE
from drumline.schedules import generate
from matrices import long
from some import some

EVIL = "<script>alert(1)</script>"


@dataclass
class Opened:
    """A page in the browser, and what tests ask of it."""

    page: Any

    def ask(self, script: str) -> Any:
        return self.page.evaluate(f"drumline.{script}")

    def stats(self) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("stats()")
        return found

    def hover(self, rank: int, time: float, index: int = 0) -> str:
        """Move the mouse to a rank's time and return what the page says there."""
        place = self.ask(f"place({rank}, {time}, {index})")
        self.page.mouse.move(place["x"], place["y"])
        return self.said()

    def said(self) -> str:
        tip = self.page.locator("#tip")
        lines = tip.inner_text().splitlines() if tip.is_visible() else []
        return "\n".join(filter(None, lines))

    def settled(self) -> None:
        """Wait until the view has come to rest and was drawn in full."""
        self.page.wait_for_timeout(400)


Open = Callable[..., Opened]


@pytest.fixture
def opened(windows: Windows, tmp_path: Path) -> Iterator[Open]:
    """Open the page of some timelines; it must neither complain nor ask for anything."""
    pages: list[Window] = []

    def open_page(*timelines: Timeline, page_options: dict[str, Any] | None = None, **options: Any) -> Opened:
        file = tmp_path / "page.html"
        file.write_text(page(timelines, **(page_options or {})), encoding="utf-8")
        pages.append(windows.open(file.as_uri(), "html[data-painted-ms]", **options))
        return Opened(pages[-1].page)

    yield open_page
    for window in pages:
        assert window.troubles == []
        assert window.requests == [window.address]


def timeline(name: str = "1f1b", num_ranks: int = 4, num_microbatches: int = 8, **costs: Any) -> Simulation:
    program = generate(name, num_ranks=num_ranks, num_microbatches=num_microbatches)
    return simulate(program, Costs(**costs))


@pytest.mark.parametrize(
    ("rank", "time", "cause", "words"),
    [
        (3, 1.5, "fill", "The pipeline fills; 3F0 waits for 2F0 of rank 2."),
        (0, 7.0, "wait", "0B0 waits for 1B0 of rank 1."),
        (3, 30.0, "drain", "The pipeline drains; 0B7 of rank 0 ends last."),
    ],
)
def test_hovering_a_bubble_tells_its_cause(opened: Open, rank: int, time: float, cause: str, words: str) -> None:
    said = opened(timeline()).hover(rank, time).splitlines()
    assert said[0].startswith(f"Rank {rank} idle for ")
    assert cause in said
    assert said[-1] == words


def test_hovering_a_box_tells_what_it_is_and_what_it_waited_for(opened: Open) -> None:
    said = opened(timeline()).hover(0, 11).splitlines()
    assert said[0] == "Backward of stage 0 on microbatch 0"
    assert said[1] == "0B0"
    assert said[2:-1] == ["rank", "0", "start", "10", "duration", "2", "end", "12"]
    assert said[-1] == "Waited 6: 0B0 waits for 1B0 of rank 1."


def test_boxes_of_slices_say_which(opened: Open) -> None:
    shown = opened(simulate(generate("1f1b", num_ranks=2, num_microbatches=2, slices=2)))
    said = shown.hover(0, 0.6).splitlines()
    assert said[:2] == ["Forward of stage 0 on microbatch 0.1", "0F0.1"]
    assert "0B0.1 waits for 1B0.1 of rank 1." in shown.hover(0, 2)
    fills = shown.page.locator(".surface rect.box").evaluate_all(
        "boxes => boxes.map((box) => box.getAttribute('fill'))"
    )
    assert len(set(fills)) == 8


def test_every_action_is_one_box_in_svg(opened: Open) -> None:
    shown = opened(timeline("dualpipe"))
    assert shown.stats()["modes"] == ["svg"]
    assert shown.page.locator(".surface rect.box").count() == shown.stats()["boxes"] == 62


def test_all_boxes_can_be_found_where_they_are(opened: Open) -> None:
    drawn = timeline("zb-v")
    shown = opened(drawn)
    for rank, track in enumerate(drawn.tracks):
        for action, start, end in zip(track.actions, track.starts, track.ends, strict=True):
            assert shown.ask(f"boxAt({rank}, {(start + end) / 2})") == str(action)


def test_arrow_keys_pan_and_plus_minus_zero_zoom(opened: Open) -> None:
    shown = opened(timeline())
    whole = shown.stats()["view"]
    shown.page.keyboard.press("+")
    zoomed = shown.stats()["view"]
    assert zoomed["to"] - zoomed["from"] < whole["to"] - whole["from"]
    shown.page.keyboard.press("ArrowRight")
    assert shown.stats()["view"]["from"] > zoomed["from"]
    shown.page.keyboard.press("ArrowLeft")
    assert shown.stats()["view"]["from"] == pytest.approx(zoomed["from"])
    shown.page.keyboard.press("-")
    shown.page.keyboard.press("0")
    assert shown.stats()["view"] == whole


def test_tab_enters_a_timeline_and_arrows_walk_its_boxes(opened: Open) -> None:
    shown = opened(timeline())
    shown.page.locator("[data-do=theme]").focus()
    shown.page.keyboard.press("Tab")
    assert shown.said().splitlines()[1] == "0F0"
    for _ in range(4):
        shown.page.keyboard.press("ArrowRight")
    assert shown.said().splitlines()[-1] == "0B0 waits for 1B0 of rank 1."
    shown.page.keyboard.press("ArrowDown")
    assert shown.said().splitlines()[-1] == "1B0 waits for 2B0 of rank 2."
    assert "1B0 waits for 2B0" in shown.page.locator("#live").inner_text()
    before = shown.stats()["view"]
    shown.page.keyboard.press("Escape")
    assert shown.said() == ""
    shown.page.keyboard.press("+")
    shown.page.keyboard.press("ArrowRight")
    assert shown.stats()["view"]["from"] > before["from"]


def test_walking_brings_the_box_into_view(opened: Open) -> None:
    shown = opened(timeline())
    shown.ask("show(0, 3)")
    shown.page.locator("[data-do=theme]").focus()
    shown.page.keyboard.press("Tab")
    for _ in range(8):
        shown.page.keyboard.press("ArrowRight")
    view = shown.stats()["view"]
    assert view["from"] > 3
    assert view["to"] - view["from"] == pytest.approx(3)


def test_a_wheel_zooms_where_the_mouse_is_and_dragging_pans(opened: Open) -> None:
    shown = opened(timeline())
    shown.hover(1, 20)
    shown.page.mouse.wheel(0, -400)
    shown.settled()
    view = shown.stats()["view"]
    assert view["to"] - view["from"] < 33
    assert view["from"] < 20 < view["to"]
    place = shown.ask("place(1, 20)")
    shown.page.mouse.down()
    shown.page.mouse.move(place["x"] + 120, place["y"], steps=4)
    shown.page.mouse.up()
    assert shown.stats()["view"]["from"] < view["from"]
    assert shown.ask("place(1, 20)")["x"] == pytest.approx(place["x"] + 120, abs=1)


def test_the_critical_path_lights_up_its_boxes(opened: Open) -> None:
    drawn = timeline()
    shown = opened(drawn)
    shown.page.get_by_role("button", name="Critical path").click()
    shown.settled()
    assert shown.page.locator(".surface rect.critical").count() == len(drawn.critical_path) == 22
    assert shown.stats()["critical"] == 22
    shown.page.keyboard.press("c")
    shown.settled()
    assert shown.page.locator(".surface rect.critical").count() == 0


def test_strips_come_and_go(opened: Open) -> None:
    shown = opened(timeline())
    height = shown.page.locator(".plot").bounding_box()["height"]
    assert "up to 4 pairs" in shown.page.locator(".plot").inner_text()
    shown.page.get_by_role("button", name="Memory").click()
    shown.page.get_by_role("button", name="Queues").click()
    assert shown.page.locator(".plot").bounding_box()["height"] < height
    assert shown.page.locator(".strip-name").count() == 0


def test_bytes_are_shown_where_they_are_known(opened: Open) -> None:
    shown = opened(timeline(activation_bytes=2**28))
    assert "1 GiB" in shown.page.locator(".gutter.right").inner_text()
    assert "peak bytes" in shown.page.locator("#summary").inner_text()


def test_stacked_timelines_share_one_time_axis(opened: Open) -> None:
    names = ("1f1b", "zb-h1", "gpipe")
    shown = opened(*map(timeline, names))
    assert [shown.ask(f"place(0, 5, {index})['x']") for index in range(3)] == [shown.ask("place(0, 5)")["x"]] * 3
    shown.ask("show(4, 9)")
    shown.settled()
    assert len({shown.ask(f"place(0, 5, {index})['x']") for index in range(3)}) == 1
    assert shown.page.locator("#summary tbody tr").count() == 3


def test_a_comparison_shows_its_trade_off_and_advice(opened: Open) -> None:
    rows = [
        {"name": name, "bubble": 0.1 * at, "peak_share": 4 - at, "fits": at < 2} for at, name in enumerate("abc", 1)
    ]
    shown = opened(timeline(), timeline("gpipe"), page_options={"rows": rows, "advice": "Take a."})
    assert shown.page.locator("#scatter circle.point").count() == 3
    assert shown.page.locator("#advice").inner_text() == "Take a."


def test_a_hostile_name_is_only_a_name(opened: Open) -> None:
    rows = [{"name": EVIL, "bubble": 0.1, "peak_share": 2, "fits": True}]
    drawn = simulate(Program(timeline().program.rows, name=EVIL))
    shown = opened(drawn, page_options={"title": EVIL, "advice": EVIL, "rows": rows})
    shown.hover(0, 0.5)
    assert shown.page.title() == EVIL
    assert shown.page.locator("h2").filter(has_text=EVIL).count() == 1
    assert shown.page.locator("script").count() == 2


@long
def test_fifty_thousand_boxes_are_drawn_on_canvas(opened: Open) -> None:
    shown = opened(timeline(num_ranks=16, num_microbatches=1600))
    stats = shown.stats()
    assert stats["drawn"] == stats["boxes"] == 51200
    assert stats["modes"] == ["canvas"]
    assert float(shown.page.locator("html").get_attribute("data-first-draw-ms")) > 0
    painted = "(c => c.getContext('2d').getImageData(c.width / 2, 10, 1, 1).data[3])(document.querySelector('canvas'))"
    assert shown.page.evaluate(painted) == 255


def test_canvas_and_svg_say_the_same(opened: Open) -> None:
    drawn = timeline(num_ranks=16, num_microbatches=800)
    shown = opened(drawn)
    wait = next(idle for idle in drawn.causes if idle.rank == 0)
    shown.ask(f"show({wait.start - 800}, {wait.end + 1600})")
    shown.settled()
    assert shown.stats()["modes"] == ["canvas"]
    on_canvas = shown.hover(0, (wait.start + wait.end) / 2)
    shown.ask(f"show({wait.start - 5}, {wait.end + 5})")
    shown.settled()
    assert shown.stats()["modes"] == ["svg"]
    assert shown.hover(0, (wait.start + wait.end) / 2) == on_canvas
    assert f"{wait.before} waits for {wait.waits_for} of rank {wait.on_rank}." in on_canvas


@long
def test_two_hundred_thousand_boxes_still_pan(opened: Open) -> None:
    shown = opened(timeline(num_ranks=64, num_microbatches=1600))
    assert shown.stats()["boxes"] == 204800
    shown.ask("show(0, 1500)")
    shown.settled()
    place = shown.ask("place(3, 700)")
    shown.page.mouse.move(place["x"], place["y"])
    shown.page.mouse.down()
    shown.page.mouse.move(place["x"] - 300, place["y"], steps=10)
    shown.page.mouse.up()
    shown.page.keyboard.press("ArrowRight")
    shown.settled()
    assert shown.stats()["view"]["from"] > 400
    assert shown.stats()["modes"] == ["canvas"]


def test_dark_follows_the_system_and_the_button(opened: Open) -> None:
    shown = opened(timeline(), color_scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    track = "document.querySelector('.surface rect.track').getAttribute('fill')"
    assert shown.page.evaluate(background) == "rgb(18, 22, 27)"
    dark_track = shown.page.evaluate(track)
    shown.page.get_by_role("button", name="Light or dark").click()
    shown.settled()
    assert shown.page.evaluate(background) == "rgb(255, 255, 255)"
    assert shown.page.evaluate(track) != dark_track


def test_a_phone_has_no_sideways_scroll_and_taps_explain(opened: Open) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "has_touch": True, "is_mobile": True}
    rows = [{"name": "1f1b", "bubble": 0.27, "peak_share": 4, "fits": True}]
    shown = opened(timeline(activation_bytes=2**28), timeline("zb-v"), page_options={"rows": rows}, **phone)
    assert shown.page.evaluate("document.documentElement.scrollWidth") <= 360
    shown.page.locator(".plot").first.scroll_into_view_if_needed()
    place = shown.ask("place(0, 7)")
    shown.page.touchscreen.tap(place["x"], place["y"])
    assert "0B0 waits for 1B0 of rank 1." in shown.said()
    tip = shown.page.locator("#tip").bounding_box()
    assert tip["x"] >= 0
    assert tip["x"] + tip["width"] <= 360


def test_two_fingers_zoom(opened: Open) -> None:
    shown = opened(timeline(), has_touch=True, is_mobile=True, viewport={"width": 600, "height": 800})
    left, right = shown.ask("place(1, 10)"), shown.ask("place(1, 20)")
    session = shown.page.context.new_cdp_session(shown.page)

    def touch(kind: str, *across: float) -> None:
        points = [{"x": x, "y": left["y"], "id": at} for at, x in enumerate(across)]
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": points})

    touch("touchStart", left["x"])
    touch("touchStart", left["x"], right["x"])
    for step in range(1, 5):
        touch("touchMove", left["x"] - 10 * step, right["x"] + 10 * step)
    touch("touchEnd")
    assert shown.ask("place(1, 10)")["x"] == pytest.approx(left["x"] - 40, abs=2)
    assert shown.ask("place(1, 20)")["x"] == pytest.approx(right["x"] + 40, abs=2)


def test_another_document_can_be_loaded_in_place(opened: Open) -> None:
    shown = opened(timeline(), timeline("gpipe"))
    shown.page.evaluate(
        "(data => drumline.load({...data, title: 'again', timelines: data.timelines.slice(1)}))"
        "(JSON.parse(document.getElementById('data').textContent))"
    )
    assert shown.stats()["timelines"] == 1
    assert shown.page.locator("h1").inner_text() == "again"
    assert shown.page.locator(".chart h2").inner_text() == "gpipe"


def test_idle_time_is_hatched_in_the_colour_of_its_cause(opened: Open) -> None:
    shown = opened(timeline(comm=0.25))
    paths = "[...document.querySelectorAll('.surface path.hatch')]"
    causes = dict(shown.page.evaluate(f"{paths}.map(one => [one.classList[1], one.getAttribute('stroke')])"))
    assert causes == {cause: IDLE[Cause(cause)].light for cause in ("fill", "drain", "wait", "transfer")}


def test_hovering_a_box_lights_up_its_microbatch_on_all_ranks(opened: Open) -> None:
    shown = opened(timeline())
    shown.hover(2, 3.5)  # 2F1
    boxes = shown.page.locator(".overlay rect.box")
    assert shown.ask("way(1)") == ["0F1", "1F1", "2F1", "3F1", "3B1", "2B1", "1B1", "0B1"]
    assert boxes.count() == 8
    arrows = str(shown.page.locator(".overlay path.way").get_attribute("d"))
    assert arrows.count("M") == arrows.count("C") == 6  # the turn on the last rank is no message
    assert shown.page.locator(".plot.lit").count() == 1
    shown.page.mouse.move(2, 2)
    assert boxes.count() == 0
    assert shown.page.locator(".plot.lit").count() == 0


def test_time_can_be_played_and_stopped(opened: Open) -> None:
    shown = opened(timeline(), timeline("zb-h1"))
    button, curtains = shown.page.locator("[data-do=play]"), shown.page.locator(".curtain rect")
    assert curtains.count() == 0
    button.click()
    assert button.get_attribute("aria-label") == "Pause"
    curtains.first.wait_for()
    button.click()
    assert button.get_attribute("aria-label") == "Play"
    assert curtains.count() == 2
    shown.ask("playAt(16.5)")
    x = shown.ask("place(0, 16.5)")["x"] - shown.page.locator(".plot").first.bounding_box()["x"]
    assert float(str(curtains.first.get_attribute("x"))) == pytest.approx(x, abs=1)


def test_timelines_can_end_together(opened: Open) -> None:
    shown = opened(timeline(), timeline("zb-h1"))
    ends = [shown.ask(f"place(0, {time}, {at})")["x"] for at, time in ((0, 33), (1, 27))]
    assert ends[0] > ends[1] + 50
    shown.page.keyboard.press("e")
    shown.settled()
    left, right = (shown.ask(f"place(0, {time}, {at})")["x"] for at, time in ((0, 33), (1, 27)))
    assert left == pytest.approx(right, abs=1)
    assert shown.hover(0, 26.5, index=1).splitlines()[1] == "0W7"


def test_one_timeline_has_no_ends_to_align(opened: Open) -> None:
    assert not opened(timeline()).page.get_by_role("button", name="Align ends").is_visible()


@pytest.mark.parametrize("width", [1280, 390])
def test_a_comparison_has_no_labels_that_collide_and_nothing_cut_off(opened: Open, width: int) -> None:
    found = compare(num_ranks=4, num_microbatches=8)
    rows = [{**row.summary(), "name": row.name} for row in found]
    window = {"width": width, "height": 800}
    shown = opened(*(row.timeline for row in found), page_options={"rows": rows}, viewport=window)
    boxes = shown.page.evaluate(
        "[...document.querySelectorAll('#scatter text')].map(one => one.getBoundingClientRect().toJSON())"
    )
    for box, other in some(itertools.combinations(boxes, 2)):
        beside = box["right"] <= other["left"] + 1 or other["right"] <= box["left"] + 1
        assert beside or box["bottom"] <= other["top"] + 2 or other["bottom"] <= box["top"] + 2
    assert all(some(box["left"] >= 0 and box["right"] <= width for box in boxes))
    if width == 1280:
        tables = "[...document.querySelectorAll('.scroll')]"
        assert shown.page.evaluate(f"{tables}.every(one => one.scrollWidth <= one.clientWidth)")
